"""``DeviceTable``: a pointer table for custom kernels, e.g. of CuPy or Numba."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..tables.layout import WORD
from ..tables.pointers import PointerTable, TensorList
from ..transports.choose import TransportOption, check_transport, create
from ..transports.transport import Transport


class DeviceTable(PointerTable):
    """Lists of tensors as rows of addresses that a kernel can read with no explicit copy.

    Row i is ``k + 2`` words of 8 bytes: the addresses of tensor i in each of the k lists, its number of elements (0 if
    it is absent from a list), and one word that is 0 here.

    The table keeps its tensors alive.  Each access to its rows compares the tensors' addresses: it takes over new
    addresses, and raises for tensors that can no longer be used.

    Args:
        lists: see :class:`PointerTable`.
        writes: indices of the lists your kernel overwrites.
        transport: ``managed``, ``mapped`` or ``memcpy``, or your own class with ``in_memory``; not used on a CPU.

    Raises:
        ValueError, TypeError: see :class:`PointerTable`; or ``transport`` passes tables by value, or is no transport.

    Autograd does not notice what your kernel writes: call ``torch.autograd.graph.increment_version`` for each tensor it
    has overwritten.

    Example:
        >>> scale = cupy.RawKernel(r'''
        ... extern "C" __global__ void scale(const unsigned long long* rows, float by) {
        ...     const unsigned long long* row = rows + 3 * blockIdx.x;      // one list: address, numel, 0
        ...     float* x = (float*)row[0];
        ...     for (long long i = threadIdx.x; i < (long long)row[1]; i += blockDim.x) x[i] *= by;
        ... }''', "scale")
        >>> table = pagedopt.DeviceTable([tensors], writes=[0])
        >>> stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        >>> with stream, table.rows_on_device() as rows:
        ...     scale((len(table),), (256,), (rows, cupy.float32(2)))  # of a table that is not empty

    ``tests/outside/kernel.py`` has an example for tables of any size, and one for Numba.
    """

    def __init__(
        self, lists: Sequence[TensorList], *, writes: Sequence[int] = (), transport: TransportOption = "managed"
    ) -> None:
        check_transport(transport)
        super().__init__(lists, writes=writes)
        self._transport: Transport | None = None
        if self.device.type == "cuda":
            self._transport = create(transport, self.device.index)
            if not self._transport.in_memory:
                raise ValueError(
                    f"transport {transport!r} passes tables by value; a kernel of your own needs one in memory"
                )

    def __repr__(self) -> str:
        """Say how many lists and tensors, their dtypes and device, and which lists a kernel overwrites."""
        dtypes = ", ".join("none" if d is None else str(d).removeprefix("torch.") for d in self.dtypes)
        size = f"{len(self.dtypes)} x {len(self)} tensors"
        return f"DeviceTable({size} ({dtypes}) on {self.device}, writes={list(self.writes)})"

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows in host memory, (n, k + 2) int64, for a Numba kernel on the CPU.

        Raises:
            ValueError, TypeError: a tensor has another size, dtype or device than before, or no memory.
        """
        self.follow()
        return self.host.row_words

    @contextlib.contextmanager
    def rows_on_device(self) -> Iterator[int]:
        """Lend the address of the rows to kernels launched on the current stream inside the block.

        The table is not rewritten before they have ended, even if :meth:`refresh` is called meanwhile.

        Raises:
            ValueError, TypeError: a tensor has another size, dtype or device than before, or no memory.
        """
        self.follow()
        if self._transport is None:
            yield self.rows.ctypes.data
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream().cuda_stream
            with self._transport.lend(self.host, stream) as lent:
                yield lent.address + WORD * self.host.rows_at
