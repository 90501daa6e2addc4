"""Whether ``optimizer.state`` and ``param_groups`` still hold the very objects that a step was prepared for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

from ...system.internals import Contents, identities
from ...tables.columns import Tensors
from ...tables.shards import is_sharded, local
from ..state.rule_optimizer import RuleOptimizer
from ..state.scalar_state import number_names
from .bucket import Bucket
from .members import Member, Members

_params, _grad = itemgetter("params"), attrgetter("grad")
_NO_PLACES: dict[tuple[int, str], int] = {}
#: Takes some of a tuple.
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class ObjectWatch:
    """The objects that steps use: parameters by place, state's keys, and the values that steps take of its entries.

    Whatever users do to state shows in them: an entry deleted or replaced, a tensor replaced, its ``.data`` or storage
    replaced, shared, resized to nothing.  Where parameters and gradients lie, and how they are laid out, is what tables
    know (:meth:`PointerTable.look`).  What users write *into* a tensor needs no watching.

    Nothing is kept alive.  An object is known by its id, which is its own for as long as it lives; when one of the
    tensors has died, nothing is as it was.  Lists and dicts do not matter, only what is in them.

    Args:
        optimizer: whose.
        members: all its parameters, in whose entries is all state; it may still have to be put into the optimizer's.

    Attributes:
        picks: for each bucket what takes its tensors, and what its numbers, from what :meth:`look` has found.
    """

    __slots__ = (
        "__weakref__", "_contents", "_dead", "_lengths", "_params", "_places", "_refs", "_rules", "_waiting", "_whole",
        "picks",
    )  # fmt: skip

    def __init__(self, optimizer: RuleOptimizer, members: Members) -> None:
        self._rules, self._lengths, self._waiting = members.rules, members.lengths, tuple(members.waiting)
        entries: dict[int, dict[str, Any]] = {}
        names: dict[int, dict[str, None]] = {}  # a parameter may stand in several groups, whose rules differ
        for m in members.found:
            entries[id(m.param)] = m.entry
            used = (*m.columns, *number_names(optimizer, m.rule))
            names.setdefault(id(m.param), {}).update(dict.fromkeys(used))
        new = {id(m.param): m.param for m in members.found if m.entry and m.param not in optimizer.state}
        keys = (*optimizer.state, *new.values())
        looked_at = [tuple(names.get(id(key), ())) for key in keys]
        content = [entries.get(id(key), {}) for key in keys]
        values = [entry[name] for entry, of in zip(content, looked_at, strict=True) for name in of]
        # Addresses are asked here before tables ask: if somebody moves state in between, the next step sees it.
        self._contents = Contents(keys, content, looked_at, local if any(map(is_sharded, values)) else None)
        self._params = identities(members.params)
        self._dead: list[object] = []
        note, watched = self._dead.append, {id(t): t for t in (*members.params, *keys, *values)}
        self._refs = tuple([weakref.ref(t, note) for t in watched.values() if isinstance(t, torch.Tensor)])
        self._places = self._contents.places([*map(id, keys)])
        self._whole = True
        self.picks: tuple[tuple[Pick, Pick], ...] = ()

    def serve(self, buckets: Sequence[tuple[Bucket, Sequence[Member]]]) -> None:
        """Find from now on what these buckets take.

        Args:
            buckets: with the members of each.
        """
        self._whole = any(bucket.takes_state for bucket, _ in buckets)
        total, picks = sum(self._lengths), []
        for bucket, members in buckets:
            rows, numbers = [m.index for m in members], []
            rows += [total + row for row in rows]
            if self._whole:
                rows += [2 * total + self._places[id(m.param), key] for key in bucket.keys for m in members]
                numbers = [2 * total + self._places[id(m.param), name] for name in bucket.names for m in members]
            pair = _pick(rows), _pick(numbers)
            picks.append(pair if len(members) > 1 else _pair(*pair))
        self.picks, self._places = tuple(picks), _NO_PLACES

    def look(self, optimizer: RuleOptimizer) -> Tensors | None:
        """What is there now, if these are the objects that were there, and state where it was; else None.

        Returns:
            all parameters by place, their gradients, and where a bucket takes it what steps use of state.
        """
        groups = optimizer.param_groups
        if self._dead or (*map(optimizer.rule_of, groups),) != self._rules:
            return None
        if len(groups) == 1:
            params = (*groups[0]["params"],)
        elif (*map(len, map(_params, groups)),) != self._lengths:
            return None
        else:
            params = (*chain.from_iterable(map(_params, groups)),)
        if identities(params) != self._params:
            return None
        values = self._contents.find(optimizer.state, self._whole)
        if values is None or (self._waiting and any(params[i].grad is not None for i in self._waiting)):
            return None
        return (*params, *map(_grad, params), *values) if self._whole else (*params, *map(_grad, params))


def _pick(places: Sequence[int]) -> Pick:
    """What takes the items at these places of a tuple."""
    first = places[0] if len(places) else 0
    if list(places) == list(range(first, first + len(places))):
        return _stretch(first, first + len(places))
    return itemgetter(*places)


@functools.lru_cache(maxsize=64)
def _pair(tensors: Pick, numbers: Pick) -> tuple[Pick, Pick]:
    """One for all who have one parameter: there may be thousands."""
    return tensors, numbers


@functools.lru_cache(maxsize=256)
def _stretch(first: int, last: int) -> Pick:
    """The items from one place to before another: the same for all who have as many."""
    return itemgetter(slice(first, last))


__all__ = ["ObjectWatch", "Pick"]
