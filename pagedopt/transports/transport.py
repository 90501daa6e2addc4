"""The interface of transports: how a pointer table reaches a kernel.  A transport lends arguments; the caller launches.

    with transport.lend(table, stream) as lent:
        kernel = …  # for arguments of the type ``lent.kind``
        for argument, chunks in lent.parts():
            kernel(argument, chunks, stream)

Kernels launched on ``stream`` inside the block can read the table.  From its end on the transport guards what the
device may still read: it does not rewrite it before those launches have ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ..tables.layout import HEADER, HostTable, Span

#: A kernel's one argument: a NumPy array of size one, passed by value.
Argument = npt.NDArray[Any]
#: The argument for a table in memory: its address and its header.
TABLE_AT = np.dtype([("words", np.uint64), ("header", HEADER)])


def opaque(fields: npt.NDArray[Any]) -> Argument:
    """Return a view without fields: CuPy would iterate over the fields at every launch."""
    return fields.view(np.dtype((np.void, fields.itemsize)))


def argument_at(address: int, table: HostTable, span: Span | None = None) -> Argument:
    """Return the argument for a table whose words lie at ``address``, for all chunks or a span of them."""
    fields = np.zeros(1, TABLE_AT)
    fields["words"], fields["header"] = address, table.header(*span or ())[0]
    return opaque(fields)


class Lent:
    """The arguments of launches over one table, valid inside a ``with`` block.

    Attributes:
        kind: the C++ type of the arguments (:func:`~pagedopt.tables.layout.table_type`).
        address: where kernels read the words of a table in memory; 0: the table is passed by value.
    """

    kind: str
    address: int = 0

    def parts(self, span: Span | None = None) -> Iterable[tuple[Argument, int]]:
        """Return, for each launch over all chunks or a span of them, its argument and its number of chunks."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing by default: a table passed by value belongs to its launch."""


class Transport(ABC):
    """How pointer tables reach kernels.

    Pass a subclass of your own as ``PagedAdamW(transport=TheClass)``.  It defines :meth:`kind` and :meth:`lend`; its
    constructor is called with the device index alone, and it has no substitute.  Define it at the top level of a
    module, so that optimizers with it can be pickled.

    Args:
        device: index of the CUDA device.

    Attributes:
        copied_bytes: bytes copied by explicit calls, over all tables.
    """

    name: ClassVar[str]
    #: Whether all its tables are in memory, at :attr:`Lent.address`.
    in_memory: ClassVar[bool] = False
    #: Whether kernels read that memory over the link to the host: then fewer and larger chunks are faster.
    over_link: ClassVar[bool] = False

    def __init__(self, device: int) -> None:
        self.device = device
        self.copied_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have memory of their own: that of this transport ends with it, and kernels may be reading it."""
        return type(self), (self.device,)

    @classmethod  # noqa: B027 # most need no test
    def probe(cls, device: int) -> None:
        """Test whether the transport works on a device.

        Raises:
            CudaError: the driver refuses this kind of memory there.
        """

    @abstractmethod
    def kind(self, table: HostTable) -> str:
        """Return the C++ type of the arguments that :meth:`lend` will give for ``table``, to compile a kernel first."""

    def prepare(self, table: HostTable) -> None:  # noqa: B027 # most need none
        """Get ready to lend ``table`` during a graph capture; a table passed by value is frozen into the graph."""

    @property
    def lends_host_memory(self) -> bool:
        """Whether kernels read tables in buffers that :meth:`borrow` gives, where the host writes them."""
        return False

    @property
    def may_be_copied(self) -> bool:
        """Whether a kernel for :meth:`kind` may read a copy of a table elsewhere, as in a graph of a staged step."""
        return False

    def borrow(self, table: HostTable, stream: int) -> Any:
        """Return a buffer for a table; nothing is written yet.  A launch of this very table may still read it."""
        raise NotImplementedError

    @abstractmethod
    def lend(self, table: HostTable, stream: int) -> Lent:
        """Lend ``table`` as it is now, for kernels launched on ``stream`` (a handle) inside a ``with`` block."""
