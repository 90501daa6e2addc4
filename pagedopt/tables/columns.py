"""One list of a pointer table: where its tensors lie, and how they are laid out."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .addresses import Addresses, Places, gather

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


class Located:
    """How the tensors of one list are laid out; where they lie is for their table to keep.

    Args:
        absent: indices of those that are None.
        layout: how the others are laid out; None: not known yet.  A table that is never refreshed, as most are that
            live for one call, has no use for it.
        places: of these very tensors, if none is absent and they will be asked about again.
    """

    __slots__ = ("_places", "absent", "layout")

    def __init__(self, absent: Sequence[int], layout: Layout | None, places: Places | None = None) -> None:
        self.absent, self.layout, self._places = absent, layout, places

    @classmethod
    def of(cls, tensors: Tensors, layout: Layout | None) -> tuple[Located, Addresses]:
        """A list that was not known, and where it lies; 0 of what is absent."""
        absent = _absent(tensors)
        found = cls(absent, layout) if absent or layout else _UNKNOWN
        return found, _addresses(tensors, absent, layout)

    def follow(self, tensors: Tensors, stays: bool) -> tuple[Located, Addresses | None] | None:
        """What is to be known of the list from now on, and where it lies, None if where it did; None alone if its
        layout has changed or it cannot tell.

        Args:
            stays: the very same tensors will be asked about again.
        """
        if self.layout is None:
            return None
        if stays and self._places and self._places.tensors is tensors and self._places.same():
            return self, None  # the same objects in the same places: laid out as they were
        try:
            if self.absent and self.absent != _absent(tensors):
                return None
            if not self.layout.same([t for t in tensors if t is not None] if self.absent else tensors):
                return None
            at = _addresses(tensors, self.absent, self.layout)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # absent now, sparse, or no tensor
            return None
        if stays and not self.absent and self.layout.sure:
            return Located((), self.layout, Places(tensors, at)), at  # type: ignore[arg-type]
        return self, at


#: Any list of which nothing is absent, before anybody has asked how it is laid out.
_UNKNOWN = Located((), None)


def _absent(tensors: Tensors) -> Sequence[int]:
    return tuple([i for i, t in enumerate(tensors) if t is None])


def _addresses(tensors: Tensors, absent: Sequence[int], layout: Layout | None) -> Addresses:
    checked = layout is not None and layout.sure
    if not absent:
        return gather(tensors, checked)  # type: ignore[arg-type]
    out = np.zeros(len(tensors), np.uint64)
    there = [i for i, t in enumerate(tensors) if t is not None]
    out[there] = gather([t for t in tensors if t is not None], checked)
    return out


class Layout:
    """The dtype, device, shape and strides of tensors, compared in one call where torch offers it.

    Attributes:
        sure: the comparison tells kinds of tensors apart, too: those that pass it have addresses as those had.
    """

    __slots__ = ("__weakref__", "_check", "sure")

    def __init__(self, tensors: TensorList) -> None:
        self._check: Callable[..., bool]
        self.sure = True
        try:
            from torch._C._dynamo.guards import TensorGuards  # C++; in torch since 2.1, though not documented

            self._check = TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[union-attr, misc]
                dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[union-attr, misc]
            ).check
        except (ImportError, TypeError, SystemError, ValueError):
            self._check = functools.partial(_same_layouts, _layouts(tensors))
            self.sure = False

    @classmethod
    def of(cls, tensors: TensorList) -> Layout:
        """The layout of ``tensors``; one for all lists of one tensor that are alike, as there may be thousands."""
        if len(tensors) != 1:
            return cls(tensors)
        (tensor,) = tensors
        like = type(tensor), tensor.dtype, tensor.shape, tensor.stride()  # type: ignore[union-attr]
        known = _layouts_of_one.get(like)
        if known is None or not known.same(tensors):
            known = _layouts_of_one[like] = cls(tensors)
        return known

    def same(self, tensors: TensorList) -> bool:
        """Whether ``tensors`` have the layout seen at construction."""
        return bool(self._check(*tensors))


_layouts_of_one: weakref.WeakValueDictionary[tuple[Any, ...], Layout] = weakref.WeakValueDictionary()


def _layouts(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(t.dtype, t.device, t.shape, t.stride(), t.is_neg()) for t in tensors]


def _same_layouts(known: list[tuple[Any, ...]], *tensors: Any) -> bool:
    return _layouts(tensors) == known


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
