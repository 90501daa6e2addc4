"""``foreach_norm``: the norm of every tensor in a list, in two launches over one pointer table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..formats.floating import SINGLES, known, of_dtype
from ..kernels import cpu, cuda
from ..kernels.source import arithmetic
from ..system import internals
from ..tables.layout import HostTable
from ..tables.pointers import PointerTable
from ..transports.choose import TransportOption, shared
from ..transports.transport import Transport

Tensors = Sequence[torch.Tensor]

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
    empty = order == 0 and any(t.numel() == 0 for t in tensors)
    if order is None or empty or not known(out_dtype) or not fits([tensors]):
        return list(torch._foreach_norm(tensors, ord, dtype))
    try:
        table = PointerTable([tensors], names=["tensors"])
    except ValueError:  # gaps or overlaps: torch supports them
        return list(torch._foreach_norm(tensors, ord, dtype))
    with torch.no_grad():
        if table.device.type == "cuda":
            return list(_cuda(table, order, out_dtype, shared(transport, table.device.index)).unbind())
        return list(_cpu(table, order, out_dtype).unbind())


def _cuda(table: PointerTable, order: int, out_dtype: torch.dtype, transport: Transport) -> torch.Tensor:
    device, dtype = table.device, table.dtypes[0]
    assert dtype is not None
    listed, results = of_dtype(dtype), of_dtype(out_dtype)
    number = arithmetic((listed, results))
    host = HostTable(3, table.numels, geometry=table.host.geometry)
    counts = np.bincount(host.chunks["row"], minlength=len(table))
    partials = torch.empty(len(host.chunks), dtype=number, device=device)
    out = torch.zeros(len(table), dtype=out_dtype, device=device)
    firsts = partials.data_ptr() + (np.cumsum(counts) - counts) * number.itemsize
    targets = out.data_ptr() + np.arange(len(table)) * out_dtype.itemsize
    host.set_addresses(np.array([table.host.addresses[:, 0], firsts, targets], np.uint64).T)
    with torch.cuda.device(device):
        handle = internals.current_stream(device.index)
        for stage, form in (("chunks", listed), ("rows", results)):
            with transport.lend(host, handle) as lent:
                kernel = cuda.norm_kernel(stage, order, form, number, host.geometry.threads, lent.kind, device.index)
                for argument, chunks in lent.parts():
                    kernel(argument, chunks, cuda.Stream(handle))
    return out


def _cpu(table: PointerTable, order: int, out_dtype: torch.dtype) -> torch.Tensor:
    dtype = table.dtypes[0]
    assert dtype is not None
    form = of_dtype(dtype)
    number = arithmetic((form, of_dtype(out_dtype)))
    host = HostTable(2, table.numels, geometry=table.host.geometry)
    counts = np.bincount(host.chunks["row"], minlength=len(table))
    partials = np.zeros(len(host.chunks), SINGLES[number])
    firsts = np.cumsum(counts) - counts
    targets = partials.ctypes.data + firsts * partials.itemsize
    host.set_addresses(np.array([table.host.addresses[:, 0], targets], np.uint64).T)
    cpu.run(cpu.norm_kernel(form, number, order), host)
    result = np.zeros(len(table), partials.dtype)
    filled = counts > 0
    if filled.any():  # reduceat refuses an empty list
        result[filled] = (np.maximum if order == 0 else np.add).reduceat(partials, firsts[filled])
    return torch.from_numpy(np.sqrt(result) if order == 2 else result).to(out_dtype)
