"""The arenas of a store as a step sees them: resident pages, locks, and which arena holds a state tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from ..paging.pages import Width
from .arena import Arena


class ReadyArenas(NamedTuple):
    """The arenas that a step uses, after :meth:`~pagedopt.placements.store.Store.make_ready` has made them ready.

    Attributes:
        arenas: all arenas of the store; pages and plans refer to them by their indices in this list.
        residents: how many pages of each are resident.
        held: a context in which no other optimizer moves pages that it shares with this one.
    """

    arenas: list[Arena]
    residents: tuple[int, ...]
    held: AbstractContextManager[object]


NOTHING_HELD: AbstractContextManager[object] = nullcontext()
#: What a store without arenas returns.
NO_ARENAS = ReadyArenas([], (), NOTHING_HELD)


def find(arenas: Sequence[Arena], states: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return (index of the arena, index of the parameter in it) if the tensors are its views, one per section.

    A tensor that views only a part of its section does not count.  A step takes the number of elements from the layout,
    and would write behind a parameter that was cut down together with its state.
    """
    for number, arena in enumerate(arenas):
        layout, base = arena.layout, arena.tensor.data_ptr()
        begin = states[0].data_ptr() - base - layout.sections[0]
        if len(states) != len(layout.itemsizes) or not 0 <= begin < arena.tensor.nbytes:
            continue
        index = int(np.searchsorted(layout.starts, begin // layout.itemsizes[0], side="right")) - 1
        expected = [base + layout.begin(section, index) for section in range(len(states))]
        if expected != [s.data_ptr() for s in states]:
            continue
        numel = int(layout.numels[index])
        sizes = zip(states, layout.itemsizes, strict=True)
        if all(_is_whole(s.nbytes, numel, size, layout.block) for s, size in sizes):
            return number, index
    return None


def _is_whole(nbytes: int, numel: int, size: Width, block: int) -> bool:
    """Return whether so many bytes are a section's part for ``numel`` elements, of which some may share an entry."""
    most = -(-numel // block) * block if size.denominator > 1 else numel
    return math.ceil(numel * size) <= nbytes <= most * size


def joined(locks: dict[int, AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Return one lock for all.  It takes them in the order of their keys: a common order avoids deadlocks."""
    if len(locks) == 1:
        return next(iter(locks.values()))
    return _Joined([locks[key] for key in sorted(locks)])


class _Joined:
    """Several locks as one, which may be entered again after it was left."""

    def __init__(self, locks: Sequence[AbstractContextManager[object]]) -> None:
        self._locks, self._stack = locks, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for lock in self._locks:
                entered.enter_context(lock)
            self._stack = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
