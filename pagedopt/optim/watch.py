"""Whether ``optimizer.state`` and ``param_groups`` still hold what a step was prepared for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import torch

from ..tables.addresses import Places, same_objects
from .owner import Owner


class Watch:
    """What was there: groups' lists, state's keys and entries, names and values in these, by identity; and addresses.

    Whatever users do to state shows in one of them: an entry deleted or replaced, a tensor replaced, its ``.data`` or
    storage replaced, shared, resized to nothing.  What they write *into* a tensor needs no watching.

    Args:
        optimizer: as it is now.
        tensors: of state, those that the step uses.
    """

    __slots__ = ("_inside", "_outside", "_places", "_values")

    def __init__(self, optimizer: Owner, tensors: Iterable[torch.Tensor]) -> None:
        self._values = _values(list(optimizer.state.values()))
        self._outside = _outside(optimizer)  # kept alive, and so is what is inside: nothing else gets one of their ids
        self._inside = self._look_inside(optimizer)
        self._places = Places(tuple(tensors))

    def same(self, optimizer: Owner) -> bool:
        """Whether nothing of that has changed."""
        if not same_objects(_outside(optimizer), self._outside):
            return False
        try:
            inside = self._look_inside(optimizer)  # only where the entries are those that were there, and so dicts
        except KeyError:
            return False
        return same_objects(inside, self._inside) and self._places.same()

    def _look_inside(self, optimizer: Owner) -> tuple[object, ...]:
        """How long each entry of state is, and its values name by name: a third faster than to ask for the names.

        Where names are not the same in all, names and values; where one entry ends is not asked, as no name stands
        twice in one.  What is no entry (users keep what they like in ``state``) has nothing inside.
        """
        entries: Iterable[Any] = optimizer.state.values()
        if self._values:
            return (*map(len, entries), *chain.from_iterable(map(map, self._values, repeat(entries))))
        entries = [entry for entry in entries if isinstance(entry, Mapping)]
        return (*chain.from_iterable(entries), *chain.from_iterable(entry.values() for entry in entries))


def _outside(optimizer: Owner) -> tuple[object, ...]:
    """Each group's list and what is in it; keys and entries of state."""
    look: list[object] = []
    for group in optimizer.param_groups:
        params = group["params"]
        look.append(params)
        look += params
    return (*look, *optimizer.state, *optimizer.state.values())


def _values(entries: Sequence[Any]) -> tuple[Callable[[Any], Any], ...]:
    """What gets the value of each name, if all entries have the same names."""
    if not entries or not all(isinstance(entry, Mapping) and entry.keys() == entries[0].keys() for entry in entries):
        return ()
    names = tuple(entries[0])
    if all(type(name) is str for name in names):
        return _getters(names)
    return tuple(map(itemgetter, names))  # a name that is an object of the user's is not for a cache to keep alive


@functools.lru_cache(maxsize=256)
def _getters(names: tuple[str, ...]) -> tuple[Callable[[Any], Any], ...]:
    """The same for all optimizers whose state has these names."""
    return tuple(map(itemgetter, names))
