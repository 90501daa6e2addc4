"""What a configuration will take, said before anything is allocated: bytes by place, bytes over the link, seconds.

Bytes come from the same functions that lay out and divide the real arenas; seconds are those bytes over the rates at
which a machine moves them.  Nothing here touches a device, so a plan for a large machine can be made on a small one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.facts_table import Shown
from ..common.units import text_of_bytes, text_of_count, text_of_seconds
from ..formats.floating import StateFormat, check_format, dtype_of_name, format_of, real_dtype
from ..paging.budget import Budget, Given
from ..paging.pages import Layout, Width, lay_out
from ..paging.policy import SLOTS
from ..placements.choose import (
    ARENAS,
    Arena,
    HostAccess,
    Placement,
    check_placement,
    kind_of,
    total,
)
from ..placements.limits import divide
from ..placements.movers import slot_bytes
from ..rules import UPDATES, Rule
from ..tables.storage import Column
from .affordable import Affordable
from .model import Described, describe
from .rates import ASSUMED, ASSUMED_CPU, Rates


@dataclass(frozen=True)
class Estimate(Shown):
    """What an optimizer's state takes and how long a step lasts.  All sizes in bytes.

    Attributes:
        parameters: how many there are, those that are not trained included.
        param_bytes, grad_bytes: of parameters, and of gradients of those that are trained.
        device: where parameters are, ``cuda`` or ``cpu``.
        placement: where state is, by the name of a placement.
        budget: bytes of state that may stay with the parameters, of a share those it comes to; None: all.
        host_access: how a step reaches what is away, ``staged`` or ``in_place``; None if nothing is.
        by_place: state by place, as :class:`~pagedopt.MemoryReport` has it: ``device``, ``host``, ``file``.
        ring: slots on the device through which pages pass (from a file: what is in RAM of pages in use).
        moved: bytes that cross the link (for parameters on a CPU: go from and to the file) in each step, both ways.
        seconds: of an optimizer step; None if a rate it depends on is not known.
        floor: seconds of a step that would keep device memory and both directions of the link busy all the time.
        rates: on which ``seconds`` and ``floor`` rest.

    Example:
        >>> plan = pagedopt.estimate("7B", param_dtype="bfloat16", device_budget="8GiB")
        >>> plan.by_place["host"], plan.near_bytes, plan.seconds    # what spills, what the card must hold, a step
    """

    parameters: int
    param_bytes: int
    grad_bytes: int
    device: str
    placement: str
    budget: int | None
    host_access: str | None
    by_place: Mapping[str, int]
    ring: int
    moved: int
    seconds: float | None
    floor: float | None
    rates: Rates

    @property
    def near(self) -> str:
        """Where state lies that the budget keeps with the parameters: ``device``, or ``host`` beside a CPU."""
        return "host" if self.device == "cpu" else "device"

    @property
    def state_bytes(self) -> int:
        """All state."""
        return sum(self.by_place.values())

    @property
    def near_bytes(self) -> int:
        """What the parameters' own device (a CPU: RAM) has to hold: parameters, gradients, its state and the ring."""
        return self.param_bytes + self.grad_bytes + self.by_place.get(self.near, 0) + self.ring

    @property
    def away_bytes(self) -> int:
        """State that lies elsewhere."""
        return self.state_bytes - self.by_place.get(self.near, 0)

    @property
    def unknown_rates(self) -> tuple[str, ...]:
        """Names of the rates for want of which ``seconds`` is None."""
        if self.device == "cpu":
            needed = ("ram", "file_read", "file_write") if self.moved else ("ram",)
        else:
            link = ("in_place",) if self.host_access == "in_place" else ("up", "down", "both")
            needed = ("device", *link) if self.moved else ("device",)
        return tuple(name for name in needed if getattr(self.rates, name) is None) if self.seconds is None else ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = ("parameters", "param_bytes", "grad_bytes", "state_bytes", "device", "placement", "budget",
                 "host_access", "ring", "near_bytes", "away_bytes", "moved", "seconds", "floor")  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "by_place": dict(self.by_place),
                "rates": self.rates.as_dict()}  # fmt: skip

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """See :class:`Shown`."""
        rows = [
            ("parameters", f"{text_of_bytes(self.param_bytes)} on {self.device}"),
            ("gradients", text_of_bytes(self.grad_bytes)),
            *((f"state on {place}", text_of_bytes(nbytes)) for place, nbytes in self.by_place.items()),
            ("placement", self.means),
            ("in all", f"{text_of_bytes(self.near_bytes)} of {self.near} memory"),
            ("a step", f"{text_of_seconds(self.seconds)} (at best {text_of_seconds(self.floor)})"),
            ("rates of", self.rates.machine),
        ]
        if self.budget is not None:
            rows.insert(4, ("budget", text_of_bytes(self.budget)))
        if self.moved:
            rows.insert(-1, ("moved in a step", text_of_bytes(self.moved)))
        return f"{text_of_count(self.parameters)} parameters", rows

    @property
    def means(self) -> str:
        """The placement, in the words of a report: a CPU has no device beside it."""
        return "ordinary memory" if self.device == "cpu" and self.placement == "device" else self.placement

    def __str__(self) -> str:
        budget = "" if self.budget is None else f", budget {text_of_bytes(self.budget)}"
        places = ", ".join(f"{text_of_bytes(n)} on {p}" for p, n in self.by_place.items()) or "none"
        over = "to and from the file" if self.device == "cpu" else f"over the link ({self.host_access})"
        moved = f", {text_of_bytes(self.moved)} {over}" if self.moved else ""
        shown = text_of_bytes(self.ring)
        ring = "" if not self.ring else f", {shown} of pages in use" if self.device == "cpu" else f", ring {shown}"
        lacking = f"; they have no {', '.join(self.unknown_rates)}" if self.unknown_rates else ""
        return (
            f"{text_of_count(self.parameters)} parameters: {text_of_bytes(self.param_bytes)}, gradients "
            f"{text_of_bytes(self.grad_bytes)}, on {self.device}\n"
            f"state ({self.means}{budget}): {places}{ring}\n"
            f"a step: {text_of_seconds(self.seconds)} (at best {text_of_seconds(self.floor)}){moved}\n"
            f"rates of {self.rates.machine}{lacking}"
        )


def estimate(
    model: Any,
    *,
    rule: str | Rule = "adamw",
    param_dtype: torch.dtype | str | None = None,
    state_format: StateFormat = None,
    placement: Placement | None = None,
    device_budget: Given | Budget = None,
    host_access: HostAccess | None = None,
    device: str | torch.device | None = None,
    rates: Rates | None = None,
) -> Estimate:
    """Say what an optimizer with these options will take.  Allocates nothing and needs no GPU.

    Args:
        model: a module, parameters or parameter groups as an optimizer takes them (also on the meta device; of DTensors
            what this process has), a list of shapes, a dict of name to shape, or a number of parameters as
            ``7_000_000_000`` or ``"7B"``.
        rule: which names its state: one of ``pagedopt.rules.UPDATES`` by name (``"adamw"``, ``"sgd_momentum"``, …), or
            your own.
        param_dtype: of parameters and gradients; None: their own, float32 for shapes.
        state_format, placement, device_budget, host_access: as :class:`~pagedopt.PagedOptimizer` takes them;
            ``"auto"`` is not a number that could be known before.
        device: ``"cuda"`` or ``"cpu"``; None: where the parameters are, ``"cuda"`` for shapes and the meta device.
        rates: of the machine it will run on, as :meth:`Rates.load` reads them; None: those that a time in
            ``device_budget`` names; else nothing is measured, and those of an H200 are assumed, on a CPU a round
            guess; ``rates.machine`` says so.

    Raises:
        ValueError, TypeError: an option has a value that the optimizer refuses as well, or ``model`` is none of these.

    Example:
        >>> print(pagedopt.estimate("7B", param_dtype="bfloat16", device_budget="2GiB"))
    """
    if not isinstance(rule, Rule) and rule not in UPDATES:
        raise ValueError(
            f"rule is {rule!r}; there are {', '.join(UPDATES)}, or a function decorated with pagedopt.rule"
        )
    rule = rule if isinstance(rule, Rule) else UPDATES[rule]
    check_format(state_format)
    budget = Budget.parse(device_budget)
    check_placement(placement, budget, host_access)
    if budget.auto:
        raise ValueError(
            "device_budget is 'auto', which is read from the device as training goes; give bytes or a share"
        )
    found = describe(model, _dtype(param_dtype))
    where = torch.device(device or found.device or "cuda")
    if where.type not in ARENAS:
        raise ValueError(f"device is {str(where)!r}; there are {', '.join(ARENAS)}")
    kind = kind_of(placement, where, budget)
    rates = rates or Affordable().load(budget) or (ASSUMED_CPU if where.type == "cpu" else ASSUMED)
    if budget.seconds is not None:
        budget = Budget.leaving(Affordable(rates)(budget, where, kind, kind.way(host_access)))
    return _Arenas(rule, found, state_format, kind, where, budget).estimate(host_access, rates)


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    return dtype_of_name(given, "param_dtype")


@dataclass(frozen=True)
class _ArenaPart:
    """One arena: its layout, how many of its pages stay, and the bytes a step reads and writes for each element."""

    layout: Layout
    resident: int
    traffic: Width
    columns: Sequence[Column]
    plain: bool

    @property
    def bytes(self) -> tuple[int, int]:
        """Resident ones, and those that are away."""
        if self.plain:  # tensors of torch's own, without the gaps of an arena
            sizes = self.layout.numels.tolist()
            return sum(c.real.itemsize * sum(map(c.entries, sizes)) for c in self.columns), 0
        return self.layout.divided(self.resident)

    @property
    def numel(self) -> int:
        """Elements that a step updates."""
        return int(self.layout.numels.sum())

    @property
    def stays(self) -> int:
        """Elements whose state is in the resident pages, or that have none."""
        return min(self.resident * self.layout.page_numel, self.numel) if self.layout.nbytes else self.numel


class _Arenas:
    """Arenas as a :class:`Store` would make them: one for each dtype of parameters, in order."""

    def __init__(
        self,
        rule: Rule,
        found: Described,
        state_format: StateFormat,
        kind: type[Arena],
        device: torch.device,
        budget: Budget,
    ) -> None:
        self.found, self.kind, self.device, self.budget = found, kind, device, budget
        kinds: dict[torch.dtype, list[int]] = {}
        for numel, dtype in found.trained:  # kernels see real numbers
            kinds.setdefault(real_dtype(dtype), []).append(numel * (2 if dtype.is_complex else 1))
        layouts, traffic, columns = [], [], []
        for dtype, numels in kinds.items():
            forms = [format_of(state_format, name, dtype) for name in rule.inputs[2:]]
            lists = [dtype.itemsize, dtype.itemsize, *(sum(c.width for c in form.columns) for form in forms)]
            traffic.append(sum(lists) + sum(lists[i] for i in rule.writes))
            columns.append([column for form in forms for column in form.columns])
            block = max((form.block for form in forms), default=1)
            widths = [column.width for column in columns[-1]]
            layouts.append(lay_out(numels, widths, kind.granule, kind.stretch, block=block))
        self.state_bytes = sum(layout.nbytes for layout in layouts)
        residents = divide([(kind, layout) for layout in layouts], budget)
        self.parts = [_ArenaPart(*part, kind.plain) for part in zip(layouts, residents, traffic, columns, strict=True)]

    def estimate(self, host_access: str | None, rates: Rates) -> Estimate:
        """Add up."""
        near, away = (sum(part.bytes[i] for part in self.parts) for i in range(2))
        way = self.kind.way(host_access)
        slot = max((slot_bytes(part.layout) for part in self.parts), default=0)
        staged = bool(away) and way == "staged"
        here = "host" if self.device.type == "cpu" else "device"
        work = int(sum(part.traffic * part.numel for part in self.parts))
        stays = int(sum(part.traffic * part.stays for part in self.parts))
        clock = _CpuClock(rates) if self.device.type == "cpu" else _LinkClock(rates, slot if staged else None)
        return Estimate(
            parameters=self.found.parameters,
            param_bytes=self.found.param_bytes,
            grad_bytes=sum(numel * dtype.itemsize for numel, dtype in self.found.trained),
            device=self.device.type,
            placement=self.kind.name,
            budget=self.budget.limit(self.state_bytes),
            host_access=way if away else None,
            by_place=total([{here: near}, {self.kind.away or here: away}]),
            ring=SLOTS * slot if staged else 0,
            moved=2 * away,
            seconds=clock.seconds(stays, away),
            floor=clock.floor(work, away),
            rates=rates,
        )


class _LinkClock:
    """Seconds of a step on a CUDA device; ``page`` is the largest that is staged, None: in place."""

    def __init__(self, rates: Rates, page: int | None) -> None:
        self.rates, self.page = rates, page

    def seconds(self, stays: int, away: int) -> float | None:
        """The part that stays, at the rate of a copy; then the rest, while the memory of the device waits for the link.

        Staged, the first page comes and the last one goes with nothing in the other direction.
        """
        rates = self.rates
        near = _over(stays, rates.device)
        if self.page is None:
            return _sum(near, _over(2 * away, rates.in_place))
        page = min(self.page, away)
        return _sum(near, _over(page, rates.up), _over(2 * (away - page), rates.both), _over(page, rates.down))

    def floor(self, work: int, away: int) -> float | None:
        """Whichever is slower."""
        return _longest(_over(work, self.rates.device), _over(2 * away, self.rates.both))


class _CpuClock:
    """Seconds of a step on a CPU, whose state may be in a file."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def seconds(self, stays: int, away: int) -> float | None:
        """RAM, then reading, then writing."""
        rates = self.rates
        return _sum(_over(stays, rates.ram), _over(away, rates.file_read), _over(away, rates.file_write))

    def floor(self, work: int, away: int) -> float | None:
        """Whichever is slowest."""
        rates = self.rates
        return _longest(_over(work, rates.ram), _over(away, rates.file_read), _over(away, rates.file_write))


def _over(nbytes: int, rate: float | None) -> float | None:
    """Seconds to move ``nbytes``: 0 bytes take none; None: the rate is not known."""
    return 0.0 if not nbytes else None if rate is None else nbytes / rate


def _sum(*seconds: float | None) -> float | None:
    known = [s for s in seconds if s is not None]
    return sum(known) if len(known) == len(seconds) else None


def _longest(*seconds: float | None) -> float | None:
    known = [s for s in seconds if s is not None]
    return max(known) if len(known) == len(seconds) else None
