"""Checks of the lists of a table: equal shapes, strides and devices, and no overlap of written memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch

from ..system.compare_tensors import missing
from .tensors import TensorList, is_dense, misfit, same_layout


class ShapeError(ValueError, RuntimeError):
    """Shapes of corresponding tensors differ: a ValueError, and a RuntimeError as in torch's operations."""


class DtypeError(TypeError, RuntimeError):
    """Dtypes of corresponding tensors differ: a TypeError, and a RuntimeError as in torch's operations."""


class LayoutError(ValueError):
    """A tensor of the right shape has other strides than the first list's, or is a view of negated numbers."""


_dtype, _device, _layout, _shape = map(attrgetter, ("dtype", "device", "layout", "shape"))
_ERRORS: dict[str, type[Exception]] = {
    "type": TypeError, "shape": ShapeError, "dtype": DtypeError, "device": ValueError,
}  # fmt: skip


class Common:
    """Device, shapes and strides that all lists share, taken from the first; and the dtype of each list.

    Args:
        names: the lists' names, for errors.
        first: the first list, without absent tensors.
        per: for each list, consecutive elements of the first list that share one of its entries; None: one.

    Attributes:
        device: of every tensor; None if there is none.
        numels: elements of each tensor, (tensors,).
        dtypes: of each list; None while all its tensors have been absent.
    """

    __slots__ = ("_shapes", "_strides", "device", "dtypes", "names", "numels", "per")

    def __init__(self, names: Sequence[str], first: TensorList, per: Sequence[int] | None = None) -> None:
        self.names, self.per = names, per or [1] * len(names)
        self.dtypes: list[torch.dtype | None] = [None] * len(names)
        tensors = [self._tensor(0, i, t) for i, t in enumerate(first)]
        for i, tensor in enumerate(tensors):
            if not tensor.is_contiguous() and not is_dense(tensor):
                self.fail(
                    ValueError, 0, i,
                    f"of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps itself; "
                    "use a contiguous tensor",
                )  # fmt: skip
        self.device = tensors[0].device if tensors else None
        self.numels = np.array([t.numel() for t in tensors], np.int64)
        self._shapes, self._strides = tuple([t.shape for t in tensors]), tuple([t.stride() for t in tensors])

    def check(self, j: int, tensors: Sequence[Any]) -> None:
        """Check that list ``j`` is like the first; take its dtype if it has none yet."""
        if not self._agree(j, tensors):
            for i, tensor in enumerate(tensors):
                if tensor is not None or j == 0:
                    self._check_tensor(j, i, tensor)

    def fail(self, kind: type[Exception], j: int, i: int, why: str) -> NoReturn:
        """Raise ``kind`` for tensor ``i`` of list ``j``."""
        raise kind(f"tensor {i} of {self.names[j]} {why}")

    def _tensor(self, j: int, i: int, value: Any) -> torch.Tensor:
        shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
        if found := misfit(value, shape, memory=False):
            self.fail(_ERRORS[found.aspect], j, i, found.why)
        return cast(torch.Tensor, value)

    def _expected(self, j: int) -> tuple[tuple[torch.Size, ...], tuple[tuple[int, ...], ...]]:
        """Return shapes and strides of list ``j``."""
        if self.per[j] == 1:
            return self._shapes, self._strides
        return tuple([torch.Size([n]) for n in self.entries(j).tolist()]), ((1,),) * len(self.numels)

    def entries(self, j: int) -> npt.NDArray[np.int64]:
        """Return the number of entries of each tensor of list ``j``, (tensors,)."""
        return -(-self.numels // self.per[j])

    def _agree(self, j: int, tensors: Sequence[Any]) -> bool:
        """Return whether all tensors that are there are as expected: a fast check that may say no wrongly."""
        shapes, strides = self._expected(j)
        if j and (gone := missing(tensors)):
            here = np.delete(np.arange(len(tensors)), gone).tolist()
            tensors = [tensors[i] for i in here]
            shapes, strides = tuple([shapes[i] for i in here]), tuple([strides[i] for i in here])
            if not here:
                return True
        try:
            dtypes = {*map(_dtype, tensors)}
            alike = (
                len(dtypes) == 1
                and (self.dtypes[j] is None or self.dtypes[j] in dtypes)
                and {*map(_device, tensors)} == {self.device}
                and {*map(_layout, tensors)} == {torch.strided}
                and (*map(_shape, tensors),) == shapes
                and (*map(torch.Tensor.stride, tensors),) == strides
                and not any(map(torch.is_neg, tensors))
            )
        except (AttributeError, TypeError):  # absent, or no tensor
            return False
        if alike:
            (self.dtypes[j],) = dtypes
        return alike

    def _check_tensor(self, j: int, i: int, value: Any) -> None:
        shapes, all_strides = self._expected(j)
        shape, strides = shapes[i], all_strides[i]
        if found := misfit(value, shape, self.dtypes[j], self.device, of="the table", memory=False):
            self.fail(_ERRORS[found.aspect], j, i, found.why)
        tensor = self._tensor(j, i, value)
        if tensor.numel() > 1 and not same_layout(shape, tensor.stride(), strides):
            self.fail(
                LayoutError, j, i,
                f"has strides {tensor.stride()}, {self.names[0]} has {strides}: they must be laid out alike",
            )  # fmt: skip
        if tensor.is_neg():
            self.fail(LayoutError, j, i, "is a view of negated numbers, which are not in memory; use resolve_neg()")
        if self.dtypes[j] is None:
            self.dtypes[j] = tensor.dtype


def checked_writes(writes: Collection[int], lists: int) -> tuple[int, ...]:
    """Check that ``writes`` are indices of ``lists`` lists, and return them as a tuple."""
    if not isinstance(writes, Collection) or not all(isinstance(j, int | np.integer) for j in writes):
        raise TypeError(f"writes is {writes!r}; give the indices of the lists that are overwritten, e.g. writes=[0]")
    if wrong := [int(j) for j in writes if not 0 <= j < lists]:
        there = f"0 to {lists - 1}" if lists > 1 else "0 alone" if lists else "none, as there is no list"
        raise ValueError(f"writes names list {', '.join(map(str, wrong))}; there is {there}")
    return writes if isinstance(writes, tuple) else tuple(int(j) for j in writes)


def check_overlap(common: Common, writes: Collection[int], addresses: npt.NDArray[np.uint64]) -> None:
    """Check that a written tensor overlaps no other, except one of its own row with exactly the same memory.

    ``addresses`` is (tensors, lists), 0 for an absent tensor.
    """
    if not writes:
        return
    live = (addresses != 0).all(axis=1) & (common.numels > 0)
    sizes = [np.uint64(d.itemsize if d else 0) for d in common.dtypes]
    nbytes = [common.entries(j)[live].astype(np.uint64) * size for j, size in enumerate(sizes)]
    if _apart(addresses[live].T.ravel(), np.concatenate(nbytes)):
        return
    index = np.flatnonzero(live).astype(np.int64)
    start = np.concatenate([addresses[live, j] for j in writes])
    end = np.concatenate([addresses[live, j] + nbytes[j] for j in writes])
    order = np.argsort(start, kind="stable")
    start, end, which = start[order], end[order], np.tile(index, len(writes))[order]
    for at in np.flatnonzero(end[:-1] > start[1:]):
        _overlap(common.names, int(which[at]), int(which[at + 1]))
    for j in set(range(len(nbytes))) - set(writes):
        begin = addresses[live, j]
        stop = begin + nbytes[j]
        at = np.searchsorted(start, stop, side="left").astype(np.int64) - 1  # the last written that starts below stop
        hit = (at >= 0) & (end[at] > begin)
        same = (which[at] == index) & (start[at] == begin) & (end[at] == stop)
        for position in np.flatnonzero(hit & ~same):
            _overlap(common.names, int(index[position]), int(which[at[position]]))


def _apart(start: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]) -> bool:
    """Return whether no two stretches of memory overlap: the usual case."""
    order = start.argsort()
    start, nbytes = start[order], nbytes[order]
    return not ((start + nbytes)[:-1] > start[1:]).any()


def _overlap(names: Sequence[str], a: int, b: int) -> NoReturn:
    raise ValueError(
        f"tensors {a} and {b} of the lists {list(names)} overlap in memory and cannot be updated in place; "
        "give each tensor once, with memory of its own"
    )
