"""Sums over many tensors, of which norms are made: ``Squares`` adds all squares on a device, for clipping.

All sums are float64, each made in an order that only the tensors' sizes and dtypes decide: budgets, transports, replays
and devices leave the same bits.  ``sums.cu`` has the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import FLOAT64, known, of_dtype
from ..kernels import cpu, cuda
from ..system import internals
from ..system.driver import DeviceMemory
from ..tables.layout import BLOCK, WORD, HostTable, Words, choose_geometry
from ..tables.storage import StorageFormat
from ..tables.tensors import has_memory, is_dense, is_fake
from ..transports.choose import TransportOption, create, shared
from ..transports.transport import Transport, opaque
from .on_device import Factor, TableCopy

Sums = npt.NDArray[np.float64]


def sums_kernel(order: int, form: StorageFormat, table: HostTable, transport: Transport | None) -> Any:
    """Return the kernel that adds the terms of each chunk of a table over lists (tensor, sums).

    Args:
        order: of the norm whose terms they are: 1, 2, or 0 for infinity, where a sum is the largest term.
        form: the plain format of the tensors.
        table: its rows have the address of a tensor, and that of the first of its chunks' sums.
        transport: how the table reaches a GPU; None: the kernel is one for a CPU.

    Raises:
        CompileError: NVRTC refuses it.
    """
    threads = table.geometry.threads
    if transport is None:
        return cpu.sums_kernel(order, form, threads)
    return cuda.sums_kernel(order, form, threads, transport.kind(table), transport.device)


def launch_sums(table: HostTable, kernel: Any, transport: Transport | None) -> None:
    """Launch what :func:`sums_kernel` has returned: on a CPU at once, else on the current stream of the GPU."""
    if transport is None:
        cpu.run(kernel, table)
        return
    with torch.cuda.device(transport.device):
        handle = internals.current_stream(transport.device)
        with transport.lend(table, handle) as lent:
            for argument, chunks in lent.parts():
                kernel(argument, chunks, cuda.Stream(handle))


class SquaresList:
    """Tensors of one dtype, of which a launch writes the sum of each chunk's squares.

    Args:
        dtype: of the tensors.
        numels: elements of each.
    """

    def __init__(self, dtype: torch.dtype, numels: npt.NDArray[np.int64]) -> None:
        self.form, self.table = of_dtype(dtype, "grad"), HostTable(2, numels, geometry=choose_geometry(numels.tolist()))
        self.chunks = len(self.table.chunk_words)
        self.table.row_words[:, 2] = 0  # all are absent until they are taken
        self._numels = numels

    def begin_at(self, sums: int) -> None:
        """Let the sums begin at an address."""
        counts = -(-self._numels // self.table.geometry.chunk_numel)
        self.table.set_column(1, (sums + WORD * (np.cumsum(counts) - counts)).astype(np.uint64))

    def take(self, addresses: Words) -> None:
        """Take the addresses of the tensors, (tensors,); 0: a tensor is absent, and its squares are 0."""
        if addresses.tobytes() == self.table.row_words[:, 0].tobytes():
            return
        self.table.rows_changed()  # also if an interrupt comes before the end
        self.table.row_words[:, 2] = np.where(addresses, self._numels, 0)
        self.table.set_column(0, addresses)


class Squares:
    """Sums of squares on one device; this class is for a CPU.

    Args:
        parts: lists of tensors, of which each part has a sum of its own.
    """

    def __init__(self, parts: Sequence[Sequence[SquaresList]]) -> None:
        self.lists = [each for part in parts for each in part]
        self._transports: list[Transport | None] = [None] * len(self.lists)
        self._counts = [sum(each.chunks for each in part) for part in parts]
        self._sums: Sums = np.zeros(sum(self._counts))
        self._begin_at(self._sums.ctypes.data)

    def _begin_at(self, address: int) -> None:
        #: Where the sums lie, and how many there are.
        self.place = address, len(self._sums)
        for each in self.lists:
            each.begin_at(address)
            address += WORD * each.chunks

    def launches(self) -> list[tuple[HostTable, Any, Transport | None]]:
        """Return the launches that write the sums: table, kernel, and how the table reaches a GPU (None: on a CPU).

        Raises:
            CompileError: NVRTC refuses a kernel.
        """
        return [
            (each.table, sums_kernel(2, each.form, each.table, transport), transport)
            for each, transport in zip(self.lists, self._transports, strict=True) if each.chunks
        ]  # fmt: skip

    def compile(self) -> None:
        """Compile (or load) the kernels now; see :meth:`launches`."""
        self.launches()

    def add(self, factor: Factor | None) -> torch.Tensor | None:
        """Add all squares, on the current stream.

        Args:
            factor: takes the sum of the only part; None: there are several parts, or other devices.

        Returns:
            the sum of each part, float64 (parts,) on the device; None if ``factor`` has taken it.
        """
        self._sums[:] = 0  # no kernel runs over what is absent
        for launch in self.launches():
            launch_sums(*launch)
        ends = np.cumsum(self._counts).tolist()
        sums = [added(self._sums[end - count : end]) for end, count in zip(ends, self._counts, strict=True)]
        if factor is None:
            return torch.tensor(sums, dtype=torch.float64, device="cpu")
        factor.total(sums[0])
        return None


class DeviceSquares(Squares):
    """Sums of squares on a CUDA device: a launch for each list, and one for each part.

    Args:
        parts: see :class:`Squares`.
        device: the CUDA device.
        transport: how the tables reach the kernels; None: they lie in device memory, for a graph that owns them.

    Raises:
        torch.OutOfMemoryError: the device has no room for the sums.
    """

    def __init__(
        self, parts: Sequence[Sequence[SquaresList]], device: torch.device, transport: TransportOption | None
    ) -> None:
        self.device, self._index = device, device.index
        super().__init__(parts)
        self._memory = DeviceMemory(max(1, len(self._sums)) * WORD, self._index)
        self._begin_at(self._memory.address)
        self._transports = [
            TableCopy(each.table, self._index) if transport is None else create(transport, self._index)
            for each in self.lists
        ]

    def compile(self) -> None:
        super().compile()
        cuda.total_kernel(self._index)

    def publish(self) -> None:
        """Queue copies of tables that lie in device memory, where they have changed, on the current stream."""
        with torch.cuda.device(self._index):
            for each, transport in zip(self.lists, self._transports, strict=True):
                if isinstance(transport, TableCopy):
                    transport.publish(each.table, internals.current_stream(self._index))

    def add(self, factor: Factor | None) -> torch.Tensor | None:
        with torch.cuda.device(self._index):
            for launch in self.launches():
                launch_sums(*launch)
            totals = None
            if factor is None:
                totals = torch.empty(len(self._counts), dtype=torch.float64, device=self.device)
            at, target = self._memory.address, 0 if totals is None else totals.data_ptr()
            for count in self._counts:
                total(at, count, target, factor, self._index)
                at, target = at + WORD * count, target + WORD
        return totals


def total(sums: int, count: int, target: int, factor: Factor | None, device: int) -> None:
    """Launch the kernel that adds ``count`` float64 at the address ``sums``, on the current stream.

    Args:
        sums, count: what it adds.
        target: the address that takes the sum; 0: none does.
        factor: takes its root as the norm; None: none does.
        device: the index of the current CUDA device.
    """
    argument = opaque(total_at(sums, count, target, factor))
    cuda.total_kernel(device)(argument, 1, cuda.Stream(internals.current_stream(device)))


def total_at(sums: int, count: int, target: int, factor: Factor | None) -> npt.NDArray[Any]:
    """Return the argument of the kernel that adds sums; see :func:`total`."""
    fields = np.zeros(1, cuda.TOTAL_AT)
    fields[0] = sums, count, target, 0 if factor is None else factor.address
    return fields


def finish(sums: torch.Tensor, factor: Factor) -> None:
    """Let a factor take the sum of float64 ``sums`` on its device, on the current stream."""
    if factor.device.type == "cpu":
        factor.total(added(sums.numpy()))
        return
    index = factor.device.index
    with torch.cuda.device(index):
        total(sums.data_ptr(), len(sums), 0, factor, index)


def added(sums: Sums) -> float:
    """Add sums on the host, in the order of ``total`` of ``sums.cu``."""
    found = np.zeros(BLOCK)
    with np.errstate(all="ignore"):
        for first in range(0, len(sums), BLOCK):
            part = sums[first : first + BLOCK]
            found[: len(part)] += part
        while len(found) > 1:
            found = found[::2] + found[1::2]
    return float(found[0])


# --- ``foreach_norm``: the norm of every tensor in a list, in few launches over pointer tables ------------------------

Tensors = Sequence[torch.Tensor]

#: Classes whose tensors have memory of their own.
_CLASSES = {torch.Tensor, torch.nn.Parameter}
#: Below this address lies no memory, but an offset in a storage that was freed.
LOWEST = np.uint64(1 << 33)
#: Orders that the kernels compute, and the kernels' numbers for them.
_ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
_dtype, _device, _is_cpu, _requires_grad = map(attrgetter, ("dtype", "device", "is_cpu", "requires_grad"))
_is_contiguous, _numel, _data_ptr = torch.Tensor.is_contiguous, torch.Tensor.numel, torch.Tensor.data_ptr


def fits(lists: Sequence[Tensors]) -> bool:
    """Whether our kernels give what torch gives: equal lengths, shapes and dtype, floating point, no autograd."""
    first = lists[0]
    return (
        all(isinstance(x, list | tuple) and x and len(x) == len(first) for x in lists)
        and _addresses([t for x in lists for t in x]) is not None
        and all([t.shape for t in x] == [t.shape for t in first] for x in lists[1:])
    )


def _addresses(tensors: Tensors) -> Words | None:
    """Return the address of each tensor; None: they are not alike, or a kernel cannot read them as they are.

    In a ``FakeTensorMode`` it is None, too: new tensors have no memory there.  Every call asks anew, so nothing here
    asks for a tensor alone.
    """
    if not tensors or not {*map(type, tensors)} <= _CLASSES or is_fake(torch.empty(0)):
        return None
    dtype, device = tensors[0].dtype, tensors[0].device
    if {*map(_dtype, tensors)} != {dtype} or not known(dtype):
        return None
    alike = {*map(_device, tensors)} == {device} if device.type == "cuda" else all(map(_is_cpu, tensors))
    if not alike or (torch.is_grad_enabled() and any(map(_requires_grad, tensors))):
        return None
    try:
        if not all(map(_is_contiguous, tensors)) and not all(map(is_dense, tensors)):
            return None
        addresses = np.array([*map(_data_ptr, tensors)], np.uint64)
    except (RuntimeError, NotImplementedError):  # sparse, of another layout, or as those of functorch without memory
        return None
    return addresses if (addresses >= LOWEST).all() or all(map(has_memory, tensors)) else None


def foreach_norm(
    tensors: Sequence[torch.Tensor],
    ord: float = 2,
    dtype: torch.dtype | None = None,
    *,
    transport: TransportOption | Transport = "managed",
) -> list[torch.Tensor]:
    """Return the vector norm of each tensor, as ``torch._foreach_norm``; the same input always gives the same bits.

    Sums are float64, so the square of a number in another dtype is neither infinite nor rounded to 0.

    Args:
        tensors: on one device, of one dtype, of any shapes.
        ord: 1, 2 and infinity run here; other orders, dtypes and tensors that need autograd go to torch.
        dtype: dtype of the results (default: the tensors').
        transport: how the pointer tables reach the kernels.

    Returns:
        one 0-dimensional tensor for each (views of one tensor); 0 for an empty tensor in the orders 1 and 2.

    Raises:
        RuntimeError: as torch, for example for the infinity norm of an empty tensor.
    """
    tensors = list(tensors)
    out_dtype = dtype or (tensors[0].dtype if tensors else torch.float32)
    order = _ORDERS.get(float(ord)) if isinstance(ord, int | float) else None
    addresses = _addresses(tensors) if order is not None and known(out_dtype) else None
    if order is not None and addresses is not None:
        form, device = of_dtype(tensors[0].dtype), tensors[0].device
        numels = np.array([*map(_numel, tensors)], np.int64)
        if not _are_special(order, form, numels):
            its_transport = shared(transport, device.index) if device.type == "cuda" else None
            with torch.no_grad():
                sums = _sums(order, form, numels, addresses, device, its_transport)
                return list((sums.sqrt() if order == 2 else sums).to(out_dtype).unbind())
    return list(torch._foreach_norm(tensors, ord, dtype))


def _are_special(order: int, form: StorageFormat, numels: npt.NDArray[np.int64]) -> bool:
    """Whether torch refuses one (the largest of no elements), or may take the magnitude of its only element.

    That magnitude is another number than the root of the square if the square overflows: in float64.
    """
    if order == 2:
        return form == FLOAT64 and bool((numels == 1).any())
    return order == 0 and not numels.all()


def _sums(
    order: int,
    form: StorageFormat,
    numels: npt.NDArray[np.int64],
    addresses: Words,
    device: torch.device,
    transport: Transport | None,
) -> torch.Tensor:
    """Return the sum of each tensor's terms, float64 (tensors,): those of its chunks, which are added in the same way.

    Of a billion elements, three launches leave one sum.
    """
    table = HostTable(2, numels)
    counts = np.maximum(-(-numels // table.geometry.chunk_numel), 1)  # where there is no chunk, the sum stays 0
    ends = np.cumsum(counts)
    sums = torch.zeros(int(ends[-1]), dtype=torch.float64, device=device)
    targets = (sums.data_ptr() + WORD * (ends - counts)).astype(np.uint64)
    table.set_column(0, addresses)
    table.set_column(1, targets)
    launch_sums(table, sums_kernel(order, form, table, transport), transport)
    if len(sums) == len(numels):
        return sums
    return _sums(min(order, 1), FLOAT64, counts, targets, device, transport)
