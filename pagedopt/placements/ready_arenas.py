"""The arenas of a store as a step sees them: resident pages, and which arena holds a state tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..paging.pages import Width
from .arena import Arena


class ReadyArenas(NamedTuple):
    """The arenas that a step uses, after :meth:`~pagedopt.placements.store.Store.make_ready` has made them ready.

    Attributes:
        arenas: all arenas of the store; pages and plans refer to them by their indices in this list.
        residents: how many pages of each are resident.
    """

    arenas: list[Arena]
    residents: tuple[int, ...]


#: What a store without arenas returns.
NO_ARENAS = ReadyArenas([], ())


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
