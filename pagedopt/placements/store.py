"""The memory of an optimizer's state: its arenas, its budget, and who may take room when."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ..paging.budget import NOTHING, Budget
from ..paging.pages import Width
from ..system import internals
from ..system.files import host
from ..system.warn import outside
from ..tables.shards import like_shard, local
from ..tables.storage import Column
from . import choose
from .choose import Arena, HostAccess, Placement
from .limits import divide
from .memory_report import MemoryReport
from .movers import Ring, ring_for, slot_bytes
from .time_budgets import Affords, limits_of, way_of
from .versions import Versions


class Wanted(NamedTuple):
    """A column of a parameter's state.

    Attributes:
        param: the parameter.
        key: its name in the state.
        column: what it is.
        block: elements that are stored together, with those of other columns perhaps.
    """

    param: torch.Tensor
    key: str
    column: Column
    block: int = 1

    def zeros(self) -> torch.Tensor:
        """In memory of torch's own, on the parameter's device."""
        like = self.column.like(local(self.param))
        return torch.empty_strided(
            like.size(), like.stride(), dtype=self.column.dtype, device=self.param.device
        ).zero_()


class Standing(NamedTuple):
    """What a step depends on.

    Attributes:
        arenas: of the store, by number.
        residents: how many pages of each are on the device.
        held: a block in which no other optimizer moves pages of which this one has a part.
    """

    arenas: list[Arena]
    residents: tuple[int, ...]
    held: contextlib.AbstractContextManager[object]


#: Most bytes of room, beyond what is needed, in an arena for parameters that came late: more may come.
SPARE = 4 << 20
_NOTHING_HELD: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
_EMPTY = Standing([], (), _NOTHING_HELD)


class _View(weakref.ref[torch.Tensor]):
    """A tensor of an arena, which counts when it dies.  Nothing here keeps anything alive."""

    __slots__ = ("arena", "store")

    def __new__(cls, tensor: torch.Tensor, *_: Any) -> Self:
        """A reference that calls :func:`_died`."""
        return super().__new__(cls, tensor, _died)

    def __init__(self, tensor: torch.Tensor, store: weakref.ref[Store], arena: weakref.ref[Arena]) -> None:
        super().__init__(tensor, _died)  # type: ignore[call-arg]
        self.store, self.arena = store, arena


def _died(view: Any) -> None:
    arena, store = view.arena(), view.store()
    if arena is not None:
        arena.alive -= 1
        if not arena.alive and store is not None:
            store._drop(arena)


class Store:
    """Creates state and keeps to the budget.

    Args:
        placement, host_access: as :class:`~pagedopt.PagedOptimizer` takes them.
        budget: of each device of parameters.
        affords: of (seconds, device, placement, way), how many bytes may be away; for budgets that are times.

    Raises:
        ValueError, TypeError: they do not go together.
    """

    def __init__(
        self,
        placement: Placement | None,
        budget: Budget,
        host_access: HostAccess | None,
        affords: Affords | None = None,
    ) -> None:
        choose.check_placement(placement, budget, host_access)
        self.placement, self.host_access, self._affords = placement, host_access, affords
        self.limits = limits_of(budget, affords, placement, host_access)
        #: Never changed, but replaced: who has taken it goes on with the numbers that arenas had in it.
        self.arenas: list[Arena] = []
        self.rings: dict[torch.device, Ring] = {}
        self._kinds: dict[Arena, tuple[object, ...]] = {}
        self._warned = False
        self.versions = Versions()

    @property
    def budget(self) -> Budget:
        """What the user asked for, of each device."""
        return self.limits.budget

    @torch.inference_mode(False)  # state outlives the block in which it is made
    @torch.no_grad()
    def create(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """A tensor of zeros for each column in ``wanted``: of a DTensor's a DTensor, whose shard is in memory here.

        One arena for the parameters of one device that will be updated in one launch; those that come later share one.
        In plain memory of the parameters' own device each is a tensor of torch's own.

        Raises:
            MemoryError, torch.OutOfMemoryError, CudaError: there is no room; nothing has been created then.
            RuntimeError: this is inside of a ``FakeTensorMode``, in which no memory is made; nothing has been created.
        """
        if internals.in_fake_mode():
            raise RuntimeError("state takes memory, and in FakeTensorMode there is none; take the step outside of it")
        members: dict[int, list[int]] = {}
        for i, one in enumerate(wanted):
            members.setdefault(id(one.param), []).append(i)
        kinds: dict[tuple[object, ...], list[list[int]]] = {}
        for indices in members.values():
            p = wanted[indices[0]].param
            grad = None if p.grad is None else p.grad.dtype
            kinds.setdefault((p.device, p.dtype, grad, *(wanted[i][1:] for i in indices)), []).append(indices)
        tensors: dict[int, torch.Tensor] = {}
        arenas: dict[int, Arena | None] = {}
        before = [(arena, arena.layout) for arena in self.arenas]
        try:
            for kind, groups in kinds.items():
                arena, placed = self._place(kind, groups, wanted)
                for indices, made in zip(groups, placed, strict=True):
                    tensors.update(zip(indices, made, strict=True))
                    arenas.update(dict.fromkeys(indices, arena))
        except BaseException:
            self.arenas = [arena for arena, _ in before]
            for arena, layout in before:
                arena.layout = layout
            raise
        shards = [self.versions.share(tensors.pop(i)) for i in range(len(wanted))]
        for arena in {id(of): of for of in arenas.values() if of is not None}.values():
            self._goes_with(arena, [shard for i, shard in enumerate(shards) if arenas[i] is arena])
        return [like_shard(shard, of=one.param) for shard, one in zip(shards, wanted, strict=True)]

    def _goes_with(self, arena: Arena, tensors: Sequence[torch.Tensor]) -> None:
        """Let an arena go with the last of its tensors, and not only when somebody looks."""
        store, of = weakref.ref(self), weakref.ref(arena)
        arena.alive += len(tensors)
        arena.views = (*arena.views, *(_View(tensor, store, of) for tensor in tensors))

    def _drop(self, arena: Arena) -> None:
        """Forget an arena.  This may run between any two lines of others, so it replaces and changes nothing."""
        self.arenas = [each for each in self.arenas if each is not arena]
        self._kinds = {each: kind for each, kind in self._kinds.items() if each is not arena}
        if not self.arenas:
            self.rings = {}

    def _place(
        self, kind: tuple[object, ...], groups: Sequence[list[int]], wanted: Sequence[Wanted]
    ) -> tuple[Arena | None, list[list[torch.Tensor]]]:
        """State for the parameters of one kind, in an arena or in plain memory: for each, a tensor of every column."""
        firsts = [local(wanted[indices[0]].param) for indices in groups]
        columns = [wanted[i].column for i in groups[0]]
        alike = [arena for arena in self.arenas if self._kinds.get(arena) == kind]
        numels = [p.numel() * (2 if p.is_complex() else 1) for p in firsts]  # kernels see real numbers
        for arena in alike:
            if (numbers := arena.extend(numels)) is not None:
                break
        else:
            spare = min(SPARE, sum(arena.layout.nbytes for arena in alike) // 4)
            block = max(wanted[i].block for i in groups[0])
            new = self._arena(firsts[0].device, numels, [c.width for c in columns], spare, block)
            if new is None:
                return None, self._plain([[wanted[i] for i in indices] for indices in groups])
            arena, numbers = new, list(range(len(numels)))
            self.arenas = [*self.arenas, arena]
            if not arena.full:
                self._kinds[arena] = kind
        return arena, [
            [arena.view(section, number, c.like(p), c.dtype) for section, c in enumerate(columns)]
            for number, p in zip(numbers, firsts, strict=True)
        ]

    @staticmethod
    def _plain(wanted: Sequence[Sequence[Wanted]]) -> list[list[torch.Tensor]]:
        if wanted[0][0].param.device.type == "cpu":
            sizes = ((one.column, local(one.param).numel()) for each in wanted for one in each)
            host.check_host(sum(c.entries(n) * c.dtype.itemsize for c, n in sizes), "optimizer state")
        return [[one.zeros() for one in each] for each in wanted]

    def _arena(
        self, device: torch.device, numels: list[int], itemsizes: list[Width], spare: int, block: int
    ) -> Arena | None:
        here = self.on(device)
        limit = self.limits.of(device, here)
        return choose.create(numels, itemsizes, device, self.placement, limit, spare, here, block)

    def check_device(self, device: torch.device) -> None:
        """Refuse parameters of a device that no kernel or the placement does not serve.

        Raises:
            ValueError: no kernel runs there, the placement is made for others and nothing can stand in, or the budget
                is a time and no rates tell what it affords.
        """
        choose.check_device(device, self.placement)
        choose.candidates(self.placement, device, self.budget)
        if self._affords is not None and self.budget.seconds is not None:
            way = way_of(device, self.placement, self.budget, self.host_access)
            self._affords.check(self.budget, device, *way)

    def on(self, device: torch.device) -> list[Arena]:
        """The arenas of a device."""
        return [a for a in self.arenas if a.device == device]

    def find(self, states: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """See :func:`find`."""
        return find(self.arenas, states)

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of state lies where the placement has state: moved with its budget, or plain."""
        if not self.is_plain(tensor):
            return True
        return choose.kind_of(self.placement, tensor.device, self.budget).plain

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of torch's own, in no arena."""
        return not any(arena.holds(local(tensor)) for arena in self.arenas)

    def mind(self, state: Sequence[torch.Tensor], owner: str) -> None:
        """Forget arenas that no state is in any more; warn, once, of state that a budget does not cover."""
        self.forget(state)
        if self.budget.everything or self._warned:
            return
        if loose := sum(t.nbytes for t in state if not self.is_home(t)):
            self._warned = True
            warnings.warn(
                f"{owner}: {loose:,} bytes of optimizer state lie where they were put, outside of what device_budget="
                f"{self.budget.said!r} covers; set_device_budget() brings them home",
                RuntimeWarning,
                stacklevel=outside(),
            )

    def forget(self, in_use: Iterable[torch.Tensor]) -> None:
        """Drop the arenas that none of these tensors views: their memory goes with their last tensor."""
        at = np.array([t.data_ptr() for t in in_use], np.uint64)
        bounds = [(a, a.tensor.data_ptr()) for a in self.arenas]
        self.arenas = [a for a, start in bounds if ((at >= start) & (at < start + a.tensor.nbytes)).any()]
        self._kinds = {arena: kind for arena, kind in self._kinds.items() if arena in self.arenas}

    def check_owner(self) -> None:
        """Refuse what only the process may do that made the state.

        Raises:
            RuntimeError: this process was forked from the one that made state in a file.
        """
        for arena in self.arenas:
            arena.check_owner()

    def ring(self, device: torch.device) -> Ring:
        """The slots of a device, large enough for any page of its staged arenas.

        Raises:
            torch.OutOfMemoryError: the device has no room for the slots.
        """
        need = max(slot_bytes(a.layout) for a in self.on(device) if a.way(self.host_access) == "staged")
        ring = self.rings.get(device)
        if ring is None or ring.slot_bytes < need:
            self.rings.pop(device, None)
            ring = self.rings[device] = ring_for(device, need)
        return ring

    def set_budget(self, budget: Budget) -> None:
        """Move pages to match a new budget.  Waits for the device if any move.

        Raises:
            ValueError: the placement keeps none, or no rates tell what a time affords.
            MemoryError, torch.OutOfMemoryError, CudaError: there is no room; no state is lost, and the report says
                where each page is.
        """
        self.check_budget(budget, [arena.tensor for arena in self.arenas])
        self.limits = limits_of(budget, self._affords, self.placement, self.host_access)
        self._warned = False
        self.apply_budget()

    def check_budget(self, budget: Budget, state: Sequence[torch.Tensor]) -> None:
        """Refuse a budget before anything moves.

        Args:
            state: all there is.

        Raises:
            ValueError: the placement keeps none.
        """
        choose.check_placement(self.placement, budget, self.host_access)
        if self._affords is not None and budget.seconds is not None:
            self._affords.load(budget)
        self.check_owner()
        if budget.everything or not state:
            return
        if self.moves(state):
            limits = limits_of(budget, self._affords, self.placement, self.host_access)
            for device in {t.device for t in state} if budget.seconds is not None else ():
                limits.of(device, self.on(device))  # what has to be measured may be refused
            return
        if self.arenas and budget.nothing and all(a.away and not a.paged for a in self.arenas):
            return
        if self.arenas or self.is_unplaced():
            names = "+".join(sorted({a.name for a in self.arenas})) or "device"
            cpu = all(t.device.type == "cpu" for t in state)
            hint = "it is in ordinary memory; give a device_budget"
            if not cpu:
                hint = "give a device_budget (or placement='mapped')"
            raise ValueError(
                f"device_budget is {budget.said!r}, but state was created with placement {names!r}, whose pages do not "
                f"move: {hint} when making the optimizer"
            )

    def moves(self, state: Sequence[torch.Tensor]) -> bool:
        """Whether state can follow a budget: in pages that do, or in tensors of torch's own that may become such."""
        if self.arenas:
            return any(arena.paged and arena.keeps_budget for arena in self.arenas)
        return self.is_unplaced() and bool(state) and all(map(choose.moves_on_demand, {t.device for t in state}))

    def is_unplaced(self) -> bool:
        """Whether nobody asked for a placement or a budget."""
        return self.placement is None and self.budget.everything

    @contextlib.contextmanager
    def all_away(self) -> Iterator[None]:
        """A block in which state is made in pages that are away, and comes home into such."""
        limits, self.limits = self.limits, limits_of(NOTHING, None, None, None)
        try:
            yield
        finally:
            self.limits = limits

    def _targets(self) -> list[tuple[Arena, int]]:
        """(arena, pages that it should keep) where it does not keep as many, or was not asked to."""
        targets: list[tuple[Arena, int]] = []
        for device in {a.device for a in self.arenas}:
            here = self.on(device)
            limit = self.limits.of(device, here)
            targets += zip(here, divide([(type(a), a.layout) for a in here], limit), strict=True)
        return [(a, resident) for a, resident in targets if a.paged and {a.resident, a.wanted} != {resident}]

    def is_spilled(self) -> bool:
        """Whether pages are away that the budget would have on the device."""
        return any(arena.resident < resident for arena, resident in self._targets())

    def apply_budget(self) -> bool:
        """Move pages until each arena keeps as many as the budget gives it; whether any moved."""
        self.check_owner()
        targets = sorted(self._targets(), key=lambda t: t[1] > t[0].resident)  # give back before taking
        for arena, resident in targets:
            arena.move(resident)
        if targets and all(a.resident == a.layout.pages for a in self.arenas):
            self.rings.clear()
        return bool(targets)

    def spill(self, nbytes: int | None) -> int:
        """Send pages away until ``nbytes`` (None: all) are given back; returns how many were."""
        self.check_owner()
        given = 0
        for arena in reversed(self.arenas):
            if not arena.paged:
                continue
            sizes, resident = arena.layout.page_bytes(), arena.resident
            while resident and (nbytes is None or given < nbytes):
                resident -= 1
                given += int(sizes[resident])
            if {arena.resident, arena.wanted} != {resident}:
                arena.move(resident)
        return given

    def stand(self) -> Standing:
        """Get all arenas ready for a step, which asks nothing else of the store.

        Raises:
            RuntimeError: this process was forked from the one that made state in a file.
            MemoryError, OSError: what others have brought into memory could not be written back.
        """
        arenas = self.arenas
        if not arenas:
            return _EMPTY
        residents, locks = [], {}
        for arena in arenas:
            arena.prepare()
            residents.append(arena.resident)
            if (lock := arena.lock) is not None:
                locks[id(lock)] = lock
        return Standing(arenas, tuple(residents), _held(locks) if locks else _NOTHING_HELD)

    @property
    def residents(self) -> tuple[int, ...]:
        """How many pages of each arena are on the device."""
        return tuple([arena.resident for arena in self.arenas])

    def drop(self) -> None:
        """Send away what others, by reading or writing it, have brought into memory beyond the budget."""
        for arena in self.arenas:
            arena.drop()

    def remeasure_auto(self) -> bool:
        """With ``"auto"``: measure from time to time what the machine can spare; whether pages may have moved.

        Room that is gone before it can be taken is no error: the next time sees it.
        """
        moved = self.limits.remeasure(self.arenas)
        if moved:
            with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
                self.apply_budget()
        return moved

    def report(self, state: Sequence[torch.Tensor]) -> MemoryReport:
        """See :class:`MemoryReport`; ``state`` is all there is, of which some may be in no arena."""
        measured = choose.total([a.measured() for a in self.arenas] + self._loose(state))
        return replace(self.planned(state), measured=measured)

    def planned(self, state: Sequence[torch.Tensor]) -> MemoryReport:
        """The same without measuring: as it should be."""
        loose = self._loose(state)
        names = "+".join(dict.fromkeys([a.name for a in self.arenas] + ["device"] * bool(loose)))
        return MemoryReport(
            choose.total([*(a.planned() for a in self.arenas), *loose]),
            {},
            names or choose.name_of(self.placement),
            self.limits.total(self.arenas),
            sum(ring.nbytes for ring in self.rings.values()),
        )

    def _loose(self, state: Sequence[torch.Tensor]) -> list[dict[str, int]]:
        """Bytes by place of what is in no arena."""
        return [{"device" if t.is_cuda else "host": t.nbytes} for t in state if t.nbytes and self.is_plain(t)]


def find(arenas: Sequence[Arena], states: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """(number of the arena, index of the parameter in it) whose views these tensors are, one for each section."""
    for number, arena in enumerate(arenas):
        layout, base = arena.layout, arena.tensor.data_ptr()
        begin = states[0].data_ptr() - base - layout.sections[0]
        if len(states) != len(layout.itemsizes) or not 0 <= begin < arena.tensor.nbytes:
            continue
        index = int(np.searchsorted(layout.starts, begin // layout.itemsizes[0], side="right")) - 1
        expected = [base + layout.begin(section, index) for section in range(len(states))]
        if expected == [s.data_ptr() for s in states]:
            return number, index
    return None


def _held(locks: dict[int, contextlib.AbstractContextManager[object]]) -> contextlib.AbstractContextManager[object]:
    """All of them, in one order for all, so that nobody waits for who waits."""
    if len(locks) == 1:
        return next(iter(locks.values()))
    return _Together([locks[at] for at in sorted(locks)])


class _Together:
    """Several locks as one; entered once or more often."""

    def __init__(self, locks: Sequence[contextlib.AbstractContextManager[object]]) -> None:
        self._locks, self._stack = locks, contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as entered:
            for lock in self._locks:
                entered.enter_context(lock)
            self._stack = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
