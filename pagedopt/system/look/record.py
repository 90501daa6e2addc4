"""The record of a compiled look, as one block of words (:mod:`.words`): what a step was prepared for."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from . import words as w
from .parts import Look

#: The classes of tensors that a look reads: those of subclasses may have no memory of their own.
_CLASSES = (torch.Tensor, torch.nn.Parameter)
#: A list in groups of ``named_parameters()``, of which no step knows.
_NAMES = "param_names"
_VALUES = (type(None), bool, int, float, str)
Words = npt.NDArray[np.int64]


class Row(NamedTuple):
    """A parameter.

    Attributes:
        launch: the launch that updates it; -1: none, as it has no gradient.
        address: where it lies.
        cell: address of the word in the pointer table that holds its gradient's address.
        stored: address of another word that holds it, which the look compares and writes.
    """

    launch: int = -1
    address: int = 0
    cell: int = 0
    stored: int = 0


#: A parameter without a gradient.
ABSENT = Row()


class Numbers(NamedTuple):
    """Numbers of one name that a launch changes.

    Attributes:
        itemsize: bytes of one: 4 or 8.
        addresses: where they lie.
    """

    itemsize: int
    addresses: Words


class Record:
    """What a look compares and does.

    It knows objects by their ids, and keeps keys and values of groups alive, but no tensor.

    Args:
        look: the compiled functions.
        groups: ``param_groups``.
        rows: for each parameter, group by group.
        launches: the words of each launch (``words.LAUNCH``).
        state: ``optimizer.state``.
        names: for each of its keys, the names of the values to compare.
        numbers: those that change.
        counters: tensors whose version counters go up besides those of parameters; the caller keeps them alive.
    """

    __slots__ = (
        "_begins", "_changing", "_counts_at", "_each", "_items_at", "_kept", "_keys", "_launches_at", "_look", "_one",
        "_values", "address", "cells",
    )  # fmt: skip

    def __init__(
        self,
        look: Look,
        groups: Sequence[dict[str, Any]],
        rows: Sequence[Row],
        launches: Sequence[Sequence[int]],
        state: Mapping[Any, Any],
        names: Sequence[Sequence[str]],
        numbers: Sequence[Numbers],
        counters: Sequence[torch.Tensor],
    ) -> None:
        params = [p for group in groups for p in group["params"]]
        items = [[x for key, value in g.items() for x in (id(key), _id_of(key, value))] for g in groups]
        values = [(id(name), _tensor(entry[name]), entry[name].data_ptr())
                  for entry, of in zip(state.values(), names, strict=True) for name in of]  # fmt: skip
        dimensions = [p.dim() if row.launch >= 0 else 0 for p, row in zip(params, rows, strict=True)]
        at = w.HEADER + w.GROUP * len(groups)
        header = np.zeros(at, np.int64)
        header[[w.PARTS_AT, w.GROUPS, w.ROWS, w.LAUNCHES, w.KEYS, w.COUNTS, w.COUNTERS]] = (
            look.parts.ctypes.data, len(groups), len(rows), len(launches), len(names), len(numbers), len(counters),
        )  # fmt: skip
        header[w.HEADER :] = [
            x for g, own in zip(groups, items, strict=True) for x in (len(own) // 2, 0, len(g["params"]), 0, 0)
        ]
        sizes = np.where([row.launch >= 0 for row in rows], 3 * np.array(dimensions, np.int64) + 2, 0)
        row_at = at + sum(map(len, items))
        layout_at = row_at + w.ROW * len(rows) + np.cumsum(sizes) - sizes
        table = np.zeros((len(rows), w.ROW), np.int64)
        table[:, w.ID], table[:, w.TYPE] = [*map(id, params)], [_class_of(p) for p in params]
        table[:, w.DIMENSIONS], table[:, w.LAYOUT_AT] = dimensions, layout_at
        of = np.array(rows, np.int64).reshape(-1, len(Row._fields))
        table[:, w.PRESENT] = of[:, 0] >= 0
        table[:, [w.LAUNCH_OF, w.ADDRESS, w.CELL_AT, w.STORED_AT]] = of
        #: New values of each name's numbers, and their address: one for all, or one for each (None: not needed so far).
        self._one = [(one, one.ctypes.data) for one in (np.zeros(1) for _ in numbers)]
        self._each: list[tuple[npt.NDArray[np.float64], int] | None] = [None] * len(numbers)
        self._kept = (numbers, counters, names)
        sections = (
            (w.ITEMS_AT, [x for own in items for x in own]),
            (w.ROWS_AT, table.ravel()),
            (w.CELLS, np.zeros(int(sizes.sum()), np.int64)),  # the layouts, which rows point to
            (w.LAUNCHES_AT, [x for launch in launches for x in launch]),
            (w.KEYS_AT, [x for key, of in zip(state, names, strict=True) for x in (id(key), len(of))]),
            (w.VALUES_AT, [x for value in values for x in value]),
            (w.COUNTS_AT, [x for each in numbers
                           for x in (len(each.addresses), each.itemsize, each.addresses.ctypes.data, 0, 0, 0, 0)]),
            (w.COUNTERS_AT, [*map(id, counters)]),
            (w.CELLS, np.zeros(sum(len(each.addresses) for each in numbers), np.int64)),  # old values of numbers
        )  # fmt: skip
        for where, section in sections:
            if where != w.CELLS:
                header[where] = at
            at += len(section)
        whole = np.concatenate([header, *(np.asarray(section, np.int64) for _, section in sections)])
        self.address, self.cells = whole.ctypes.data, whole.data
        before = self.address + 8 * (at - sum(len(each.addresses) for each in numbers))
        self._items_at, self._launches_at, self._counts_at = header[[w.ITEMS_AT, w.LAUNCHES_AT, w.COUNTS_AT]].tolist()
        self._look = look
        self._begins = [0, *itertools.accumulate(len(own) // 2 for own in items)]  # of each group among all items
        self._keys = [_shared((*group,)) for group in groups]
        self._values = [[None if key == "params" else value for key, value in group.items()] for group in groups]
        #: Items of groups that have changed: the group's index, the item's, its key, and where its id lies.
        self._changing: Sequence[tuple[int, int, str, int]] = ()
        for i, each in enumerate(numbers):
            self.cells[self._counts_at + w.COUNT * i + 5] = before
            before += 8 * len(each.addresses)

    def note(self, groups: list[dict[str, Any]]) -> bool:
        """Note what parameters and gradients are now; return False if they cannot be compared."""
        return self.compare_groups(groups) == w.ALIKE and bool(self._look.note(self.address))

    def compare_groups(self, groups: list[dict[str, Any]]) -> int:
        """Return whether the groups hold the same objects (``words.ALIKE`` …); their parameters are not compared."""
        found: int = self._look.compare_groups(self.address, id(groups))
        return found

    def take_groups(self, groups: Sequence[dict[str, Any]]) -> list[tuple[int, str, Any]] | None:
        """Take the values that :meth:`compare_groups` has found to be other ones.

        Returns:
            the group's index, key and value of each; None: one may change while it is the same object.
        """
        changing: list[tuple[int, int, str, int]] = []
        for i, keys in enumerate(self._keys):
            at, items = w.HEADER + w.GROUP * i, self._items_at + 2 * self._begins[i]
            if changed := self.cells[at + 3]:
                of = [self.cells[at + 4]] if changed == 1 else range(len(keys))
                changing += [(i, j, keys[j], items + 2 * j + 1) for j in of if keys[j] != "params"]
        self._changing = changing
        return self.take_again(groups)

    def take_again(self, groups: Sequence[dict[str, Any]]) -> list[tuple[int, str, Any]] | None:
        """Take the values that items have now of which the last :meth:`take_groups` has found new ones; as that."""
        found = []
        for i, j, key, cell in self._changing:
            if (value := groups[i][key]) is not self._values[i][j]:
                if type(value) is not float and key != _NAMES and not is_known_by_id(value):
                    return None
                self._values[i][j], self.cells[cell] = value, id(value)
                found.append((i, key, value))
        return found

    def set_number(self, i: int, coming: float | npt.NDArray[np.float64]) -> None:
        """Set the new values of numbers ``i``: one for all, or one for each."""
        # The address is written each time, behind what lies there: an interrupt leaves none of another array.
        at = self._counts_at + w.COUNT * i
        if isinstance(coming, float):
            one, address = self._one[i]
            one[0], each = coming, 0
        else:
            if (known := self._each[i]) is None:
                some = np.empty(len(coming))
                known = self._each[i] = some, some.ctypes.data
            some, address = known
            some[:], each = coming, 1
        self.cells[at + 3], self.cells[at + 4] = address, each

    def set_launch(self, i: int, values: Mapping[int, int]) -> None:
        """Set words of launch ``i``, by their numbers."""
        at = self._launches_at + w.LAUNCH * i
        for number, value in values.items():
            self.cells[at + number] = value

    def has_moved(self, i: int) -> bool:
        """Return whether looks have written rows of launch ``i`` since the last call."""
        at = self._launches_at + w.LAUNCH * i + w.MOVED
        moved = bool(self.cells[at])
        if moved:
            self.cells[at] = 0
        return moved

    def expect(self, i: int, counts: bool) -> None:
        """Let looks find out whether numbers ``i`` all are one less than the new value, as step counts are."""
        self.cells[self._counts_at + w.COUNT * i + 6] = counts

    def same_state(self, state: object) -> bool:
        """Return whether state is where it was."""
        return bool(self._look.same_state(self.address, id(state)))

    def look(self, groups: object, state: object) -> int:
        """Look, launch and count; return a number of :mod:`.words`."""
        found: int = self._look.look(self.address, id(groups), id(state))
        return found


def is_known_by_id(value: object) -> bool:
    """Return whether a group's value cannot change while it is the same object: a tensor can, and a list."""
    if type(value) is tuple:
        return all(map(is_known_by_id, value))
    # A subclass may convert itself as it likes.
    return type(value) in _VALUES or (isinstance(value, np.generic) and type(value).__module__ == "numpy")


@functools.lru_cache(maxsize=64)
def _first_of(keys: tuple[str, ...]) -> tuple[str, ...]:
    return keys


def _shared(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return a tuple of the same objects, one for all groups that have them: there may be thousands of optimizers."""
    first = _first_of(keys)
    return first if all(map(operator.is_, first, keys)) else keys


def _id_of(key: str, value: object) -> int:
    if key == "params":
        return 0
    if key != _NAMES and not is_known_by_id(value):
        raise TypeError(f"{key} is a {type(value).__name__}")
    return id(value)


def _class_of(tensor: torch.Tensor) -> int:
    if type(tensor) not in _CLASSES:
        raise TypeError(f"a {type(tensor).__name__}")
    return id(type(tensor))


def _tensor(value: Any) -> int:
    _class_of(value)
    return id(value)


__all__ = ["ABSENT", "Numbers", "Record", "Row", "is_known_by_id"]
