"""One list of a pointer table: where its tensors lie, and how they are laid out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .addresses import Addresses, Places, gather

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


class Located:
    """Where the tensors of one list lie, and how they are laid out.

    Args:
        tensors: the list.
        layout: how those that are not None are laid out; None: not known yet.  A table that is never refreshed, as
            most are that live for one call, has no use for it.
        at: where they lie, if that is known; then none of them is None.
    """

    __slots__ = ("_places", "absent", "addresses", "layout")

    def __init__(self, tensors: Tensors, layout: Layout | None = None, at: Addresses | None = None) -> None:
        present: Sequence[Any] = tensors if at is not None else [t for t in tensors if t is not None]
        some = len(present) < len(tensors)
        self.absent: Sequence[int] = [i for i, t in enumerate(tensors) if t is None] if some else ()
        self.layout = layout
        self.addresses = gather(present, checked=layout is not None and layout.sure) if at is None else at
        if self.absent:
            found, self.addresses = self.addresses, np.zeros(len(tensors), np.uint64)
            self.addresses[[i for i, t in enumerate(tensors) if t is not None]] = found
        self._places: Places | None = None

    def follow(self, tensors: Tensors, stays: bool) -> Located | None:
        """This column if nothing changed, a new one if only addresses did, None if more did or it cannot tell.

        Args:
            stays: the very same tensors will be asked about again.
        """
        if self.layout is None:
            return None
        if stays and self._places and self._places.tensors is tensors and self._places.same():
            return self  # the same objects in the same places: laid out as they were
        try:
            if self.absent and self.absent != [i for i, t in enumerate(tensors) if t is None]:
                return None
            if not self.layout.same([t for t in tensors if t is not None] if self.absent else tensors):
                return None
            at = None if self.absent else gather(tensors, checked=self.layout.sure)  # type: ignore[arg-type]
            if at is not None and not stays and at.tobytes() == self.addresses.tobytes():
                return self
            now = Located(tensors, self.layout, at)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # absent now, sparse, or no tensor
            return None
        if stays and not now.absent and self.layout.sure:
            now._places = Places(tensors, now.addresses)  # type: ignore[arg-type]
            return now
        return self if now.addresses.tobytes() == self.addresses.tobytes() else now


class Layout:
    """The dtype, device, shape and strides of tensors, compared in one call where torch offers it.

    Attributes:
        sure: the comparison tells kinds of tensors apart, too: those that pass it have addresses as those had.
    """

    __slots__ = ("_check", "sure")

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

    def same(self, tensors: TensorList) -> bool:
        """Whether ``tensors`` have the layout seen at construction."""
        return bool(self._check(*tensors))


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
