"""CUDA tensors over memory of ours in ``torch.multiprocessing``: torch has no handle to pass on for such, so they are
copied into memory of its own; everything else goes as before."""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

#: Addresses and sizes of the memory that tensors view and torch's allocator does not know.
ranges: dict[int, int] = {}


@functools.cache
def copy_what_cannot_be_shared() -> None:
    """From now on queues and pipes of ``torch.multiprocessing`` pass such tensors on as copies."""
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda and tensor.layout is torch.strided:
        at = tensor.untyped_storage().data_ptr()
        if any(start <= at < start + nbytes for start, nbytes in ranges.items()):
            tensor = tensor.clone()
    return reductions.reduce_tensor(tensor)
