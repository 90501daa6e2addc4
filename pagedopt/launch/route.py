"""The rows of a launch whose state is partly away: which go in one launch, which visit the device page by page."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..paging.pages import Indices, Pieces, cut
from ..paging.policy import Move, schedule
from ..paging.visits import Action, Mover, Span, plan
from ..placements.arena import Arena
from ..placements.movers import Ring, slot_offset
from ..placements.store import Store, find
from ..tables.layout import BLOCK, Geometry, HostTable, choose_geometry
from ..tables.pointers import Rows

#: Elements of a chunk where pages pass through: every block reads its part of the table over a link that copies fill
#: both ways, so there are few.  At 32,768 a step took 1.4 % longer; from 65,536 on as long as with a copied table.
CHUNK = 65536


#: Moves of pages, and (first, last) of the rows or chunks in each.
Visits = tuple[tuple[Move, Span], ...]
#: The shift of rows that are updated where they lie.
_IN_PLACE = np.zeros((1, 1), np.uint64)


@dataclass(slots=True)
class Route:
    """Rows in the order in which they are updated: those at hand first, then page by page.

    Attributes:
        rows: what the rows of the table are.
        at_hand: how many rows go in the first launch.
        moves: the visit of each page, and (first, last) of its rows.
    """

    store: Store
    device: torch.device
    rows: Rows
    at_hand: int
    moves: Visits
    _planned: tuple[HostTable, tuple[int, ...]] | None = field(default=None, init=False)
    _plan: tuple[Action, ...] = field(default=(), init=False)

    @property
    def geometry(self) -> Geometry | None:
        """How to cut the rows; None: as any others."""
        usual = choose_geometry(self.rows.numel.tolist())
        return Geometry(CHUNK, BLOCK) if self.device.type == "cuda" and usual.threads == BLOCK else None

    def plan(self, table: HostTable, absent: Sequence[int] = ()) -> tuple[Action, ...]:
        """What a step over ``table`` does: a value, to read, to print, to put in another order.

        A page of which every parameter lacks its gradient stays where it is.

        Args:
            table: over :attr:`rows`.
            absent: the parameters without a gradient.
        """
        if self._planned is None or self._planned[0] is not table or self._planned[1] != tuple(absent):
            at_hand, *spans = table.chunks_of([(0, self.at_hand), *(rows for _, rows in self.moves)])
            visits = [(move, span) for (move, _), span in zip(self.moves, spans, strict=True)]
            if absent:
                skipped = np.isin(self.rows.tensor, absent)
                live = [not skipped[first:last].all() for _, (first, last) in self.moves]
                visits = [visit for visit, needed in zip(visits, live, strict=True) if needed]
            self._plan, self._planned = _steps(at_hand, tuple(visits)), (table, tuple(absent))
        return self._plan

    def mover(self, arenas: Sequence[Arena]) -> Mover:
        """What carries the pages of one step; its launches go to the current stream.

        Args:
            arenas: of the store, by the numbers that moves name.

        Raises:
            torch.OutOfMemoryError: there is no room for the ring of slots.
        """
        move, _ = self.moves[0]
        return arenas[move.arena].mover(arenas, self.store.ring)


def route(store: Store, params: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]) -> Route | None:
    """How to update ``params`` with ``states`` (one list per state name); None: everything in one launch, in place.

    Raises:
        torch.OutOfMemoryError: there is no room for the ring of slots.
    """
    if not params or not states:
        return None
    arenas = store.arenas  # a list that stays as it is, whatever the store drops meanwhile
    found = [find(arenas, each) for each in zip(*states, strict=True)]
    passing = {
        number
        for number, arena in enumerate(arenas)
        if arena.away and arena.resident < arena.layout.pages and arena.way(store.host_access) == "staged"
    }
    if not any(at is not None and at[0] in passing for at in found) or _half_in(arenas, passing, found, states):
        return None
    parts = _parts(arenas, params, found, passing)
    away = np.array([a >= 0 and p >= arenas[a].resident for a, p in zip(parts.arena, parts.page, strict=True)])
    if not away.any():
        return None
    order = np.lexsort((parts.offset, parts.param, parts.page, parts.arena, away))
    parts, at_hand = _Parts(*(column[order] for column in parts)), int((~away).sum())
    moves, device = _moves(parts, at_hand), params[0].device
    shift = _IN_PLACE
    if device.type == "cuda":
        shift = np.zeros((len(order), 2 + len(states)), np.uint64)
        for move, (first, last) in moves:
            shift[first:last, 2:] = _shift(store.ring(device), arenas[move.arena], move)
    if len(parts.param) == len(params) == 1 and shift is _IN_PLACE:
        rows, moves = _one_row(params[0].numel(), moves)
    else:
        rows = Rows(parts.param, parts.offset, parts.numel, shift)
    return Route(store, device, rows, at_hand, moves)


@functools.lru_cache(maxsize=1024)
def _one_row(numel: int, moves: Visits) -> tuple[Rows, Visits]:
    """A parameter in one page: where each has an optimizer, many are updated alike."""
    none = np.zeros(1, np.int64)
    return Rows(none, none, np.array([numel]), _IN_PLACE), moves


def _steps(at_hand: Span, visits: Visits) -> tuple[Action, ...]:
    return _one_visit(at_hand, visits) if len(visits) == 1 else tuple(plan(at_hand, visits))


@functools.lru_cache(maxsize=1024)
def _one_visit(at_hand: Span, visits: Visits) -> tuple[Action, ...]:
    """The same for all who have but one page, of as many chunks, to visit."""
    return tuple(plan(at_hand, visits))


class _Parts(NamedTuple):
    """Rows to be: parallel arrays."""

    param: Indices
    offset: Indices
    numel: Indices
    arena: Indices  # -1: in none whose pages pass
    page: Indices


def _moves(parts: _Parts, at_hand: int) -> Visits:
    """The visit of each page, and (first, last) of its rows, which begin behind those ``at_hand``."""
    keys = np.stack([parts.arena, parts.page], 1)[at_hand:]
    first = at_hand + np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)])
    pages = [(int(parts.arena[row]), int(parts.page[row])) for row in first]
    bounds = np.r_[first, len(parts.arena)].tolist()
    return tuple(zip(schedule(pages), itertools.pairwise(bounds), strict=True))


def _half_in(
    arenas: Sequence[Arena],
    passing: set[int],
    found: Sequence[tuple[int, int] | None],
    states: Sequence[Sequence[torch.Tensor]],
) -> bool:
    """Whether a parameter has only some of its state in a passing arena (somebody put another tensor in its place).

    An update of the rest in place would be lost when the page that was copied before it is copied back.
    """
    return any(
        at is None and any(arenas[number].holds(s) for s in each for number in passing)
        for at, each in zip(found, zip(*states, strict=True), strict=True)
    )


def _parts(
    arenas: Sequence[Arena], params: Sequence[torch.Tensor], found: Sequence[tuple[int, int] | None], passing: set[int]
) -> _Parts:
    """Pieces of parameters in passing arenas, others whole."""
    columns: list[tuple[Indices, ...]] = []
    for number in passing:
        pieces: Pieces = cut(arenas[number].layout)
        param = np.full(len(arenas[number].layout.numels), -1, np.int64)
        for i, at in enumerate(found):
            if at is not None and at[0] == number:
                param[at[1]] = i
        param = param[pieces.tensor]
        ours = param >= 0
        arena = np.full(len(param), number)
        columns.append(tuple(x[ours] for x in (param, pieces.offset, pieces.numel, arena, pieces.page)))
    whole = [i for i, at in enumerate(found) if at is None or at[0] not in passing]
    none = np.full(len(whole), -1, np.int64)
    sizes = np.array([params[i].numel() for i in whole], np.int64)
    columns.append((np.array(whole, np.int64), np.zeros(len(whole), np.int64), sizes, none, none))
    return _Parts(*(np.concatenate(c).astype(np.int64) for c in zip(*columns, strict=True)))


def _shift(ring: Ring, arena: Arena, move: Move) -> list[np.uint64]:
    """Bytes from where a page's sections lie to where they lie in its slot, modulo 2**64."""
    slot, base = ring.address(move.slot), arena.tensor.data_ptr()
    starts = [offset for offset, _ in arena.layout.extents(move.page)]
    return [
        np.uint64((slot + slot_offset(arena.layout, section) - base - start) % 2**64)
        for section, start in enumerate(starts)
    ]
