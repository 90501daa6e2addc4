"""Lists of tensors as a table of addresses, kept true: built once, compared every step, rewritten where it changed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from .table import Geometry, HostTable

TensorList = Sequence[torch.Tensor | None]

_address = torch.Tensor.data_ptr
_contiguous = torch.Tensor.is_contiguous
_nbytes = operator.attrgetter("nbytes")


class PointerTable:
    """The addresses of ``k`` lists of ``n`` tensors, their sizes, and the chunks the work is cut into.

    Tensor i of every list has the same shape, strides and device; the tensors of one list have one dtype.  They are
    dense (any permutation of dimensions, no gaps), so element j of one lies where element j of another does.

    Args:
        lists: the tensors; ``None`` stands for a tensor that is absent (a missing gradient): its row is skipped.
            The first list has none absent.
        writes: indices of the lists that will be overwritten; their memory must not overlap any other.
        names: what to call the lists in errors.
        uniforms, sets: hyperparameters per set, and sets at once (see :class:`~pagedopt.table.HostTable`).
        geometry: how to cut the work, chosen from the sizes when left out.

    Raises:
        ValueError: lengths, shapes, strides or devices differ, or tensors are not dense or overlap.
        TypeError: something is no tensor, is sparse, or the dtypes of a list differ.
    """

    def __init__(
        self,
        lists: Sequence[TensorList],
        *,
        writes: Collection[int] = (),
        names: Sequence[str] | None = None,
        uniforms: int = 0,
        sets: int = 1,
        geometry: Geometry | None = None,
    ) -> None:
        self.names = list(names) if names else [f"list {i}" for i in range(len(lists))]
        self.writes = tuple(writes)
        if not lists or any(len(x) != len(lists[0]) for x in lists):
            sizes = ", ".join(f"{name}: {len(x)}" for name, x in zip(self.names, lists, strict=False))
            raise ValueError(f"pointer table: every list needs the same number of tensors, got {sizes or 'no lists'}")
        self._device: torch.device | None = None
        self._shapes: list[tuple[torch.Size, tuple[int, ...]]] = []
        self.dtypes: list[torch.dtype | None] = [None] * len(lists)
        first = [self._tensor(0, i, t) for i, t in enumerate(lists[0])]
        for i, tensor in enumerate(first):
            self._adopt_shape(i, tensor)
        self.numels = [t.numel() for t in first]
        self.host = HostTable(len(lists), self.numels, uniforms, sets, geometry)
        count = len(first)
        self._addresses: list[list[int]] = [[-1] * count for _ in lists]
        self._sizes: list[list[int]] = [[-1] * count for _ in lists]
        self._flags: list[list[bool]] = [[False] * count for _ in lists]
        self.refresh(lists)

    @property
    def device(self) -> torch.device:
        """The device of every tensor (the CPU for an empty table)."""
        return self._device or torch.device("cpu")

    def __len__(self) -> int:
        return len(self.numels)

    def refresh(self, lists: Sequence[TensorList | None]) -> bool:
        """Compare every address, size and layout with the table and rewrite what changed.

        Args:
            lists: as at construction; ``None`` for a list that cannot have changed.

        Returns:
            whether anything changed.

        Raises:
            ValueError, TypeError: as at construction, naming list and index; the table is unchanged then.
        """
        changes: list[tuple[int, list[int], list[int], list[bool]]] = []
        for j, tensors in enumerate(lists):
            if tensors is not None and (change := self._compare(j, tensors)):
                changes.append(change)
        if not changes:
            return False
        rows = self.host.rows
        addresses = rows["address"].copy()
        for j, new, _, _ in changes:
            addresses[:, j] = new
        present = (addresses != 0).all(axis=1)
        if any(j in self.writes for j, *_ in changes):
            self._check_overlap(addresses)
        for j, new, sizes, flags in changes:
            self._addresses[j], self._sizes[j], self._flags[j] = new, sizes, flags
        rows["address"] = addresses
        rows["numel"] = np.where(present, self.numels, 0)
        self.host.rows_changed()
        return True

    def moved(self, lists: Sequence[TensorList]) -> list[tuple[str, int]]:
        """(list name, index) of every tensor that no longer lies where the table says."""
        return [
            (self.names[j], i)
            for j, tensors in enumerate(lists)
            for i, tensor in enumerate(tensors)
            if (0 if tensor is None else tensor.data_ptr()) != self._addresses[j][i]
        ]

    def _compare(self, j: int, tensors: TensorList) -> tuple[int, list[int], list[int], list[bool]] | None:
        """None if list ``j`` lies where it did, in the same layout; else its validated new addresses."""
        if len(tensors) != len(self.numels):
            raise ValueError(f"{self.names[j]} has {len(tensors)} tensors, the table has {len(self.numels)}")
        try:
            addresses = list(map(_address, tensors))  # type: ignore[arg-type]
            sizes = list(map(_nbytes, tensors))
            flags = list(map(_contiguous, tensors))  # type: ignore[arg-type]
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # absent, sparse, or no tensor at all
            present = [None if t is None and j else self._tensor(j, i, t) for i, t in enumerate(tensors)]
            addresses = [0 if t is None else t.data_ptr() for t in present]
            sizes = [0 if t is None else t.nbytes for t in present]
            flags = [t is None or t.is_contiguous() for t in present]
        if addresses == self._addresses[j] and sizes == self._sizes[j] and flags == self._flags[j]:
            return None
        old = zip(self._addresses[j], self._sizes[j], self._flags[j], strict=True)
        new = zip(addresses, sizes, flags, strict=True)
        for i, (before, now) in enumerate(zip(old, new, strict=True)):
            if before != now and (tensor := tensors[i]) is not None:
                self._check_tensor(j, i, tensor)
        return j, addresses, sizes, flags

    def _tensor(self, j: int, i: int, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            self._fail(TypeError, j, i, f"is {type(value).__name__}, not a tensor")
        if value.layout is not torch.strided:
            self._fail(TypeError, j, i, f"is sparse ({value.layout}); only dense tensors are supported")
        return value

    def _adopt_shape(self, i: int, tensor: torch.Tensor) -> None:
        if not is_dense(tensor):
            self._fail(
                ValueError, 0, i,
                f"of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps itself; "
                "use a contiguous tensor",
            )  # fmt: skip
        if self._device is None:
            self._device = tensor.device
        self._shapes.append((tensor.shape, tensor.stride()))

    def _check_tensor(self, j: int, i: int, tensor: torch.Tensor) -> None:
        self._tensor(j, i, tensor)
        shape, strides = self._shapes[i]
        if tensor.shape != shape:
            self._fail(ValueError, j, i, f"has shape {tuple(tensor.shape)}, the table has {tuple(shape)}")
        if tensor.numel() > 1 and not _same_layout(shape, tensor.stride(), strides):
            self._fail(
                ValueError, j, i,
                f"has strides {tensor.stride()}, {self.names[0]} has {strides}: they must be laid out alike",
            )  # fmt: skip
        if tensor.device != self._device:
            self._fail(ValueError, j, i, f"is on {tensor.device}, the table is on {self._device}")
        if self.dtypes[j] is None:
            self.dtypes[j] = tensor.dtype
        if tensor.dtype is not self.dtypes[j]:
            self._fail(TypeError, j, i, f"is {tensor.dtype}, the list is {self.dtypes[j]}")
        if tensor.numel() and not tensor.data_ptr():
            self._fail(ValueError, j, i, "has no memory (its storage was freed or resized to nothing)")

    def _check_overlap(self, addresses: npt.NDArray[np.uint64]) -> None:
        """What is written may share memory only with the same row of another list, exactly."""
        if not self.writes:
            return
        item = [d.itemsize if d else 0 for d in self.dtypes]
        numels = np.asarray(self.numels, np.uint64)
        live = (addresses != 0).all(axis=1) & (numels > 0)
        index = np.flatnonzero(live).astype(np.int64)
        start = np.concatenate([addresses[live, j] for j in self.writes])
        end = np.concatenate([addresses[live, j] + numels[live] * np.uint64(item[j]) for j in self.writes])
        which = np.concatenate([index] * len(self.writes))
        order = np.argsort(start, kind="stable")
        start, end, which = start[order], end[order], which[order]
        clash = np.flatnonzero(end[:-1] > start[1:])
        for at in clash:
            self._overlap(int(which[at]), int(which[at + 1]))
        for j in set(range(len(item))) - set(self.writes):
            begin = addresses[live, j]
            stop = begin + numels[live] * np.uint64(item[j])
            at = np.searchsorted(start, stop, side="left").astype(np.int64) - 1  # the last written start below our end
            hit = (at >= 0) & (end[at] > begin)
            same = (which[at] == index) & (start[at] == begin) & (end[at] == stop)
            for position in np.flatnonzero(hit & ~same):
                self._overlap(int(index[position]), int(which[at[position]]))

    def _overlap(self, a: int, b: int) -> NoReturn:
        raise ValueError(
            f"tensors {a} and {b} of the lists {self.names} overlap in memory and cannot be updated in place; "
            "give each tensor once, with memory of its own"
        )

    def _fail(self, kind: type[Exception], j: int, i: int, why: str) -> NoReturn:
        raise kind(f"tensor {i} of {self.names[j]} {why}")


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


def _same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Strides that differ only in dimensions of size one lead to the same places."""
    return a == b or all(x == y for x, y, size in zip(a, b, shape, strict=True) if size != 1)
