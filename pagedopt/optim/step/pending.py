"""Parameters whose update is queued: which launch is the last one for each, and what must not be done to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ...system.compare_tensors import identities
from ..launch import Work

#: For each update, the indices of the parameters of each of its launches.
Rows = Sequence[Sequence[Sequence[int]]]

_address, _storage, _memory = torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr
version_of = attrgetter("_version")
_grad, _nbytes = attrgetter("grad"), torch.UntypedStorage.nbytes


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


def addresses_of(lists: Iterable[Iterable[Any]]) -> list[int]:
    """Return the addresses of tensors in lists."""
    return [*map(_address, chain.from_iterable(lists))]


class LastLaunches:
    """Which launch is the last one for each parameter that a step updates.

    Steps with the same launches, of the same parameters at the same addresses, share one object.  It keeps no tensor
    alive: a parameter may have died, and another one may be in its place, at its address.

    Attributes:
        numbers: the launches, in ascending order, one for each parameter that has a gradient.
        ends: for each launch, how many of ``numbers`` are its own or smaller.
        touched: for each launch, how many of ``numbers`` cover the parameters of which it or one before updates a
            piece: a page may end in the middle of a parameter.
    """

    def __init__(self, made_for: tuple[Any, ...], updates: Sequence[Work], rows: Rows) -> None:
        self._made_for = made_for
        last, number, first = dict[int, tuple[int, int]](), 0, 0  # by id of a parameter: its launch and its place
        begins = dict[int, int]()  # by id of a parameter: its first launch
        params, grads = _params(updates), _grads(updates)
        for update, launches in zip(updates, rows, strict=True):
            for launch in launches:
                for i in launch:
                    if params[first + i] is not None and grads[first + i] is not None:
                        last[id(params[first + i])] = number, first + i
                        begins.setdefault(id(params[first + i]), number)
                number += 1
            first += len(update.seen) // 2
        order = sorted(last.values())
        counts = Counter(number for number, _ in order)
        self._places, self.numbers, self.ends = [place for _, place in order], [number for number, _ in order], [0]
        for each in range(number):
            self.ends.append(self.ends[-1] + counts[each])
        del self.ends[0]
        touched = [*self.ends]
        for at, place in enumerate(self._places):
            begin = begins[id(params[place])]
            touched[begin] = max(touched[begin], at + 1)
        self.touched = [*accumulate(touched, max)]

    @classmethod
    def of(cls, updates: Sequence[Work], rows: Rows, before: LastLaunches | None) -> LastLaunches:
        """Return that of a step; ``before`` if it serves.

        Args:
            updates: what the step does.
            rows: the parameters of its launches.
            before: that of a step before it.
        """
        params = _params(updates)
        there = tuple([p for p in params if p is not None])
        made_for = [*rows], [update.absent for update in updates], identities(params), [*map(_address, there)]
        return before if before is not None and before._made_for == made_for else cls(made_for, updates, rows)

    def keep_memory_for(self, side: torch.cuda.Stream, updates: Sequence[Work]) -> None:
        """Let the allocator reuse no memory of parameters, should it be freed, before a stream is done with it.

        Gradients are left out: they are new in each step, and their memory would come back late.
        """
        for param in self.pick(_params(updates)):
            param.record_stream(side)

    def pick(self, items: Sequence[Any]) -> list[Any]:
        """Return, in the order of :attr:`numbers`, the items of parameters, given one for each row of all updates."""
        return [items[place] for place in self._places]


#: What was done, in words, if the memory of a tensor was replaced inside of its storage.
REPLACED = "a parameter, a gradient or state was given other memory"


class Memory(NamedTuple):
    """Storages of pairs of tensors, and where their memory was.

    A storage that is kept alive does not keep its memory: ``share_memory_()`` and ``resize_()`` replace that in place.
    """

    storages: list[Any]
    addresses: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Memory:
        """Return the memory that tensors have now."""
        storages = [*map(_storage, chain.from_iterable(pairs))]
        return cls(storages, [*map(_memory, storages)], [*map(_nbytes, storages)])

    def is_kept(self, first: int, stop: int) -> bool:
        """Return whether the storages of some pairs still have it."""
        at = slice(2 * first, 2 * stop)
        storages = self.storages[at]
        return [*map(_memory, storages)] == self.addresses[at] and [*map(_nbytes, storages)] == self.sizes[at]


class Pending:
    """Parameters with their gradients, as they were when their step was queued, by their last launches.

    ``p.data = …`` frees no memory that is still to be updated or read.

    Args:
        last: the launches of the step; not changed.
        updates: what the step does.

    Attributes:
        total: the number of launches.
        launch_of: by memory of a parameter, its last launch.
    """

    def __init__(self, last: LastLaunches, updates: Sequence[Work]) -> None:
        self.last, self.total = last, len(last.ends)
        self._params: list[Any] = last.pick(_params(updates))
        self._grads: list[Any] = last.pick(_grads(updates))
        self._addresses = [*map(_address, self._params)]
        self._versions, self._grad_versions = [*map(version_of, self._params)], [*map(version_of, self._grads)]
        self._memory = Memory.of(zip(self._params, self._grads, strict=True))
        memories = self._memory.addresses[::2]
        self.launch_of = dict(zip(memories, last.numbers, strict=True))
        self.launch_of.pop(0, None)
        # Parameters that share memory may share a version, too.
        shares = len(self.launch_of) < len(memories)
        self._shared = {each for each, uses in Counter(memories).items() if uses > 1} if shares else set()

    def between(self, first: int, stop: int) -> slice:
        """Return the places of the parameters whose last launch is one from ``first`` to ``stop - 1``."""
        ends = self.last.ends
        return slice(ends[first - 1] if first > 0 else 0, ends[stop - 1] if stop > 0 else 0)

    def misuse(self, first: int, stop: int) -> tuple[str, list[torch.Tensor]]:
        """Return what was done to parameters and gradients of some launches, in words, and the untouched parameters.

        The words are "" if nothing was done, and :data:`REPLACED` if memory is gone that a launch would read or write.
        Parameters that share memory are left out.
        """
        at = self.between(first, stop)
        if not self._memory.is_kept(at.start, self.last.touched[stop - 1]):
            return REPLACED, []
        found, untouched = "", self._params[at]
        if not self._are_as_they_were(at):
            done = [self._done_to(i) for i in range(at.start, at.stop)]
            found = next(filter(None, done), "")
            untouched = [p for p, what in zip(untouched, done, strict=True) if not what]
        return found, [p for p in untouched if memory_of(p) not in self._shared] if self._shared else untouched

    def _are_as_they_were(self, at: slice) -> bool:
        params, grads = self._params[at], self._grads[at]
        return (
            [*map(version_of, params)] == self._versions[at]
            and [*map(_address, params)] == self._addresses[at]
            and [*map(version_of, grads)] == self._grad_versions[at]
            and all(now is None or now is grad for now, grad in zip(map(_grad, params), grads, strict=True))
        )

    def _done_to(self, i: int) -> str:
        """Return in words what was done to a parameter or its gradient; "" if nothing."""
        p, grad = self._params[i], self._grads[i]
        if p._version != self._versions[i]:
            return "a parameter was written"
        if p.data_ptr() != self._addresses[i]:
            return "a parameter was given other memory"
        if grad._version != self._grad_versions[i]:
            return "a gradient was written"
        if p.grad is not None and p.grad is not grad:
            return "gradients were set, by a forward that attach() did not see or by hand,"
        return ""

    def reads_gradient(self, memory: int, first: int) -> bool:
        """Return whether this is the memory of a gradient that a launch from ``first`` on reads."""
        grads = self._grads[self.between(first, self.total)]
        return any(memory_of(grad) == memory for grad in grads if grad is not None)

    def let_go(self, first: int, stop: int) -> None:
        """Give back the parameters and gradients of some launches."""
        at = self.between(first, stop)
        nothing = [None] * (at.stop - at.start)
        self._params[at] = self._grads[at] = nothing
        self._memory.storages[2 * at.start : 2 * at.stop] = 2 * nothing


#: Functions that look at tensors and read no values.
LOOKS = (
    memory_of, cannot_be_told, addresses_in, addresses_of, LastLaunches.of, Memory.of, Pending.__init__,
    Pending._are_as_they_were, Pending._done_to,
)  # fmt: skip


def _params(updates: Iterable[Work]) -> tuple[torch.Tensor | None, ...]:
    return (*chain.from_iterable(update.tensors[: len(update.seen) // 2] for update in updates),)


def _grads(updates: Iterable[Work]) -> tuple[torch.Tensor | None, ...]:
    return (*chain.from_iterable(update.tensors[(n := len(update.seen) // 2) : 2 * n] for update in updates),)
