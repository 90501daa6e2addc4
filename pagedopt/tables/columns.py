"""Lists of tensors, some of them absent; and the memory layout of single tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage is as large as sizes and strides ask for: it may have been resized or freed."""
    if not (reach := tensor.numel()):
        return True
    if not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + reach) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is one of ``FakeTensorMode``, which claims a device and has no memory there."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # while it is not loaded, there are no fake tensors
    return module is not None and isinstance(tensor, module.FakeTensor)


def widest_first(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by falling stride: permuted so, a dense tensor is contiguous."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is dense; else a meta tensor with the strides of ``torch.empty_like``."""
    return tensor if is_dense(tensor) else torch.empty_like(tensor, device="meta", requires_grad=False)


def same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether two strides address the same elements: those of dimensions of size one do not count."""
    return a == b or all(x == y for x, y, size in zip(a, b, shape, strict=True) if size != 1)
