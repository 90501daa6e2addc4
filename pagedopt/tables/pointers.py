"""Pointer tables: addresses of lists of tensors, written once, compared in every step, rewritten where they changed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..system.compare_tensors import TensorLayout, addresses, missing
from .layout import WORD, Geometry, HostTable, Words, choose_geometry
from .storage import POSITION_WORDS
from .tensors import Common, TensorList, Tensors, check_overlap, checked_writes, has_memory

Indices = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table as parts of tensors, in any order.

    Attributes:
        tensor: index of each row's tensor.
        offset, numel: the row's first element in it, and how many.
        shift: (rows, lists), or an array that broadcasts to it: bytes from where the part lies to where the kernel
            works on it, modulo 2**64.
    """

    tensor: Indices
    offset: Indices
    numel: Indices
    shift: npt.NDArray[np.uint64]


#: A view into a freed storage has its own offset as address.  No offset reaches this address, and real memory rarely
#: lies below it.
_OFFSET = np.uint64(1 << 44)


class PointerTable:
    """The addresses and sizes of ``k`` lists of ``n`` tensors, and the chunks that the work is cut into.

    Tensor i has the same shape, strides and device in every list; a list has one dtype.  Tensors are dense (any
    permutation of dimensions, no gaps), so element j of one corresponds to element j of another.

    The table keeps its tensors alive.  Call :meth:`follow` before each use: it takes the addresses they have now.

    Args:
        lists: the tensors; ``None`` stands for an absent one (a missing gradient), whose row is skipped.  The first
            list has none absent.
        writes: indices of the lists that will be overwritten; their memory must not overlap any other.
        names: the lists' names, for errors.
        uniforms, sets: hyperparameters per set, and sets at once (see :class:`~pagedopt.tables.layout.HostTable`).
        geometry: how to cut the work; default: chosen from the sizes.
        itemsize, over_link: see :func:`~pagedopt.tables.layout.choose_geometry`; ``over_link`` is ignored on a CPU.
        rows: the parts of tensors that are rows; default: row i is all of tensor i.
        per: for each list, consecutive elements that share an entry, default 1; if more, the list's tensors have shape
            (entries,).
        places: whether a row has two more words after its addresses: its tensor's number, and its first element there.
        numbers, firsts: of the tensors, by default their indices; and where their first elements stand, by default 0.
        per_thread: see :func:`~.layout.choose_geometry`.

    Raises:
        ValueError: lengths, shapes, strides or devices differ; tensors are not dense or overlap; ``writes`` has an
            index out of range.
        TypeError: something is no tensor, or sparse; the dtypes of a list differ; ``writes`` is no collection of
            integers.
    """

    __slots__ = (
        "__weakref__", "_absent", "_addresses", "_common", "_firsts", "_held", "_numbers", "_rows", "_seen",
        "_seen_before", "_unwritten", "absent", "device", "host", "names", "writes",
    )  # fmt: skip

    def __init__(
        self,
        lists: Sequence[TensorList],
        *,
        writes: Collection[int] = (),
        names: Sequence[str] | None = None,
        uniforms: int = 0,
        sets: int = 1,
        geometry: Geometry | None = None,
        itemsize: int = 4,
        over_link: bool = False,
        rows: Rows | None = None,
        per: Sequence[int] | None = None,
        places: bool = False,
        numbers: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
        per_thread: int = 4,
    ) -> None:
        self.names = tuple(names) if names else tuple([f"list {i}" for i in range(len(lists))])
        self.writes = checked_writes(writes, len(lists))
        given = [*map(tuple, lists)]  # the caller's lists may change, or create tensors when iterated
        if len({*map(len, given)}) != 1:
            sizes = ", ".join(f"{name}: {len(x)}" for name, x in zip(self.names, given, strict=False))
            raise ValueError(f"pointer table: every list needs the same number of tensors, got {sizes or 'no lists'}")
        self._common = Common(self.names, given[0], per)
        self._rows = rows
        #: Of every tensor; the CPU for an empty table.
        self.device = self._common.device or torch.device("cpu")
        counts = self._common.numels if rows is None else rows.numel
        over_link = over_link and self.device.type == "cuda"
        geometry = geometry or choose_geometry(counts.tolist(), itemsize, over_link, per_thread)
        self.host = HostTable(len(lists) + (POSITION_WORDS if places else 0), counts, uniforms, sets, geometry)
        self._addresses = np.zeros((len(lists), len(self._common.numels)), np.uint64)
        self._numbers = np.arange(len(given[0])) if numbers is None else np.asarray(numbers)
        self._firsts = np.zeros(len(given[0]), np.int64) if firsts is None else np.asarray(firsts)
        self._write_positions(self.host)
        #: For each list, the indices of absent tensors; None: it was not taken yet.
        self._absent: list[tuple[int, ...] | None] = [None] * len(lists)
        self._held: list[Tensors | None] = [None] * len(lists)
        self._seen: TensorLayout | None = None
        self._seen_before: tuple[TensorLayout, ...] = ()
        self._unwritten = False
        #: Indices of tensors that are skipped, as they are absent from a list.
        self.absent: list[int] = []
        self._check(given)

    @property
    def dtypes(self) -> list[torch.dtype | None]:
        """Of each list; None while all its tensors have been absent."""
        return self._common.dtypes

    @property
    def numels(self) -> list[int]:
        """Elements of each tensor."""
        return self._common.numels.tolist()

    def __len__(self) -> int:
        return len(self._common.numels)

    def refresh(self, lists: Sequence[TensorList | None]) -> bool:
        """Compare addresses, sizes and strides with the table, and rewrite what has changed.

        Overlaps are checked again when a written list has moved, but not when a list that is only read has, as
        gradients do in every step: new memory overlaps nothing.

        Args:
            lists: as at construction; ``None`` for a list that cannot have changed.

        Returns:
            whether anything changed.

        Raises:
            ValueError, TypeError: as at construction, naming list and index; the table is unchanged then.
        """
        given = [self._held[j] if x is None else tuple(x) for j, x in enumerate(lists)]
        if None in given or any(len(x) != len(self) for x in given if x is not None):
            return self._check(given)
        tensors: Tensors = (*itertools.chain.from_iterable(given),)  # type: ignore[arg-type]
        stamp = self.host.rows_stamp
        if self.look(tensors):
            self._held[: len(given)] = given
        else:
            self._check(given)
            self.remember(tensors)
        return self.host.rows_stamp != stamp

    def _check(self, given: Sequence[Tensors | None]) -> bool:
        """:meth:`refresh` that checks every tensor."""
        changes: dict[int, tuple[int, ...]] = {}
        dtypes, now = list(self._common.dtypes), self._addresses.copy()
        try:
            for j, tensors in enumerate(given):
                if tensors is not None:
                    absent = missing(tensors)
                    now[j] = self._locate(j, tensors, absent)
                    if absent != self._absent[j] or now[j].tobytes() != self._addresses[j].tobytes():
                        changes[j] = absent
            if not changes.keys().isdisjoint(self.writes):
                check_overlap(self._common, self.writes, now.T)
        except BaseException:
            self._common.dtypes = dtypes  # a list may have taken its first dtype
            raise
        for j, tensors in enumerate(given):
            if tensors is not None:
                self._held[j] = tensors
        if not changes and not self._unwritten:
            return False
        self._seen = None  # other tensors may be absent now
        self._unwritten = True  # if we are interrupted, the next call writes all rows again
        for j, absent in changes.items():
            self._absent[j] = absent
        self.absent = sorted(set().union(*filter(None, self._absent)))
        self._write(now)
        return True

    def _write(self, now: Addresses, moved: Collection[int] = ()) -> None:
        """Write the addresses ``now`` into the table: of the ``moved`` lists alone, if all others are written."""
        whole, self._unwritten = self._rows is not None or self._unwritten, True
        self._addresses[:] = now  # in place: a compiled look writes there, too
        for j in () if whole else moved:
            self.host.set_column(j, now[j])
        if whole:
            self._write_rows(self.host)
        self._unwritten = False

    def follow(self) -> bool:
        """Take the addresses that the table's own tensors have now (see :meth:`refresh`).

        Returns:
            whether anything changed.

        Raises:
            ValueError, TypeError: a tensor can no longer be used, e.g. has another size; the table is unchanged then.
        """
        if not (self.absent or self._unwritten or None in self._held):
            held: Any = tuple(itertools.chain.from_iterable(self._held))  # type: ignore[arg-type]
            if addresses(held) == self._addresses.tobytes():
                return False  # the same objects at the same addresses have the same strides
        return self.refresh(self._held)

    def remember(self, tensors: Tensors) -> None:
        """Store shapes and strides of tensors that the table has just taken, for :meth:`look`.

        Args:
            tensors: of the first lists, one list after the other: those that may be replaced, or change strides.  The
                caller itself compares the other lists.
        """
        for seen in self._seen_before:  # a gradient that comes and goes is seen again
            if seen.addresses(tensors) is not None:
                self._seen = seen
                return
        self._seen = TensorLayout(tensors)
        self._seen_before = (self._seen, *self._seen_before[:1])

    def look(self, tensors: Tensors) -> bool:
        """Take the addresses of tensors if their shapes and strides are as remembered, in as few calls as possible.

        Args:
            tensors: as for :meth:`remember`.

        Returns:
            whether they were; if not, the table is unchanged: call :meth:`refresh`.

        Raises:
            ValueError: a tensor has no memory, or shares it; the table is unchanged then.
        """
        seen = self._seen
        if seen is None or (at := seen.addresses(tensors)) is None:
            return False
        if at != self._addresses.reshape(-1)[seen.here].tobytes() or self._unwritten:
            now, count = self._addresses.copy(), self._addresses.shape[1]
            now.reshape(-1)[seen.here] = np.frombuffer(at, np.uint64)
            moved = [j for j in range(len(tensors) // count) if now[j].tobytes() != self._addresses[j].tobytes()]
            for j in moved:
                self._check_memory(j, now[j], tensors[j * count : (j + 1) * count])
            if not set(moved).isdisjoint(self.writes):
                check_overlap(self._common, self.writes, now.T)
            self._write(now, moved)
        return True

    def addresses_of(self, j: int) -> list[int]:
        """Return where each tensor of list ``j`` lies."""
        found: list[int] = self._addresses[j].tolist()
        return found

    def column(self, j: int) -> Words:
        """Return where each tensor of list ``j`` lies, (tensors,) uint64; 0: it is absent."""
        return self._addresses[j]

    def let_go(self) -> None:
        """Stop keeping the tensors alive; give all lists again before the table is used."""
        self._held = [None] * len(self._held)

    def make_room(self, sets: int) -> None:
        """Make room for ``sets`` sets of hyperparameters, in a new table: launches may still read the old one.

        Call :meth:`assign_sets` again.
        """
        counts = self._common.numels if self._rows is None else self._rows.numel
        host = HostTable(self.host.lists, counts, self.host.scalars.shape[1], sets, self.host.geometry)
        self._write_positions(host)
        self._write_rows(host)
        self.host = host

    def _write_positions(self, host: HostTable) -> None:
        """Write each row's tensor number and first element, if the table has words for them (``places``)."""
        words = host.rows["address"][:, len(self._addresses) :]
        if words.shape[1]:
            of: Any = slice(None) if self._rows is None else self._rows.tensor
            words[:, 0] = self._numbers[of]
            words[:, 1] = self._firsts[of] + (0 if self._rows is None else self._rows.offset)

    def _write_rows(self, host: HostTable) -> None:
        rows, parts = host.rows, self._rows
        address = rows["address"][:, : len(self._addresses)]
        if parts is None:
            address[:], rows["numel"] = self._addresses.T, self._common.numels
            rows["numel"][self.absent] = 0
        else:
            items = np.array([d.itemsize if d else 0 for d in self.dtypes], np.int64)
            inner = parts.offset[:, None] // np.array(self._common.per, np.int64) * items
            address[:] = self._addresses.T[parts.tensor] + inner.astype(np.uint64) + parts.shift
            rows["numel"] = np.where(np.isin(parts.tensor, self.absent), 0, parts.numel)
        host.rows_changed()

    def assign_sets(self, sets: npt.NDArray[np.int64]) -> None:
        """Write the index of each tensor's set of hyperparameters, (tensors,)."""
        self.host.set_sets(sets if self._rows is None else sets[self._rows.tensor])

    def words_of_addresses(self, j: int) -> tuple[Words, Words]:
        """Return the addresses of two words for each tensor of list ``j``: both hold where the tensor lies.

        The first is in the rows of :attr:`host`.  The tensors are the rows (:attr:`whole_rows`).  These words are
        written between :meth:`begin_writing` and :meth:`end_writing`.
        """
        at, host = WORD * np.arange(len(self), dtype=np.uint64), self.host
        cells = at * np.uint64(host.lists + 2) + np.uint64(host.row_words.ctypes.data + WORD * j)
        return cells, at + np.uint64(self._addresses[j].ctypes.data)

    def begin_writing(self) -> bool:
        """Note that somebody else writes words of the table; return False if a write has not ended."""
        before, self._unwritten = self._unwritten, True
        return not before

    def end_writing(self) -> None:
        """Note that these words are written."""
        self._unwritten = False

    @property
    def whole_rows(self) -> bool:
        """Whether row i is all of tensor i."""
        return self._rows is None

    def moved(self, lists: Sequence[TensorList]) -> list[tuple[str, int]]:
        """Return (list name, index) of every tensor whose address differs from the table's."""
        found = []
        for j, tensors in enumerate(lists):
            at = np.array([0 if t is None else t.data_ptr() for t in tensors or ()], np.uint64)
            found += [(self.names[j], i) for i in np.flatnonzero(at != self._addresses[j, : len(at)]).tolist()]
        return found

    def _locate(self, j: int, tensors: Tensors, absent: Sequence[int]) -> Addresses:
        """Check every tensor of list ``j``, and return where they lie; 0 for an absent one."""
        if len(tensors) != len(self._numbers):
            raise ValueError(f"{self.names[j]} has {len(tensors)} tensors, the table has {len(self)}")
        self._common.check(j, tensors, absent)
        if absent:
            at = np.array([0 if t is None else t.data_ptr() for t in tensors], np.uint64)
        else:
            at = np.frombuffer(addresses(tensors, sure=False), np.uint64)  # type: ignore[arg-type]
        self._check_memory(j, at, tensors)
        return at

    def _check_memory(self, j: int, at: Addresses, tensors: Tensors) -> None:
        """Refuse tensors of list ``j`` whose storage was freed; ``data_ptr()`` does not."""
        doubtful = at < _OFFSET
        if j in self.writes and self._absent[j] is not None:
            doubtful |= at != self._addresses[j]
        for i in doubtful.nonzero()[0].tolist():
            tensor = tensors[i]
            if tensor is None or not self._common.numels[i]:
                continue
            if not has_memory(tensor):
                self._common.fail(ValueError, j, i, "has no memory (its storage was freed or resized to less)")
            if not at[i]:
                self._common.fail(ValueError, j, i, f"is a {type(tensor).__name__}, which has no memory of its own")
