"""State in a store: what is asked for, the versions it shares, and the arenas in which a step finds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from ..paging.pages import Width
from ..tables.storage import Column
from ..tables.tensors import local
from .arena import Arena


class Wanted(NamedTuple):
    """One column of a parameter's state that is to be created.

    Attributes:
        param: the parameter.
        key: name of the column in the parameter's state.
        column: dtype and shape.
        block: elements that are stored together, in this column or across columns.
        like: a tensor of the parameter's shape, whose strides the column takes; None: the parameter.
    """

    param: torch.Tensor
    key: str
    column: Column
    block: int = 1
    like: torch.Tensor | None = None

    @property
    def strided(self) -> torch.Tensor:
        """A tensor (it may be a meta tensor) with the shape and strides of the column."""
        return self.column.like(local(self.param if self.like is None else self.like))

    def zeros(self) -> torch.Tensor:
        """Return the column in memory of torch, on the parameter's device."""
        made, dtype = self.strided, self.column.dtype
        return torch.empty_strided(made.size(), made.stride(), dtype=dtype, device=self.param.device).zero_()


_version = attrgetter("_version")


@torch.inference_mode(False)
def _counter() -> torch.Tensor:
    return torch.empty(0, device="meta")


class Versions:
    """The counters that autograd compares, one for all state of a store on devices of one type."""

    __slots__ = ("counters",)

    def __init__(self) -> None:
        #: One empty tensor per counter.  Raising its version raises that of all state with the same counter.  The first
        #: is of no state: what raises it raises all.
        self.counters: tuple[torch.Tensor, ...] = (_counter(),)

    def by_others(self) -> int:
        """Return a number that grows where others write state in place, or give it another layout, as ``t_()`` does."""
        try:
            return sum(map(_version, self.counters)) - len(self.counters) * self.counters[0]._version
        except RuntimeError:  # those of state that is made in inference_mode count nothing
            return 0

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same memory that uses the counter of its device type."""
        device_type = tensor.device.type
        counter = next((t for t in self.counters if t.device.type == device_type), None)
        if counter is None:
            counter = torch.empty(0, device=tensor.device)
            self.counters = (*self.counters, counter)
        shared = counter.detach()
        shared.data = tensor
        return shared

    def raise_all(self, state: Sequence[torch.Tensor]) -> list[int]:
        """Raise the versions of all state; return the indices of tensors whose version has not risen."""
        versions = [None if t.is_inference() else t._version for t in state]  # inference tensors have no counter
        torch.autograd.graph.increment_version(self.counters)
        pairs = enumerate(zip(state, versions, strict=True))
        return [i for i, (t, before) in pairs if before is None or t._version == before]


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
