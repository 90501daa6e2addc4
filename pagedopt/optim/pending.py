"""Parameters whose update is queued: which launch is the last one for each, and what must not be done to them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, compress
from operator import attrgetter, ne
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..system.compare_tensors import identities
from .launch import Work

#: For each update, the indices of the parameters of each of its launches.
Rows = Sequence[Sequence[Sequence[int]]]

_address, _storage, _memory = torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr
_version, _nbytes = attrgetter("_version"), torch.UntypedStorage.nbytes


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the memory that a tensor is a view of; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError, ValueError):  # fake, functional, sparse, not initialized
        return None


def cannot_be_told(tensor: torch.Tensor) -> bool:
    """Return whether :func:`memory_of` does not know a tensor's memory, as in ``torch.func.grad`` and ``vmap``."""
    if memory_of(tensor) is not None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False  # a sparse tensor is a view of none
    return not is_lazy(tensor) and tensor.numel() > 0


def addresses_in(module: torch.nn.Module) -> list[int] | None:
    """Return the addresses of a module's own parameters; None if one has no memory that can be told."""
    params = [p for p in module._parameters.values() if p is not None]
    try:
        return [*map(_address, params)]
    except (RuntimeError, NotImplementedError, ValueError):  # fake, functional, sparse, not initialized
        return None


class LastLaunches:
    """Which launch is the last one for each parameter that a step updates.

    Steps with the same launches, of the same parameters at the same addresses, share one object.  It keeps no tensor
    alive: a parameter may have died, and another one may be in its place, at its address.

    Attributes:
        total: the number of launches.
        numbers: the launches, in ascending order, one for each parameter that has a gradient.
        ends: how many of ``numbers`` are those of the first 0, 1, … launches.
        touched: how many of ``numbers`` cover the parameters of which the first 0, 1, … launches update a piece: a page
            may end in the middle of a parameter.
    """

    def __init__(self, made_for: tuple[Any, ...], works: Sequence[Work], rows: Rows) -> None:
        self._made_for = made_for
        found = dict[int, tuple[int, int, int]]()  # by id: last launch, place there, first launch
        params, grads = _params(works), _grads(works)
        firsts = accumulate((len(work.seen) // 2 for work in works), initial=0)
        launches = [[first + i for i in launch] for first, each in zip(firsts, rows, strict=False) for launch in each]
        for number, launch in enumerate(launches):
            for place in launch:
                if grads[place] is not None:
                    *_, begin = found.get(id(params[place]), (number,))
                    found[id(params[place])] = number, place, begin
        order = sorted(found.values())
        self._places, self.numbers = [place for _, place, _ in order], [number for number, *_ in order]
        self.total, self.ends = len(launches), [bisect_left(self.numbers, each) for each in range(len(launches) + 1)]
        touched = [*self.ends]
        for count, (*_, begin) in enumerate(order, 1):
            touched[begin + 1] = count  # the last of them is the largest
        self.touched = [*accumulate(touched, max)]

    @classmethod
    def of(cls, works: Sequence[Work], rows: Rows, before: LastLaunches | None) -> LastLaunches:
        """Return that of a step; ``before`` if it serves.

        Args:
            works: what the step does.
            rows: the parameters of its launches.
            before: that of a step before it.
        """
        params = _params(works)
        there = [p for p in params if p is not None]
        made_for = [*rows], [work.absent for work in works], identities(params), [*map(_address, there)]
        return before if before is not None and before._made_for == made_for else cls(made_for, works, rows)

    def pick(self, items: Sequence[Any]) -> list[Any]:
        """Return, in the order of :attr:`numbers`, the items of parameters, given one for each row of all updates."""
        return [items[place] for place in self._places]

    def keep_memory_for(self, side: torch.cuda.Stream, works: Sequence[Work]) -> None:
        """Let the allocator reuse no memory of parameters, should it be freed, before a stream is done with it.

        Gradients are left out: they are new in each step, and their memory would come back late.
        """
        for param in self.pick(_params(works)):
            param.record_stream(side)


#: What was done, in words, if the memory of a tensor was replaced inside of its storage.
REPLACED = "a parameter, a gradient or state was given other memory"


class Pending:
    """Parameters, their gradients and state, as they were when their step was queued, by their last launches.

    ``p.data = …`` frees no memory that is still to be updated or read: storages are kept alive, too.  A storage does
    not keep its memory: ``share_memory_()`` and ``resize_()`` replace that in place.

    Args:
        last: the launches of the step; not changed.
        works: what the step does.
        counters: tensors that share their versions with state.

    Attributes:
        launch_of: by memory of a parameter, its last launch.
        state: kept alive, as launches may run when it is replaced; not launch by launch.
    """

    def __init__(self, last: LastLaunches, works: Sequence[Work], counters: Sequence[torch.Tensor]) -> None:
        self.last = last
        params, grads = last.pick(_params(works)), last.pick(_grads(works))
        storages, read = [*map(_storage, params)], [*map(_storage, grads)]
        #: One item of each list for a parameter.
        self._kept: tuple[list[Any], ...] = params, grads, storages, read
        self.state: list[Any] = [t for work in works for t in work.tensors[len(work.seen) :]]
        self._counters = [*counters]
        #: What is the same until an update, and what was done in words if it is not.
        self._looks = [
            (words, kept, look, [*map(look, kept)])
            for words, kept, look in (
                (REPLACED, storages, _memory), (REPLACED, storages, _nbytes), (REPLACED, read, _memory),
                (REPLACED, read, _nbytes), ("a parameter was written", params, _version),
                ("a parameter was given other memory", params, _address), ("a gradient was written", grads, _version),
            )
        ]  # fmt: skip
        self._state_at, self._state_versions = [*map(_address, self.state)], [*map(_version, self._counters)]
        memories = self._looks[0][3]
        self.launch_of: dict[int | None, int] = dict(zip(memories, last.numbers, strict=True))
        # Parameters that share memory may share a version, too.
        self._shared = {each for each, uses in Counter(memories).items() if uses > 1}

    def misuse(self, first: int, stop: int) -> tuple[str, list[torch.Tensor]]:
        """Return what was done to the tensors of some launches, in words, and the parameters to which nothing was done.

        The words are "" if nothing was done, and :data:`REPLACED` if memory is gone that a launch would read or write.
        Parameters that share memory are left out.  The memory of state is looked at before the first launch and before
        the last.
        """
        begin, end, touched = self.last.ends[first], self.last.ends[stop], self.last.touched[stop]
        if (first == 0 or stop == self.last.total) and [*map(_address, self.state)] != self._state_at:
            return REPLACED, []
        found, done = "", set[int]()
        for words, kept, look, before in self._looks:
            if (now := [*map(look, kept[begin:touched])]) != before[begin:touched]:
                if words == REPLACED:
                    return REPLACED, []
                found = found or words
                done.update(compress(range(begin, touched), map(ne, now, before[begin:touched])))
        params, grads, *_ = self._kept
        for at, p, grad in zip(range(begin, touched), params[begin:touched], grads[begin:touched], strict=True):
            if p.grad is not None and p.grad is not grad:
                found = found or "gradients were set, by a forward that attach() did not see or by hand,"
                done.add(at)
        if not found and [*map(_version, self._counters)] != self._state_versions:
            found = "state was written"
        left = (params[at] for at in range(begin, end) if at not in done)
        return found, [p for p in left if not self._shared or memory_of(p) not in self._shared]

    def reads_gradient(self, memory: int | None, first: int) -> bool:
        """Return whether this is the memory of a gradient that a launch from ``first`` on reads."""
        return any(memory_of(grad) == memory is not None for grad in self._kept[1][self.last.ends[first] :])

    def let_go(self, first: int, stop: int) -> None:
        """Give back the parameters and gradients of some launches."""
        at = slice(self.last.ends[first], self.last.ends[stop])
        for kept in self._kept:
            kept[at] = [None] * (at.stop - at.start)


#: Functions that look at tensors and read no values.
LOOKS = memory_of, cannot_be_told, addresses_in, LastLaunches.of, Pending.__init__, Pending.misuse


def _params(works: Iterable[Work]) -> tuple[torch.Tensor | None, ...]:
    return (*chain.from_iterable(work.tensors[: len(work.seen) // 2] for work in works),)


def _grads(works: Iterable[Work]) -> tuple[torch.Tensor | None, ...]:
    return (*chain.from_iterable(work.tensors[(n := len(work.seen) // 2) : 2 * n] for work in works),)
