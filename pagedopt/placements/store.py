"""The store: makes the state tensors of an optimizer in arenas, and moves pages to keep to its budget."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ..common.patience import Patience
from ..paging.budget import NOTHING, Budget
from ..paging.pages import Width
from ..system import host, internals
from ..system.warn import asks_for, outside
from ..tables.storage import Column
from ..tables.tensors import like_shard, local
from . import choose
from .arena import Arena, divide
from .choose import HostAccess, Placement
from .limits import Limits, by_device, warn_of_no_page
from .memory_report import MemoryReport
from .movers import GraphSlots, Ring, Slots, ring_for, slot_bytes
from .versions import Versions

#: Most bytes of spare room in an arena that is made when others like it are full: more parameters may come.
SPARE = 4 << 20


class _View(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage in an arena that counts its death; it keeps neither arena nor store alive.

    To the storage, and not to its tensor: ``torch.utils.swap_tensors`` refuses tensors with weak references.
    """

    __slots__ = ("arena", "store")

    def __new__(cls, storage: torch.UntypedStorage, *_: Any) -> Self:
        return super().__new__(cls, storage, _died)

    def __init__(self, storage: torch.UntypedStorage, store: weakref.ref[Store], arena: weakref.ref[Arena]) -> None:
        super().__init__(storage, _died)  # type: ignore[call-arg]
        self.store, self.arena = store, arena


def _died(view: Any) -> None:
    arena, store = view.arena(), view.store()
    if arena is not None:
        arena.alive -= 1
        if not arena.alive and store is not None:
            store._drop(arena)


class Store:
    """The state memory of one optimizer: its arenas, their rings and the budget.

    Args:
        placement, host_access: as :class:`~pagedopt.PagedOptimizer` takes them.
        budget: for each device of parameters.

    Raises:
        ValueError, TypeError: the options do not go together.
    """

    def __init__(self, placement: Placement | None, budget: Budget, host_access: HostAccess | None) -> None:
        choose.check_placement(placement, budget, host_access)
        self.placement, self.host_access = placement, host_access
        self.limits = Limits(budget)
        #: Replaced, never changed in place: code that holds the list relies on its indices.
        self.arenas: list[Arena] = []
        self.rings: dict[torch.device, Ring] = {}
        self._apart: dict[torch.device, GraphSlots] | None = None
        self._signatures: dict[Arena, tuple[object, ...]] = {}  # what the parameters of each have in common
        self._warned = False
        #: Whether no other optimizer may use its rings; set by :meth:`own_rings`.
        self._owns_rings = False
        self.versions = Versions()
        self.graphs = Graphs()

    @property
    def budget(self) -> Budget:
        """What the user asked for, for each device."""
        return self.limits.budget

    @torch.inference_mode(False)  # state outlives the block in which it is made
    @torch.no_grad()
    def create(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Return a zeroed tensor for each column in ``wanted``; for a DTensor, a DTensor with a zeroed local shard.

        Parameters that one launch can update get one arena per device; those that come later share another one.
        With placement ``device`` torch allocates each tensor.

        Raises:
            MemoryError, torch.OutOfMemoryError, CudaError: there is no room; nothing has been created.
            RuntimeError: inside ``FakeTensorMode`` no memory can be allocated; nothing has been created.
        """
        if internals.in_fake_mode():
            raise RuntimeError("state takes memory, and in FakeTensorMode there is none; take the step outside of it")
        by_param: dict[int, list[int]] = {}
        for i, one in enumerate(wanted):
            by_param.setdefault(id(one.param), []).append(i)
        by_signature: dict[tuple[object, ...], list[list[int]]] = {}
        for indices in by_param.values():
            p = wanted[indices[0]].param
            grad = None if p.grad is None else p.grad.dtype
            by_signature.setdefault((p.device, p.dtype, grad, *[wanted[i][1:4] for i in indices]), []).append(indices)
        before = [(arena, arena.layout) for arena in self.arenas]
        try:
            allocated = [self._allocate(signature, params, wanted) for signature, params in by_signature.items()]
        except BaseException:
            self.arenas = [arena for arena, _ in before]
            for arena, layout in before:
                arena.layout = layout
            raise
        shards: dict[int, torch.Tensor] = {}
        store = weakref.ref(self)
        for home, tensors in allocated:
            made = {i: self.versions.share(tensor) for i, tensor in tensors.items()}
            shards.update(made)
            if home is not None:
                home.alive += len(made)
                storages = [tensor.untyped_storage() for tensor in made.values()]
                home.views = (*home.views, *(_View(storage, store, weakref.ref(home)) for storage in storages))
        return [like_shard(shards[i], of=one.param) for i, one in enumerate(wanted)]

    def _drop(self, arena: Arena) -> None:
        """Forget an arena.  A dying tensor may call this amid other code, so it replaces lists and dicts."""
        self.arenas = [each for each in self.arenas if each is not arena]
        self._signatures = {each: signature for each, signature in self._signatures.items() if each is not arena}
        if not self.arenas:
            self.rings = {}

    def _allocate(
        self, signature: tuple[object, ...], params: Sequence[list[int]], wanted: Sequence[Wanted]
    ) -> tuple[Arena | None, dict[int, torch.Tensor]]:
        """Return (arena or None, tensors by index in ``wanted``) for parameters of one signature (lists of indices)."""
        firsts = [local(wanted[indices[0]].param) for indices in params]
        columns = [wanted[i].column for i in params[0]]
        alike = [arena for arena in self.arenas if self._signatures.get(arena) == signature]
        numels = [p.numel() * (2 if p.is_complex() else 1) for p in firsts]  # kernels see real numbers
        for arena in alike:
            if (numbers := arena.extend(numels)) is not None:
                break
        else:
            spare = min(SPARE, sum(arena.layout.nbytes for arena in alike) // 4)
            block = max([wanted[i].block for i in params[0]])
            device, widths = firsts[0].device, [c.width for c in columns]
            here = self.on(device)
            budget = self.limits.of(device, here)
            new = choose.create(numels, widths, device, self.placement, budget, spare, here, block)
            if new is None:
                if device.type == "cpu":
                    nbytes = sum([c.entries(p.numel()) * c.dtype.itemsize for p in firsts for c in columns])
                    host.check_host(nbytes, "optimizer state")
                return None, {i: wanted[i].zeros() for indices in params for i in indices}
            arena, numbers = new, list(range(len(numels)))
            warn_of_no_page(arena, self.budget)
            self.arenas = [*self.arenas, arena]
            self._signatures[arena] = signature
        return arena, {
            i: arena.view(section, number, wanted[i].strided, wanted[i].column.dtype)
            for indices, number in zip(params, numbers, strict=True)
            for section, i in enumerate(indices)
        }

    def check_device(self, device: torch.device) -> None:
        """Refuse parameters on a device that cannot be served.

        Raises:
            ValueError: no kernel runs there, or no placement serves it.
        """
        choose.check_device(device, self.placement)
        choose.candidates(self.placement, device, self.budget)  # raises if there are none

    def on(self, device: torch.device) -> list[Arena]:
        """Return the arenas of a device."""
        return [a for a in self.arenas if a.device == device]

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Return whether a state tensor is in an arena, or the placement makes no arenas."""
        return not self.is_outside_arenas(tensor) or choose.kind_of(self.placement, tensor.device, self.budget).plain

    def is_outside_arenas(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in no arena."""
        return not any(arena.holds(local(tensor)) for arena in self.arenas)

    def forget_and_warn(self, state: Sequence[torch.Tensor], owner: str) -> None:
        """Forget arenas without state; warn, once, of state that the budget does not cover."""
        self.forget(state)
        if self.budget.everything or self._warned:
            return
        if loose := sum(t.nbytes for t in state if not self.is_home(t)):
            self._warned = True
            warnings.warn(
                f"{owner}: {loose:,} bytes of optimizer state are in tensors outside of the pages that device_budget="
                f"{self.budget.said!r} covers; set_device_budget() moves them into pages",
                RuntimeWarning,
                stacklevel=outside(),
            )

    def forget(self, in_use: Iterable[torch.Tensor]) -> None:
        """Forget arenas that none of these tensors views.  Their memory is freed with the last tensor that views it."""
        at = np.array([t.data_ptr() for t in in_use], np.uint64)
        bounds = [(a, a.tensor.data_ptr()) for a in self.arenas]
        self.arenas = [a for a, start in bounds if ((at >= start) & (at < start + a.tensor.nbytes)).any()]
        self._signatures = {arena: signature for arena, signature in self._signatures.items() if arena in self.arenas}

    def check_owner(self) -> None:
        """Raise RuntimeError in a process that was forked from the one that made state in a file."""
        for arena in self.arenas:
            arena.check_owner()

    def ring(self, device: torch.device) -> Ring:
        """Return a device's ring, with slots for the largest page of its staged arenas; may raise OutOfMemoryError."""
        need, ring = self._slot_bytes(device), self.rings.get(device)
        if ring is None or ring.slot_bytes < need:
            self.rings.pop(device, None)
            ring = self.rings[device] = (Ring if self._owns_rings else ring_for)(device, need)
        return ring

    def own_rings(self, own: bool) -> None:
        """From now on use rings that no other optimizer uses, or again shared ones; launches have to be made anew."""
        self._owns_rings, self.rings = own, {}

    def slots(self, device: torch.device) -> Slots:
        """Return what pages pass through: the device's ring; within :meth:`slots_apart` others."""
        if self._apart is not None and device not in self._apart:
            self._apart[device] = slots = GraphSlots(device, self._slot_bytes(device))
            self.graphs.alive.add(slots)
        return self.ring(device) if self._apart is None else self._apart[device]

    @contextlib.contextmanager
    def slots_apart(self) -> Iterator[dict[torch.device, GraphSlots]]:
        """A context in which pages pass through slots of their own, which it gives and somebody has to keep alive."""
        self._apart = slots = dict[torch.device, GraphSlots]()
        try:
            yield slots
        finally:
            self._apart = None

    def _slot_bytes(self, device: torch.device) -> int:
        return max(slot_bytes(a.layout) for a in self.on(device) if a.way(self.host_access) == "staged")

    def set_budget(self, budget: Budget) -> None:
        """Move pages to match a new budget.  Waits for the device if any move.

        Raises:
            ValueError: the placement cannot keep to a budget.
            MemoryError, torch.OutOfMemoryError, CudaError: there is no room; no state is lost, and the report says
                where each page is.
        """
        self.check_budget(budget, [arena.tensor for arena in self.arenas])
        self.limits = Limits(budget)
        self._warned = False
        self.apply_budget()

    def check_budget(self, budget: Budget, state: Sequence[torch.Tensor]) -> None:
        """Raise ValueError, before anything moves, if ``state``, all that there is, cannot be moved to fit a budget."""
        choose.check_placement(self.placement, budget, self.host_access)
        self.check_owner()
        if budget.everything or not state or self.moves(state):
            return
        if self.arenas and budget.nothing and all(a.away and not a.paged for a in self.arenas):
            return
        if self.arenas or self.is_unplaced():
            names = "+".join(sorted({a.name for a in self.arenas})) or "device"
            raise ValueError(
                f"device_budget is {budget.said!r}, but state was created with placement {names!r}, whose pages do not "
                "move: give a device_budget (or placement='mapped') when making the optimizer"
            )

    def moves(self, state: Sequence[torch.Tensor]) -> bool:
        """Return whether state can follow a budget: in pages that move, or in torch's tensors that may go into such."""
        if self.arenas:
            return any(arena.paged and arena.keeps_budget for arena in self.arenas)
        return self.is_unplaced() and bool(state) and all(map(choose.moves_on_demand, {t.device for t in state}))

    def is_unplaced(self) -> bool:
        """Return whether neither a placement nor a budget was asked for."""
        return self.placement is None and self.budget.everything

    @contextlib.contextmanager
    def all_away(self) -> Iterator[None]:
        """A context with a budget of zero: new state gets pages that are away; state in no arena is not at home."""
        limits, self.limits = self.limits, Limits(NOTHING)
        try:
            yield
        finally:
            self.limits = limits

    def _targets(self) -> list[tuple[Arena, int]]:
        """Return (arena, resident pages under the budget) where another number is resident or was asked for last."""
        targets: list[tuple[Arena, int]] = []
        for device, here in by_device(self.arenas):
            limit = self.limits.of(device, here)
            targets += zip(here, divide([(type(a), a.layout) for a in here], limit), strict=True)
        return [(a, resident) for a, resident in targets if a.paged and a.resident != resident]

    def is_spilled(self) -> bool:
        """Return whether pages are away for which the budget has room on the device."""
        return any(arena.resident < resident for arena, resident in self._targets())

    def apply_budget(self) -> bool:
        """Move pages until each arena has as many resident as the budget gives it.  Return whether any had to."""
        self.check_owner()
        targets = sorted(self._targets(), key=lambda t: t[1] > t[0].resident)  # free memory before taking some
        for arena, resident in targets:
            arena.move(resident)
        if targets and all(a.resident == a.layout.pages for a in self.arenas):
            self.rings.clear()
        return bool(targets)

    def spill(self, nbytes: int | None) -> int:
        """Send pages away until ``nbytes`` (None: all) are free; return how many bytes were freed."""
        self.check_owner()
        given = 0
        for arena in (a for a in reversed(self.arenas) if a.paged):
            sizes, resident = arena.layout.page_bytes(), arena.resident
            while resident and (nbytes is None or given < nbytes):
                resident -= 1
                given += int(sizes[resident])
            if arena.resident != resident:
                arena.move(resident)
        return given

    def make_ready(self) -> ReadyArenas:
        """Make all arenas ready for a step, which calls nothing else of the store.

        Raises:
            RuntimeError: this process was forked from the one that made state in a file.
            MemoryError, OSError: pages that others have read or written could not be written back.
        """
        arenas = self.arenas
        if not arenas:
            return NO_ARENAS
        for arena in arenas:
            arena.prepare()
        return ReadyArenas(arenas, tuple([arena.resident for arena in arenas]))

    def drop(self) -> None:
        """Evict again pages that are away but that other code has touched, e.g. for a checkpoint."""
        for arena in self.arenas:
            arena.drop()

    def remeasure_auto(self) -> bool:
        """With ``"auto"``, measure at times what the machine can spare.  Return whether pages may have moved."""
        if moved := self.limits.remeasure(self.arenas):
            with contextlib.suppress(torch.OutOfMemoryError, MemoryError):  # spare memory is gone: measured next time
                self.apply_budget()
        return moved

    def report(self, state: Sequence[torch.Tensor]) -> MemoryReport:
        """Return the report for ``state``, which is all there is; some of it may be in no arena."""
        measured = choose.total([a.measured() for a in self.arenas] + self._loose(state))
        return replace(self.planned(state), measured=measured)

    def planned(self, state: Sequence[torch.Tensor]) -> MemoryReport:
        """Return the report without measuring."""
        loose = self._loose(state)
        names = "+".join(dict.fromkeys([a.name for a in self.arenas] + ["device"] * bool(loose)))
        return MemoryReport(
            choose.total([*(a.planned() for a in self.arenas), *loose]),
            {},
            names or choose.name_of(self.placement),
            self.limits.total(self.arenas),
            sum(ring.nbytes for ring in self.rings.values()),
            "" if self.budget.everything else str(self.budget),
            self.graphs.nbytes,
        )

    def _loose(self, state: Sequence[torch.Tensor]) -> list[dict[str, int]]:
        """Return bytes by place of tensors in no arena."""
        return [{"device" if t.is_cuda else "host": t.nbytes} for t in state if t.nbytes and self.is_outside_arenas(t)]


# --- what it makes, and what it tells steps ---------------------------------------------------------------------------


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


class ReadyArenas(NamedTuple):
    """The arenas that a step uses, after :meth:`Store.make_ready` has made them ready.

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


#: "calls": staged steps of optimizers that are made from now on go page by page, each with calls of its own.
VARIABLE = "PAGEDOPT_STAGED"
#: Steps that repeat before a graph of them is made, at most; at first it is made in the second.
MOST_PATIENCE = 64


class Graphs:
    """Whether there may be graphs, and those that live.

    Attributes:
        wanted: whether there may be graphs.
        patience: how many equal steps come before a graph is made.
        alive: graphs, and slots that they own; each has ``nbytes`` of device memory.
    """

    def __init__(self) -> None:
        self.wanted = not asks_for(VARIABLE, "calls", usual="graph")
        self.patience = Patience(MOST_PATIENCE)
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def lost(self) -> None:
        """Note that graphs of a plan can serve no longer; each launch of that plan may say so."""
        if self.patience.served:
            self.patience.lost()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they take."""
        return sum(each.nbytes for each in self.alive)
