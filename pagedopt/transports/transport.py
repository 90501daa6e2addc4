"""How a pointer table reaches a kernel.  A transport lends an argument and launches nothing.

    with transport.lend(table, stream) as lent:
        kernel = …  # for arguments of the type ``lent.kind``
        for argument, chunks in lent.parts():
            kernel(argument, chunks, stream)

Inside the block the words of the host table are readable for what is launched on ``stream``; from its end on, what the
device may still read is guarded from being written again.
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
#: The argument that stands for a table in memory: its address and its header.
TABLE_AT = np.dtype([("words", np.uint64), ("header", HEADER)])


def opaque(fields: npt.NDArray[Any]) -> Argument:
    """The same memory as bytes without fields, which CuPy would walk at every launch."""
    return fields.view(np.dtype((np.void, fields.itemsize)))


class Lent:
    """What launches take of one table, for the length of a ``with`` block.

    Attributes:
        kind: the C++ type of the arguments (:func:`~pagedopt.kernels.source.table_type`).
        address: where kernels read the words of a table in memory; 0: it travels by value.
    """

    kind: str
    address: int = 0

    def parts(self, span: Span | None = None) -> Iterable[tuple[Argument, int]]:
        """For each launch over all chunks, or over a span of them: its argument and how many chunks are in it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to guard by default: what travels by value is the launch's own."""


class Transport(ABC):
    """One way for a table to reach a kernel.

    A subclass from outside of this package is a transport like any other: ``PagedAdamW(transport=TheClass)``.  It is
    made with the index of a device and nothing else, and no other stands in for it.  It defines :meth:`kind` and
    :meth:`lend`, and has to be a name of its module, so that an optimizer with it can be pickled.

    Args:
        device: index of the CUDA device.

    Attributes:
        copied_bytes: by explicit copy calls, all tables together.
    """

    name: ClassVar[str]
    #: Whether every table it lends is in memory, at :attr:`Lent.address`.
    in_memory: ClassVar[bool] = False
    #: Whether kernels read that memory over the link: then fewer and larger chunks are faster.
    over_link: ClassVar[bool] = False

    def __init__(self, device: int) -> None:
        self.device = device
        self.copied_bytes = 0

    @classmethod  # noqa: B027 # most have nothing to try
    def probe(cls, device: int) -> None:
        """Try whether this way works on a device.

        Raises:
            CudaError: the driver refuses this kind of memory there.
        """

    @abstractmethod
    def kind(self, table: HostTable) -> str:
        """The C++ type of the arguments that :meth:`lend` will give for ``table``: a kernel can be compiled before."""

    def prepare(self, table: HostTable) -> None:  # noqa: B027 # nor to prepare
        """Be ready to lend ``table`` while a CUDA graph is captured; what travels by value is frozen into the graph."""

    @abstractmethod
    def lend(self, table: HostTable, stream: int) -> Lent:
        """``table`` as it is now, for kernels launched on ``stream`` (a handle) inside a ``with`` block."""
