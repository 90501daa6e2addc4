"""Whether ``optimizer.state`` and ``param_groups`` still hold what a step was prepared for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from ..tables.addresses import Places, ids
from .owner import Owner


class Watch:
    """What was there: groups' lists, state's keys and entries, names and values in these, by identity; and addresses.

    Whatever users do to state shows in one of them: an entry deleted or replaced, a tensor replaced, its ``.data`` or
    storage replaced, shared, resized to nothing.  What they write *into* a tensor needs no watching.

    Args:
        optimizer: as it is now.
        tensors: of state, those that the step uses.
    """

    def __init__(self, optimizer: Owner, tensors: Iterable[torch.Tensor]) -> None:
        self._seen = list(_looks(optimizer))  # kept alive, so that no other object gets one of their ids
        self._ids = [ids(look).tobytes() for look in self._seen]
        self._places = Places(tuple(tensors))

    def same(self, optimizer: Owner) -> bool:
        """Whether nothing of that has changed."""
        looks = _looks(optimizer)
        for known in self._ids:
            now = next(looks, None)
            if now is None or ids(now).tobytes() != known:
                return False
        return next(looks, None) is None and self._places.same()


def _looks(optimizer: Owner) -> Iterator[tuple[object, ...]]:
    """All that is compared, as tuples of objects, from the outside in: each is made when those before were the same."""
    for group in optimizer.param_groups:
        yield tuple(group["params"])
    state = optimizer.state
    yield tuple(state)
    entries = tuple(state.values())
    yield entries
    yield tuple(chain.from_iterable(entries))
    yield tuple(chain.from_iterable(map(dict.values, entries)))
