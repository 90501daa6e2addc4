"""Lists of tensors as a table of addresses, kept true: built once, compared every step, rewritten where it changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..system.internals import Addresses, TensorLayout, addresses, lie_at
from .checks import Common, check_overlap, checked_writes
from .columns import Located, TensorList, Tensors, has_memory, missing
from .layout import Geometry, HostTable, choose_geometry
from .storage import PLACES

Indices = npt.NDArray[np.int64]


class _Seen(NamedTuple):
    """What :meth:`PointerTable.remember` remembers.

    Attributes:
        layout: of the tensors.
        missing: where there is none.
        here: the other places; None: nothing is missing.
    """

    layout: TensorLayout
    missing: tuple[int, ...]
    here: Indices | None


@dataclass(frozen=True, slots=True)
class Rows:
    """How tensors become rows of a table: parts of tensors, in any order.

    Attributes:
        tensor: which tensor a row is part of.
        offset, numel: which of its elements.
        shift: (rows, lists), or what stands for that: bytes from where that part lies to where the kernel works on it,
            modulo 2**64.
    """

    tensor: Indices
    offset: Indices
    numel: Indices
    shift: npt.NDArray[np.uint64]


#: Bytes.  The address of a view into freed memory is its offset; nothing but small heaps of some programs lies below.
_OFFSET = np.uint64(1 << 33)


class PointerTable:
    """The addresses of ``k`` lists of ``n`` tensors, their sizes, and the chunks the work is cut into.

    Tensor i of every list has the same shape, strides and device; the tensors of one list have one dtype.  They are
    dense (any permutation of dimensions, no gaps), so element j of one lies where element j of another does.

    The table keeps its tensors alive; :meth:`follow` sees to it that it says where they are before it is used.

    Args:
        lists: the tensors; ``None`` stands for a tensor that is absent (a missing gradient): its row is skipped.
            The first list has none absent.
        writes: indices of the lists that will be overwritten; their memory must not overlap any other.
        names: what to call the lists in errors.
        uniforms, sets: hyperparameters per set, and sets at once (see :class:`~pagedopt.tables.layout.HostTable`).
        geometry: how to cut the work, chosen from the sizes when left out.
        itemsize, over_link: see :func:`~pagedopt.tables.layout.choose_geometry`; the CPU has no link.
        rows: what the rows are; left out: row i is the whole of tensor i.
        per: for each list, elements of a tensor that share an entry: a list with more than one has tensors (entries,).
            Left out: one, in every list.
        places: whether a row has two words more behind its addresses: which tensor it is of, and with which of that
            tensor's elements it begins.

    Raises:
        ValueError: lengths, shapes, strides or devices differ, or tensors are not dense or overlap; ``writes`` has a
            number that no list has.
        TypeError: something is no tensor, is sparse, or the dtypes of a list differ; ``writes`` is no collection of
            integers.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_columns", "_common", "_held", "_rows", "_seen", "_unwritten", "absent", "host",
        "names", "writes",
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
    ) -> None:
        self.names = tuple(names) if names else tuple([f"list {i}" for i in range(len(lists))])
        self.writes = checked_writes(writes, len(lists))
        lists = [tuple(x) for x in lists]  # the caller's may change, or make its tensors when it is asked for them
        if not lists or any(len(x) != len(lists[0]) for x in lists):
            sizes = ", ".join(f"{name}: {len(x)}" for name, x in zip(self.names, lists, strict=False))
            raise ValueError(f"pointer table: every list needs the same number of tensors, got {sizes or 'no lists'}")
        self._common = Common(self.names, lists[0], per)
        self._rows = rows
        counts = self._common.numels if rows is None else rows.numel
        geometry = geometry or choose_geometry(counts.tolist(), itemsize, over_link and self.device.type == "cuda")
        self.host = HostTable(len(lists) + (PLACES if places else 0), counts, uniforms, sets, geometry)
        self._addresses = np.zeros((len(lists), len(self._common.numels)), np.uint64)
        self._write_places(self.host)
        self._columns: list[Located | None] = [None] * len(lists)
        self._held: list[Tensors | None] = [None] * len(lists)
        self._seen: _Seen | None = None
        self._unwritten = False
        #: indices of tensors that are skipped because a list lacks them
        self.absent: list[int] = []
        self.refresh(lists)

    @property
    def device(self) -> torch.device:
        """The device of every tensor (the CPU for an empty table)."""
        return self._common.device or torch.device("cpu")

    @property
    def dtypes(self) -> list[torch.dtype | None]:
        """Of each list; None where all of it was absent so far."""
        return self._common.dtypes

    @property
    def numels(self) -> list[int]:
        """Elements of each tensor of a list."""
        return self._common.numels.tolist()

    def __len__(self) -> int:
        return len(self._common.numels)

    def refresh(self, lists: Sequence[TensorList | None]) -> bool:
        """Compare every address, size and layout with the table and rewrite what changed.

        Overlaps are looked for again when a list that is written has moved.  A list that is only read may move without
        that, as gradients do in every step: fresh memory overlaps nothing.

        Args:
            lists: as at construction; ``None`` for a list that cannot have changed.

        Returns:
            whether anything changed.

        Raises:
            ValueError, TypeError: as at construction, naming list and index; the table is unchanged then.
        """
        return self._take(lists, self._compare)

    def take(self, lists: Sequence[TensorList | None]) -> bool:
        """:meth:`refresh` that looks at each tensor, whatever is known: for who has seen that something is not as it
        was (:meth:`look`)."""
        return self._take(lists, self._examine)

    def _take(
        self,
        lists: Sequence[TensorList | None],
        examine: Callable[[int, Tensors], tuple[Located, Addresses] | None],
    ) -> bool:
        changes: dict[int, tuple[Located, Addresses]] = {}
        dtypes = list(self._common.dtypes)
        given = [None if x is None else tuple(x) for x in lists]
        try:
            for j, tensors in enumerate(given):
                if tensors is not None and (change := examine(j, tensors)):
                    changes[j] = change
            now = self._addresses
            if changes:
                now = now.copy()
                for j, (_, at) in changes.items():
                    now[j] = at
                if any(j in changes for j in self.writes):
                    check_overlap(self._common, self.writes, now.T)
        except BaseException:
            self._common.dtypes = dtypes  # a list that was empty had taken one
            raise
        for j, tensors in enumerate(given):
            if tensors is not None:
                self._held[j] = tensors
        if not changes and not self._unwritten:
            return False
        self._seen = None  # it goes with the absent tensors of before
        self._write(now, {j: column for j, (column, _) in changes.items()})
        return True

    def _write(self, now: npt.NDArray[np.uint64], columns: Mapping[int, Located]) -> None:
        """Let the table say that its tensors lie ``now`` where they do."""
        self._unwritten = True  # until it does: what fails between here and there is made good by the next call
        self._addresses = now  # first: who finds a column of today looks at no address again
        for j, column in columns.items():
            self._columns[j] = column
        self.absent = sorted(set().union(*[c.absent for c in self._columns if c and c.absent]))
        self._write_rows(self.host)
        self._unwritten = False

    def follow(self) -> bool:
        """:meth:`refresh` with the tensors of the table: take the addresses that they have now.

        Returns:
            whether anything changed.

        Raises:
            ValueError, TypeError: a tensor can no longer be used, e.g. has another size; the table is unchanged then.
        """
        if not (self.absent or self._unwritten or None in self._held):
            held: Any = tuple(itertools.chain.from_iterable(self._held))  # type: ignore[arg-type]
            if lie_at(held, self._addresses.ravel()):
                return False  # the same objects in the same places: laid out as they were
        return self.refresh(self._held)

    def remember(self, tensors: Tensors) -> None:
        """Remember how tensors are laid out that the table has just taken, so that :meth:`look` knows them again.

        Args:
            tensors: of the first lists, one list behind the other: those of which others may come, or the same laid out
                anew.  Those of the other lists are for the caller to watch.
        """
        gone = missing(tensors)
        here = [t for t in tensors if t is not None]
        self._seen = _Seen(TensorLayout.of(here), gone, np.delete(np.arange(len(tensors)), gone) if gone else None)

    def look(self, tensors: Tensors) -> bool:
        """Whether the tensors are laid out as those were that were remembered; the table says where they lie then.

        It asks all tensors in as few calls as there can be, and remembers no address but those in the table.

        Args:
            tensors: as for :meth:`remember`.

        Returns:
            False: nothing is remembered, or something else is here; :meth:`take` tells more.  The table is unchanged.

        Raises:
            ValueError: a tensor has no memory, or shares it; the table is unchanged then.
        """
        seen = self._seen
        if seen is None:
            return False
        here: Any = tensors
        if seen.missing:
            if missing(tensors) != seen.missing:
                return False
            here = tuple([t for t in tensors if t is not None])
        try:
            if not seen.layout.same(*here):
                return False
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # absent now, sparse, or no tensor
            return False
        known = self._addresses.reshape(-1)[: len(tensors)]
        known = known if seen.here is None else known[seen.here]
        if lie_at(here, known) and not self._unwritten:
            return True
        self._move(tensors, here, seen)
        return True

    def _move(self, tensors: Tensors, here: tuple[torch.Tensor, ...], seen: _Seen) -> None:
        """Take other addresses of lists that are laid out as they were."""
        now, count = self._addresses.copy(), len(self)
        places = slice(len(here)) if seen.here is None else seen.here
        now.reshape(-1)[places] = addresses(here) if seen.layout.sure else [t.data_ptr() for t in here]
        moved = set()
        for j in range(len(tensors) // count):
            if now[j].tobytes() != self._addresses[j].tobytes():
                self._check_memory(j, now[j], tensors[j * count : (j + 1) * count])
                moved.add(j)
        if not moved.isdisjoint(self.writes):
            check_overlap(self._common, self.writes, now.T)
        if self._rows is not None or self._unwritten:
            self._write(now, {})
            return
        self._unwritten = True
        self._addresses = now
        for j in moved:
            self.host.set_column(j, now[j])
        self._unwritten = False

    def let_go(self) -> None:
        """Keep the tensors alive no longer.  Lists must be given again before the table is used."""
        self._held = [None] * len(self._held)

    def make_room(self, sets: int) -> None:
        """Have room for so many sets of hyperparameters, in a table of its own: launches may still read the one there
        is.  Sets are to be assigned again."""
        counts = self._common.numels if self._rows is None else self._rows.numel
        host = HostTable(self.host.lists, counts, self.host.scalars.shape[1], sets, self.host.geometry)
        self._write_places(host)
        self._write_rows(host)
        self.host = host

    def _write_places(self, host: HostTable) -> None:
        """Where there are words for it, say of each row which tensor it is of, and with which element it begins."""
        words = host.rows["address"][:, len(self._addresses) :]
        if words.shape[1]:
            words[:, 0] = np.arange(len(words)) if self._rows is None else self._rows.tensor
            words[:, 1] = 0 if self._rows is None else self._rows.offset

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
        """Say which set of hyperparameters each tensor takes (see :class:`~pagedopt.tables.layout.HostTable`)."""
        self.host.set_sets(sets if self._rows is None else sets[self._rows.tensor])

    def moved(self, lists: Sequence[TensorList]) -> list[tuple[str, int]]:
        """(list name, index) of every tensor that no longer lies where the table says."""
        return [
            (self.names[j], i)
            for j, tensors in enumerate(lists)
            for i, tensor in enumerate(tensors or ())
            if (0 if tensor is None else tensor.data_ptr()) != self._addresses[j, i]
        ]

    def _compare(self, j: int, tensors: Tensors) -> tuple[Located, Addresses] | None:
        """None if list ``j`` lies where it did, in the same layout; else its validated new column."""
        column = self._columns[j]
        self._check_length(j, tensors)
        at = None if column is None else column.follow(tensors)
        if column is None or at is None:
            self._common.check(j, tensors)
            layout = None if column is None else TensorLayout.of([t for t in tensors if t is not None])
            now, at = Located.of(tensors, layout)
        else:
            now = column
        return self._changed(j, tensors, now, at)

    def _examine(self, j: int, tensors: Tensors) -> tuple[Located, Addresses] | None:
        """:meth:`_compare` that believes nothing which was seen before."""
        self._check_length(j, tensors)
        self._common.check(j, tensors)
        return self._changed(j, tensors, *Located.of(tensors, None))

    def _check_length(self, j: int, tensors: Tensors) -> None:
        if len(tensors) != len(self):
            raise ValueError(f"{self.names[j]} has {len(tensors)} tensors, the table has {len(self)}")

    def _changed(self, j: int, tensors: Tensors, now: Located, at: Addresses) -> tuple[Located, Addresses] | None:
        column, stays = self._columns[j], at.tobytes() == self._addresses[j].tobytes()
        if now is column and stays:
            return None
        self._check_memory(j, at, tensors)
        if column is None or not stays or now.absent != column.absent:
            return now, at
        self._columns[j] = now  # other objects in the same places, or another autograd mode
        return None

    def _check_memory(self, j: int, at: Addresses, tensors: Tensors) -> None:
        if j in self.writes and self._columns[j] is not None:
            doubtful = (at < _OFFSET) | (at != self._addresses[j])
        elif at.min(initial=_OFFSET) >= _OFFSET:
            return
        else:
            doubtful = at < _OFFSET
        for i in doubtful.nonzero()[0].tolist():
            tensor = tensors[i]
            if self._common.numels[i] and tensor is not None and not has_memory(tensor):
                self._common.fail(ValueError, j, i, "has no memory (its storage was freed or resized to less)")
            if self._common.numels[i] and tensor is not None and not at[i]:
                self._common.fail(ValueError, j, i, f"is a {type(tensor).__name__}, which has no memory of its own")
