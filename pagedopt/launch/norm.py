"""``foreach_norm``: the norm of every tensor in a list, in two launches over one pointer table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import SINGLES, known, of_dtype
from ..kernels import cpu, cuda
from ..kernels.source import arithmetic
from ..system import internals
from ..tables.columns import has_memory, is_dense
from ..tables.layout import HostTable
from ..transports.choose import TransportOption, shared
from ..transports.transport import Transport

Tensors = Sequence[torch.Tensor]

#: Classes whose tensors have memory of their own.
_CLASSES = {torch.Tensor, torch.nn.Parameter}
#: Below this address lies no memory, but an offset in a storage that was freed.
LOWEST = np.uint64(1 << 33)
#: Orders that the kernels compute, and the kernels' numbers for them.
_ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}


def fits(lists: Sequence[Tensors]) -> bool:
    """Whether our kernels give what torch gives: equal lengths, shapes and dtype, floating point, no autograd."""
    first = lists[0]
    if not all(isinstance(x, list | tuple) and x and len(x) == len(first) for x in lists):
        return False
    tensors = [t for x in lists for t in x]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return False
    dtypes, devices = {t.dtype for t in tensors}, {t.device for t in tensors}
    return (
        len(dtypes) == len(devices) == 1
        and all(map(known, dtypes))
        and tensors[0].device.type in ("cpu", "cuda")
        and {t.layout for t in tensors} == {torch.strided}
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and all([t.shape for t in x] == [t.shape for t in first] for x in lists[1:])
    )


def foreach_norm(
    tensors: Sequence[torch.Tensor],
    ord: float = 2,
    dtype: torch.dtype | None = None,
    *,
    transport: TransportOption | Transport = "managed",
) -> list[torch.Tensor]:
    """Return the vector norm of each tensor, as ``torch._foreach_norm``; the same input always gives the same bits.

    Args:
        tensors: on one device, of one dtype, of any shapes.
        ord: 1, 2 and infinity run here; other orders, dtypes and tensors that need autograd go to torch.
        dtype: dtype of the results and, if float64, of the arithmetic (default: the tensors').
        transport: how the pointer table reaches the kernels.

    Returns:
        one 0-dimensional tensor for each (views of one tensor); 0 for an empty tensor in the orders 1 and 2.

    Raises:
        RuntimeError: as torch, for example for the infinity norm of an empty tensor.
    """
    tensors = list(tensors)
    out_dtype = dtype or (tensors[0].dtype if tensors else torch.float32)
    order = _ORDERS.get(float(ord)) if isinstance(ord, int | float) else None
    listed = _List.of(tensors) if order is not None and known(out_dtype) else None
    if listed is None or order is None or (order == 0 and listed.some_empty):
        return list(torch._foreach_norm(tensors, ord, dtype))
    with torch.no_grad():
        if listed.device.type == "cuda":
            return list(_cuda(listed, order, out_dtype, shared(transport, listed.device.index)).unbind())
        return list(_cpu(listed, order, out_dtype).unbind())


class _List(NamedTuple):
    """What kernels need of a list of tensors.  Every call finds it anew, so nothing here asks for a tensor alone."""

    dtype: torch.dtype
    device: torch.device
    numels: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> _List | None:
        """Return it; None: the tensors are not alike, or a kernel cannot read them as they are."""
        if not tensors or not {*map(type, tensors)} <= _CLASSES:
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
        except (
            RuntimeError,
            NotImplementedError,
        ):  # sparse, of another layout, or as those of functorch without memory
            return None
        if (addresses < LOWEST).any() and not all(map(has_memory, tensors)):
            return None
        return cls(dtype, device, np.array([*map(_numel, tensors)], np.int64), addresses)

    @property
    def some_empty(self) -> bool:
        """Whether a tensor has no elements."""
        return not self.numels.all()

    def table(self, lists: int) -> tuple[HostTable, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a table whose first list are the tensors; of each, how many chunks it has, and the first of them."""
        host = HostTable(lists, self.numels)
        counts = -(-self.numels // host.geometry.chunk_numel)
        host.set_column(0, self.addresses)
        return host, counts, np.cumsum(counts) - counts


def _cuda(listed: _List, order: int, out_dtype: torch.dtype, transport: Transport) -> torch.Tensor:
    device, form, results = listed.device, of_dtype(listed.dtype), of_dtype(out_dtype)
    number = arithmetic((form, results))
    host, _, firsts = listed.table(3)
    partials = torch.empty(len(host.chunk_words), dtype=number, device=device)
    out = torch.zeros(len(firsts), dtype=out_dtype, device=device)
    host.row_words[:, 1] = partials.data_ptr() + firsts * number.itemsize
    host.row_words[:, 2] = out.data_ptr() + np.arange(len(firsts)) * out_dtype.itemsize
    with torch.cuda.device(device):
        handle = internals.current_stream(device.index)
        for stage, each in (("chunks", form), ("rows", results)):
            with transport.lend(host, handle) as lent:
                kernel = cuda.norm_kernel(stage, order, each, number, host.geometry.threads, lent.kind, device.index)
                for argument, chunks in lent.parts():
                    kernel(argument, chunks, cuda.Stream(handle))
    return out


def _cpu(listed: _List, order: int, out_dtype: torch.dtype) -> torch.Tensor:
    form = of_dtype(listed.dtype)
    number = arithmetic((form, of_dtype(out_dtype)))
    host, counts, firsts = listed.table(2)
    partials = np.zeros(len(host.chunk_words), SINGLES[number])
    host.row_words[:, 1] = partials.ctypes.data + firsts * partials.itemsize
    cpu.run(cpu.norm_kernel(form, number, order), host)
    result = np.zeros(len(firsts), partials.dtype)
    filled = counts > 0
    if filled.any():  # reduceat refuses an empty list
        result[filled] = (np.maximum if order == 0 else np.add).reduceat(partials, firsts[filled])
    return torch.from_numpy(np.sqrt(result) if order == 2 else result).to(out_dtype)


_dtype, _device, _is_cpu, _requires_grad = map(attrgetter, ("dtype", "device", "is_cpu", "requires_grad"))
_is_contiguous, _numel, _data_ptr = torch.Tensor.is_contiguous, torch.Tensor.numel, torch.Tensor.data_ptr
