"""What the lists of a table must have in common, and that nothing is written twice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from .columns import TensorList, is_dense, same_layout


class ShapeError(ValueError, RuntimeError):
    """Tensors that belong together have other shapes: a wrong value here, for torch's operations a RuntimeError."""


class DtypeError(TypeError, RuntimeError):
    """Tensors that belong together have other dtypes: a wrong type here, for torch's operations a RuntimeError."""


class LayoutError(ValueError):
    """A tensor has the right shape; its numbers lie otherwise than the first list's, or are not in memory at all."""


class Common:
    """Device, shapes and strides of the first list, which every list has; and a dtype for each list.

    Args:
        names: what to call the lists in errors.
        first: the first list; none of it is absent.
        per: for each list, elements of the first one that share an entry of it; None: every element has its own.

    Attributes:
        per: the same.
        device: of every tensor; None where there is none.
        numels: elements of each tensor of a list, (tensors,).
        dtypes: of each list; None where all of it was absent so far.

    Raises:
        ValueError: a tensor has gaps or overlaps itself.
        TypeError: something is no tensor, or sparse.
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
        """See that list ``j`` is laid out as the first; takes its dtype if it had none yet.

        Raises:
            ValueError, TypeError, LayoutError: it is not; the message names list and index.
        """
        if not self._agree(j, tensors):
            for i, tensor in enumerate(tensors):
                if tensor is not None or j == 0:
                    self._check_tensor(j, i, tensor)

    def fail(self, kind: type[Exception], j: int, i: int, why: str) -> NoReturn:
        """Raise ``kind``, naming the tensor."""
        raise kind(f"tensor {i} of {self.names[j]} {why}")

    def _tensor(self, j: int, i: int, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            self.fail(TypeError, j, i, f"is {type(value).__name__}, not a tensor")
        if value.layout is not torch.strided:
            self.fail(TypeError, j, i, f"is sparse ({value.layout}); only dense tensors are supported")
        return value

    def _layout(self, j: int) -> tuple[Sequence[torch.Size], Sequence[tuple[int, ...]]]:
        """Shapes and strides of list ``j``."""
        if self.per[j] == 1:
            return self._shapes, self._strides
        return [torch.Size([n]) for n in self.entries(j).tolist()], [(1,)] * len(self.numels)

    def entries(self, j: int) -> npt.NDArray[np.int64]:
        """Entries of each tensor of list ``j``, (tensors,)."""
        return -(-self.numels // self.per[j])

    def _agree(self, j: int, tensors: Sequence[Any]) -> bool:
        """Whether all tensors are there and plainly alike; if not, each is to be looked at."""
        shapes, strides = self._layout(j)
        try:
            dtypes = {t.dtype for t in tensors}
            alike = (
                len(dtypes) == 1
                and (self.dtypes[j] is None or self.dtypes[j] in dtypes)
                and {t.device for t in tensors} == {self.device}
                and {t.layout for t in tensors} == {torch.strided}
                and all(t.shape == shape for t, shape in zip(tensors, shapes, strict=True))
                and all(t.stride() == stride for t, stride in zip(tensors, strides, strict=True))
                and not any(map(torch.is_neg, tensors))
            )
        except AttributeError:  # absent, or no tensor
            return False
        if alike:
            (self.dtypes[j],) = dtypes
        return alike

    def _check_tensor(self, j: int, i: int, value: Any) -> None:
        tensor = self._tensor(j, i, value)
        shape, strides = (listed[i] for listed in self._layout(j))
        if tensor.shape != shape:
            self.fail(ShapeError, j, i, f"has shape {tuple(tensor.shape)}, the table has {tuple(shape)}")
        if tensor.numel() > 1 and not same_layout(shape, tensor.stride(), strides):
            self.fail(
                LayoutError, j, i,
                f"has strides {tensor.stride()}, {self.names[0]} has {strides}: they must be laid out alike",
            )  # fmt: skip
        if tensor.is_neg():
            self.fail(LayoutError, j, i, "is a view of negated numbers, which are not in memory; use resolve_neg()")
        if tensor.device != self.device:
            self.fail(ValueError, j, i, f"is on {tensor.device}, the table is on {self.device}")
        if self.dtypes[j] is None:
            self.dtypes[j] = tensor.dtype
        if tensor.dtype is not self.dtypes[j]:
            self.fail(DtypeError, j, i, f"is {tensor.dtype}, the list is {self.dtypes[j]}")


def checked_writes(writes: Collection[int], lists: int) -> tuple[int, ...]:
    """Indices of the lists that are overwritten, of ``lists`` of them.

    Raises:
        TypeError: they are no collection of integers.
        ValueError: there is no such list.
    """
    if not isinstance(writes, Collection) or not all(isinstance(j, int | np.integer) for j in writes):
        raise TypeError(f"writes is {writes!r}; give the indices of the lists that are overwritten, e.g. writes=[0]")
    if wrong := [int(j) for j in writes if not 0 <= j < lists]:
        there = f"0 to {lists - 1}" if lists > 1 else "0 alone" if lists else "none, as there is no list"
        raise ValueError(f"writes names list {', '.join(map(str, wrong))}; there is {there}")
    return writes if isinstance(writes, tuple) else tuple(int(j) for j in writes)


def check_overlap(common: Common, writes: Collection[int], addresses: npt.NDArray[np.uint64]) -> None:
    """See that what is written shares memory only with the same row of another list, exactly.

    Args:
        writes: indices of the lists that are overwritten.
        addresses: (tensors, lists); 0 of what is absent.

    Raises:
        ValueError: two tensors overlap; the message names both.
    """
    if not writes:
        return
    live = (addresses != 0).all(axis=1) & (common.numels > 0)
    nbytes = [common.entries(j)[live].astype(np.uint64) * np.uint64(d.itemsize if d else 0)
              for j, d in enumerate(common.dtypes)]  # fmt: skip
    index = np.flatnonzero(live).astype(np.int64)
    start = np.concatenate([addresses[live, j] for j in writes])
    end = np.concatenate([addresses[live, j] + nbytes[j] for j in writes])
    which = np.concatenate([index] * len(writes))
    order = np.argsort(start, kind="stable")
    start, end, which = start[order], end[order], which[order]
    clash = np.flatnonzero(end[:-1] > start[1:])
    for at in clash:
        _overlap(common.names, int(which[at]), int(which[at + 1]))
    for j in set(range(len(nbytes))) - set(writes):
        begin = addresses[live, j]
        stop = begin + nbytes[j]
        at = np.searchsorted(start, stop, side="left").astype(np.int64) - 1  # the last written start below our end
        hit = (at >= 0) & (end[at] > begin)
        same = (which[at] == index) & (start[at] == begin) & (end[at] == stop)
        for position in np.flatnonzero(hit & ~same):
            _overlap(common.names, int(index[position]), int(which[at[position]]))


def _overlap(names: Sequence[str], a: int, b: int) -> NoReturn:
    raise ValueError(
        f"tensors {a} and {b} of the lists {list(names)} overlap in memory and cannot be updated in place; "
        "give each tensor once, with memory of its own"
    )
