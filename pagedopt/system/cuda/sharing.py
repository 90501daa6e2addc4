"""``torch.multiprocessing`` for CUDA tensors over our own memory.

torch has no handle for memory that its allocator does not know, so such tensors are copied into memory of torch first.
"""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

#: The memory that our tensors view: bytes by address.
ranges: dict[int, int] = {}


@functools.cache
def copy_what_cannot_be_shared() -> None:
    """Make queues and pipes of ``torch.multiprocessing`` copy tensors that view :data:`ranges`."""
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda and tensor.layout is torch.strided:
        at = tensor.untyped_storage().data_ptr()
        if any(start <= at < start + nbytes for start, nbytes in ranges.items()):
            tensor = tensor.clone()
    return reductions.reduce_tensor(tensor)
