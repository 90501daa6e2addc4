"""Whether ``optimizer.state`` and ``param_groups`` still hold what a step was prepared for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from ..tables.addresses import Places, identities
from .owner import Owner


class Watch:
    """What was there: groups' lists, state's keys and entries, names and values in these, by identity; and addresses.

    Whatever users do to state shows in one of them: an entry deleted or replaced, a tensor replaced, its ``.data`` or
    storage replaced, shared, resized to nothing.  What they write *into* a tensor needs no watching.

    Args:
        optimizer: as it is now.
        tensors: of state, those that the step uses.
    """

    __slots__ = ("_ids", "_places", "_seen")

    def __init__(self, optimizer: Owner, tensors: Iterable[torch.Tensor]) -> None:
        self._seen = _outside(optimizer), _inside(optimizer)  # kept alive, so that nothing else gets one of their ids
        self._ids = [identities(look) for look in self._seen]
        self._places = Places(tuple(tensors))

    def same(self, optimizer: Owner) -> bool:
        """Whether nothing of that has changed."""
        outside = _outside(optimizer)
        if identities(outside) != self._ids[0]:
            return False
        inside = _inside(optimizer)  # made only where the entries are those that were there, and so dicts
        return identities(inside) == self._ids[1] and self._places.same()


def _outside(optimizer: Owner) -> tuple[object, ...]:
    """Each group's list and what is in it; keys and entries of state."""
    look: list[object] = []
    for group in optimizer.param_groups:
        params = group["params"]
        look.append(params)
        look += params
    return (*look, *optimizer.state, *optimizer.state.values())


def _inside(optimizer: Owner) -> tuple[object, ...]:
    """Names and values of all entries of state.  Where one ends is not asked: no name stands twice in an entry."""
    entries = optimizer.state.values()
    return (*chain.from_iterable(entries), *chain.from_iterable(map(dict.values, entries)))
