"""What a table records of one list, to notice changed shapes and strides; and the memory layout of single tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from ..system.compare_tensors import Addresses, TensorLayout, addresses

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


class Located:
    """Which tensors of one list are absent, and shapes and strides of the others (None: not recorded yet)."""

    __slots__ = ("absent", "layout")

    def __init__(self, absent: Sequence[int], layout: TensorLayout | None) -> None:
        self.absent, self.layout = absent, layout

    @classmethod
    def of(cls, tensors: Tensors, layout: TensorLayout | None) -> tuple[Located, Addresses]:
        """Return the record of ``tensors``, and their addresses; 0 for an absent tensor."""
        absent = missing(tensors)
        found = cls(absent, layout) if absent or layout else _UNKNOWN
        return found, _addresses(tensors, absent, layout)

    def follow(self, tensors: Tensors) -> Addresses | None:
        """Return the addresses of ``tensors``; None if shapes or strides have changed or cannot be compared."""
        if self.layout is None:
            return None
        try:
            if self.absent and self.absent != missing(tensors):
                return None
            if not self.layout.same(*([t for t in tensors if t is not None] if self.absent else tensors)):
                return None
            return _addresses(tensors, self.absent, self.layout)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # absent now, sparse, or no tensor
            return None


#: Shared by all lists without absent tensors and without a recorded layout.
_UNKNOWN = Located((), None)


def missing(tensors: TensorList) -> tuple[int, ...]:
    """Return indices of the tensors that are None."""
    return tuple([i for i, t in enumerate(tensors) if t is None])


def _addresses(tensors: Tensors, absent: Sequence[int], layout: TensorLayout | None) -> Addresses:
    """Return the addresses, by the compiled loop if ``layout`` says that it is safe, else by ``data_ptr()``."""
    here = tuple([t for t in tensors if t is not None]) if absent else tensors
    if layout is not None and layout.sure:
        at = addresses(here)  # type: ignore[arg-type]
    else:
        at = np.array([*map(torch.Tensor.data_ptr, here)], np.uint64)  # type: ignore[arg-type]
    if not absent:
        return at
    out = np.zeros(len(tensors), np.uint64)
    out[np.delete(np.arange(len(tensors)), absent)] = at
    return out


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
