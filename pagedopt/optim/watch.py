"""Whether ``optimizer.state`` and ``param_groups`` still hold the very objects that a step was prepared for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from ..system.internals import identities, lie_at
from ..tables.columns import Tensors
from .bucket import Bucket
from .members import Member, Members
from .owner import Owner

_params, _grad = itemgetter("params"), attrgetter("grad")
#: Takes some of a tuple.
_Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Watch:
    """The objects that a step has used: parameters by place, state's keys, and the values that it took of each entry.

    Whatever users do to state shows in them: an entry deleted or replaced, a tensor replaced.  Where tensors lie, and
    how they are laid out, is what tables know (:meth:`PointerTable.look`); where the parameters' own numbers lie, which
    are in no table, stands here.  What users write *into* a tensor needs no watching.

    Nothing is kept alive.  An object is known by its id, which is its own for as long as it lives; when one of the
    tensors has died, nothing is as it was.  Lists and dicts do not matter, only what is in them.

    Args:
        members: all parameters as they were when the step was prepared.
        buckets: with the members of each, whose entries hold all state.
        keys: of the optimizer's state, in its order.

    Attributes:
        picks: for each bucket what takes its tensors, and what its numbers, from what :meth:`look` has found.
    """

    __slots__ = (
        "__weakref__", "_dead", "_getters", "_ids", "_lengths", "_names", "_numbers", "_numbers_at", "_refs", "_rules",
        "_waiting", "picks",
    )  # fmt: skip

    def __init__(
        self, members: Members, buckets: Sequence[tuple[Bucket, Sequence[Member]]], keys: Sequence[Any]
    ) -> None:
        self._rules, self._lengths, self._waiting = members.rules, members.lengths, tuple(members.waiting)
        entries: dict[int, dict[str, Any]] = {}
        columns: dict[int, dict[str, None]] = {}  # a parameter may stand in several groups, whose rules differ
        numbers: dict[int, dict[str, None]] = {}
        for bucket, of in buckets:
            for member in of:
                entries[id(member.param)] = member.entry
                columns.setdefault(id(member.param), {}).update(dict.fromkeys(bucket.keys))
                numbers.setdefault(id(member.param), {}).update(dict.fromkeys(bucket.names))
        names = [(*columns.get(id(key), ()), *numbers.get(id(key), ())) for key in keys]
        self._names = tuple(names)
        self._getters = _getters(names[0]) if len(set(names)) == 1 else None
        if self._getters is not None:
            self._names = ()  # which they say
        values = self._values([entries.get(id(key), {}) for key in keys])
        place = _places(names, self._getters is not None, [id(key) for key in keys])
        self._ids = identities((*members.params, *keys, *values))
        self._dead: list[object] = []
        note, watched = self._dead.append, {id(t): t for t in (*members.params, *keys, *values)}
        self._refs = tuple([weakref.ref(t, note) for t in watched.values() if isinstance(t, torch.Tensor)])

        first, at = 2 * len(members.params), np.zeros(len(values), np.uint64)
        picks = []
        for bucket, of in buckets:
            rows = [m.index for m in of]
            rows += [len(members.params) + m.index for m in of]
            rows += [first + place[id(m.param), key] for key in bucket.keys for m in of]
            own = [place[id(m.param), name] for name in bucket.names for m in of]
            picks.append((_pick(rows), _pick([first + i for i in own])))
            at[own] = bucket.numbers_at()
        self.picks = tuple(picks)
        own = sorted(place[id(key), name] for key in keys for name in numbers.get(id(key), ()))
        self._numbers, self._numbers_at = _pick(own), at[own]

    def _values(self, entries: Iterable[Any]) -> tuple[Any, ...]:
        """What steps take of each entry: all by one name, then by the next; where names differ, entry by entry."""
        if self._getters is not None:
            return (*chain.from_iterable(map(map, self._getters, repeat(entries))),)
        return tuple([entry[name] for entry, names in zip(entries, self._names, strict=True) for name in names])

    def look(self, optimizer: Owner) -> Tensors | None:
        """What is there now, if these are the objects that were there; else None.

        Returns:
            all parameters by place, their gradients, and what steps take of state.  Who holds it keeps that alive.
        """
        groups, state = optimizer.param_groups, optimizer.state
        if self._dead or (*map(optimizer.rule_of, groups),) != self._rules:
            return None
        if len(groups) == 1:
            params = (*groups[0]["params"],)
        elif (*map(len, map(_params, groups)),) != self._lengths:
            return None
        else:
            params = (*chain.from_iterable(map(_params, groups)),)
        try:
            values = self._values(state.values())
        except (LookupError, TypeError, ValueError, AttributeError):  # an entry lacks something, or is none
            return None
        if identities((*params, *state, *values)) != self._ids:
            return None
        if not lie_at(self._numbers(values), self._numbers_at):
            return None
        grads = (*map(_grad, params),)
        if self._waiting and any(grads[i] is not None for i in self._waiting):
            return None
        return (*params, *grads, *values)


@functools.lru_cache(maxsize=256)
def _getters(names: tuple[str, ...]) -> tuple[Callable[[Any], Any], ...]:
    """What gets the value of each name: the same for all optimizers whose state has these names."""
    return tuple(map(itemgetter, names))


def _places(names: Sequence[Sequence[str]], by_name: bool, keys: Sequence[int]) -> dict[tuple[int, str], int]:
    """Where among the values of :meth:`Watch._values` those are, by key and name."""
    if by_name:
        found = [(key, name) for k, name in enumerate(names[0]) for key in keys]
    else:
        found = [(key, name) for key, of in zip(keys, names, strict=True) for name in of]
    return {one: i for i, one in enumerate(found)}


def _pick(places: Sequence[int]) -> _Pick:
    """What takes the items at these places of a tuple."""
    first = places[0] if len(places) else 0
    if list(places) == list(range(first, first + len(places))):
        return _stretch(first, first + len(places))
    return itemgetter(*places)


@functools.lru_cache(maxsize=256)
def _stretch(first: int, last: int) -> _Pick:
    """The items from one place to before another: the same for all who have as many."""
    return itemgetter(slice(first, last))


__all__ = ["Watch"]
