"""One list of a pointer table: where its tensors lie, and how they are laid out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from ..system.internals import Addresses, TensorLayout, addresses

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


class Located:
    """How the tensors of one list are laid out; where they lie is for their table to keep.

    Args:
        absent: indices of those that are None.
        layout: how the others are laid out; None: not known yet.  A table that is never refreshed, as most are that
            live for one call, has no use for it.
    """

    __slots__ = ("absent", "layout")

    def __init__(self, absent: Sequence[int], layout: TensorLayout | None) -> None:
        self.absent, self.layout = absent, layout

    @classmethod
    def of(cls, tensors: Tensors, layout: TensorLayout | None) -> tuple[Located, Addresses]:
        """A list that was not known, and where it lies; 0 of what is absent."""
        absent = missing(tensors)
        found = cls(absent, layout) if absent or layout else _UNKNOWN
        return found, _addresses(tensors, absent, layout)

    def follow(self, tensors: Tensors) -> Addresses | None:
        """Where the list lies now; None if its layout has changed or it cannot tell."""
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


#: Any list of which nothing is absent, before anybody has asked how it is laid out.
_UNKNOWN = Located((), None)


def missing(tensors: Tensors) -> tuple[int, ...]:
    """Indices of those that are None."""
    return tuple([i for i, t in enumerate(tensors) if t is None])


def _addresses(tensors: Tensors, absent: Sequence[int], layout: TensorLayout | None) -> Addresses:
    """Where the tensors lie, one call each unless they are of kinds that were asked before."""
    here = tuple([t for t in tensors if t is not None]) if absent else tensors
    if layout is not None and layout.sure:
        at = addresses(here)  # type: ignore[arg-type]
    else:
        at = np.array([*map(torch.Tensor.data_ptr, here)], np.uint64)  # type: ignore[arg-type]
    if not absent:
        return at
    out = np.zeros(len(tensors), np.uint64)
    out[np.setdiff1d(np.arange(len(tensors)), absent)] = at
    return out


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one stretch of memory, each once (in any order of dimensions)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage is as large as its sizes and strides ask for: it may have been resized or freed behind it."""
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is one of ``FakeTensorMode``'s, which look like tensors of a device and have no memory there."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # where nobody has loaded it, there are none
    return module is not None and isinstance(tensor, module.FakeTensor)


def widest_first(tensor: torch.Tensor) -> list[int]:
    """Its dimensions by falling stride: permuted so, a dense tensor is contiguous."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is dense; else one of its shape and dtype without memory, laid out as torch lays out its
    like (``torch.empty_like``)."""
    return tensor if is_dense(tensor) else torch.empty_like(tensor, device="meta", requires_grad=False)


def same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Strides that differ only in dimensions of size one lead to the same places."""
    return a == b or all(x == y for x, y, size in zip(a, b, shape, strict=True) if size != 1)
