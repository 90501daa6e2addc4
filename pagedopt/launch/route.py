"""Divides a launch whose state is partly away: rows at hand go first, others when their page visits the device."""

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
from ..placements.ready_arenas import find
from ..placements.store import Store
from ..tables.layout import BLOCK, Geometry, HostTable, choose_geometry
from ..tables.pointers import Rows

#: Elements of a chunk while pages move.  Blocks read the table over the link, which copies fill in both directions, so
#: chunks are large.  With 32,768 a step took 1.4 % longer; from 65,536 on, as long as with a copied table.
CHUNK = 65536


#: Moves of pages, each with the (first, last) of its rows or chunks.
Visits = tuple[tuple[Move, Span], ...]
#: The shift of rows that are updated in place.
_IN_PLACE = np.zeros((1, 1), np.uint64)


@dataclass(slots=True)
class Route:
    """Rows in the order of their updates: those that need no page first, then page by page.

    Attributes:
        at_hand: number of rows in the first launch.
        moves: the visit of each page, and (first, last) of its rows.
    """

    store: Store
    device: torch.device
    rows: Rows
    at_hand: int
    moves: Visits
    _planned: tuple[HostTable, tuple[int, ...]] | None = field(default=None, init=False)
    _plan: tuple[Action, ...] = field(default=(), init=False)
    _launched: list[Span] = field(default_factory=list, init=False)

    @property
    def geometry(self) -> Geometry | None:
        """How to cut the rows into chunks; None: the default."""
        usual = choose_geometry(self.rows.numel.tolist())
        return Geometry(CHUNK, BLOCK) if self.device.type == "cuda" and usual.threads == BLOCK else None

    def plan(self, table: HostTable, absent: Sequence[int] = ()) -> tuple[Action, ...]:
        """Return a step's actions; pages that have only parameters in ``absent``, without gradients, do not move."""
        if self._planned is None or self._planned[0] is not table or self._planned[1] != tuple(absent):
            at_hand, *spans = table.chunks_of([(0, self.at_hand), *(rows for _, rows in self.moves)])
            visits = [(move, span) for (move, _), span in zip(self.moves, spans, strict=True)]
            rows = [span for _, span in self.moves]
            if absent:
                skipped = np.isin(self.rows.tensor, absent)
                live = [not skipped[first:last].all() for first, last in rows]
                visits = [visit for visit, needed in zip(visits, live, strict=True) if needed]
                rows = [span for span, needed in zip(rows, live, strict=True) if needed]
            self._launched = [(0, self.at_hand), *rows] if at_hand[0] < at_hand[1] else rows
            make = _one_visit if len(visits) == 1 else _actions
            self._plan, self._planned = make(at_hand, tuple(visits)), (table, tuple(absent))
        return self._plan

    def params_by_launch(self) -> list[Sequence[int]]:
        """Return, for each launch of the last plan, the indices of its parameters, each once."""
        return [np.unique(self.rows.tensor[first:last]).tolist() for first, last in self._launched]

    def mover(self, arenas: Sequence[Arena]) -> Mover:
        """Return the mover of one step's pages, or raise torch.OutOfMemoryError if the ring of slots does not fit."""
        move, _ = self.moves[0]
        return arenas[move.arena].mover(arenas, self.store.ring)


def route(
    store: Store,
    params: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    first_use: Sequence[int] | None = None,
) -> Route | None:
    """Return the route of ``params`` with ``states`` (a list per state name); None: one launch, in place.

    Pages pass in the order in which one of their parameters has the least ``first_use``; None: in that of addresses.
    """
    arenas = store.arenas  # this list does not change, even if the store drops an arena meanwhile
    if not params or not states or not arenas:
        return None
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
    turn = np.zeros(len(away), np.int64) if first_use is None else _turns(parts, np.asarray(first_use))
    order = np.lexsort((parts.offset, parts.param, parts.page, parts.arena, turn, away))
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
    """Return the row of a parameter in one page.  Cached: with an optimizer per parameter, many are alike."""
    none = np.zeros(1, np.int64)
    return Rows(none, none, np.array([numel]), _IN_PLACE), moves


def _actions(at_hand: Span, visits: Visits) -> tuple[Action, ...]:
    return tuple(plan(at_hand, visits))


#: The plan of a single page.  Cached: with an optimizer per parameter, many are alike.
_one_visit = functools.lru_cache(maxsize=1024)(_actions)


class _Parts(NamedTuple):
    """Future rows as parallel arrays; arena and page are -1 if the row's state does not move."""

    param: Indices
    offset: Indices
    numel: Indices
    arena: Indices
    page: Indices


def _turns(parts: _Parts, first_use: Indices) -> Indices:
    """Return, for each part, the least ``first_use`` in its page."""
    _, page = np.unique(np.stack([parts.arena, parts.page]), axis=1, return_inverse=True)
    least = np.full(page.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, page.ravel(), first_use[parts.param])
    return least[page.ravel()]


def _moves(parts: _Parts, at_hand: int) -> Visits:
    """Return the visit of each page, and (first, last) of its rows; the rows ``at_hand`` come before."""
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
    """Whether a parameter has only part of its state in an arena whose pages move, as somebody replaced a tensor."""
    # An update in place would be lost: the page, fetched before that, is written back after it.
    return any(
        at is None and any(arenas[number].holds(s) for s in each for number in passing)
        for at, each in zip(found, zip(*states, strict=True), strict=True)
    )


def _parts(
    arenas: Sequence[Arena], params: Sequence[torch.Tensor], found: Sequence[tuple[int, int] | None], passing: set[int]
) -> _Parts:
    """Return the pieces of parameters in arenas whose pages move, and other parameters whole."""
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
    """Return, for each section of a page, the offset in bytes from its address to that in the slot, modulo 2**64."""
    slot, base = ring.address(move.slot), arena.tensor.data_ptr()
    starts = [offset for offset, _ in arena.layout.extents(move.page)]
    return [
        np.uint64((slot + slot_offset(arena.layout, section) - base - start) % 2**64)
        for section, start in enumerate(starts)
    ]
