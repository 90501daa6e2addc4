"""``foreach_norm``: the norm of every tensor in a list, in few launches over pointer tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import FLOAT64, known, of_dtype
from ..tables.layout import WORD, HostTable, Words
from ..tables.storage import StorageFormat
from ..tables.tensors import has_memory, is_dense, is_fake
from ..transports.choose import TransportOption, shared
from ..transports.transport import Transport
from .sums import launch_sums

Tensors = Sequence[torch.Tensor]

#: Classes whose tensors have memory of their own.
_CLASSES = {torch.Tensor, torch.nn.Parameter}
#: Below this address is an offset in a freed storage, or the heap of a non-PIE Python: the storage's size says which.
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
    launch_sums(order, form, table, device.index, transport)
    if len(sums) == len(numels):
        return sums
    return _sums(min(order, 1), FLOAT64, counts, targets, device, transport)
