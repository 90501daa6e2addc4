"""``estimate``: memory and time that an optimizer configuration will take, before anything is allocated.

Bytes come from the functions that lay out and divide real arenas; seconds are bytes divided by the rates of a machine.
Nothing here touches a device, so a plan for a large machine can be made on a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.facts_table import Shown
from ..common.units import text_of_bytes, text_of_count, text_of_seconds
from ..formats.choice import State
from ..formats.floating import StateFormat, check_format, check_squares, dtype_of_name, format_of, real_dtype
from ..formats.format import Format
from ..formats.names import ParamFormat
from ..formats.sixteen import check_param_options, of_parameter
from ..paging.budget import Budget, Given
from ..paging.pages import Layout, Width, lay_out
from ..paging.policy import HELD, SLOTS
from ..placements.arena import divide
from ..placements.choose import ARENAS, Arena, HostAccess, Placement, check_placement, kind_of, total
from ..placements.movers import slot_bytes
from ..rules import UPDATES, Rule
from ..tables.storage import Column
from .model import INHERITED, Described, describe
from .rates import ASSUMED, ASSUMED_CPU, Rates


@dataclass(frozen=True)
class Estimate(Shown):
    """How much memory an optimizer's state takes and how long a step lasts.  All sizes in bytes.

    Attributes:
        parameters: number of elements, including parameters that are not trained.
        param_bytes, grad_bytes: bytes of all parameters, and of the gradients of trained ones.
        device: device of the parameters, ``cuda`` or ``cpu``.
        placement: name of the placement of the state.
        budget: bytes of state that may stay with the parameters (also if given as a share); None: all.
        host_access: how a step accesses state off the device, ``staged`` or ``in_place``; None: all is on it.
        by_place: bytes of state on ``device``, ``host`` and ``file``, as in :class:`~pagedopt.MemoryReport`.
        ring: slots on the device for visiting pages (with a file: RAM for pages in use).
        moved: bytes that cross the link (for parameters on a CPU: go from and to the file) in each step, both ways.
        seconds: duration of an optimizer step; None if a rate it depends on is not known.
        floor: least seconds of a step: copies overlap the update fully, so that the slowest rate alone decides.
        unknown_rates: names of the unknown rates because of which ``seconds`` is None.
        rates: the rates from which ``seconds`` and ``floor`` follow.

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
    unknown_rates: tuple[str, ...]
    rates: Rates

    @property
    def near(self) -> str:
        """Where state within the budget lies: ``device``, or ``host`` for parameters on a CPU."""
        return "host" if self.device == "cpu" else "device"

    @property
    def state_bytes(self) -> int:
        """Bytes of all state."""
        return sum(self.by_place.values())

    @property
    def near_bytes(self) -> int:
        """Bytes on the parameters' device (a CPU: in RAM): parameters, gradients, state that stays, and the ring."""
        return self.param_bytes + self.grad_bytes + self.by_place.get(self.near, 0) + self.ring

    @property
    def backward_bytes(self) -> int:
        """What ``near_bytes`` is after ``attach(model, overlap="backward")``, which frees gradients as it goes."""
        return self.near_bytes - max(0, self.grad_bytes - HELD)

    @property
    def away_bytes(self) -> int:
        """Bytes of state elsewhere than with the parameters."""
        return self.state_bytes - self.by_place.get(self.near, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes and properties as JSON values."""
        names = ("parameters", "param_bytes", "grad_bytes", "state_bytes", "device", "placement", "budget",
                 "host_access", "ring", "near_bytes", "backward_bytes", "away_bytes", "moved", "seconds",
                 "floor")  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "by_place": dict(self.by_place),
                "rates": self.rates.as_dict()}  # fmt: skip

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """See :class:`Shown`."""
        rows = [
            ("parameters", f"{text_of_bytes(self.param_bytes)} on {self.device}"),
            ("gradients", text_of_bytes(self.grad_bytes)),
            *((f"state on {place}", text_of_bytes(nbytes)) for place, nbytes in self.by_place.items()),
            ("placement", self.means),
            ("budget", "all" if self.budget is None else text_of_bytes(self.budget)),
            ("in all", f"{text_of_bytes(self.near_bytes)} of {self.near} memory"),
            ("a step", f"{text_of_seconds(self.seconds)} (at best {text_of_seconds(self.floor)})"),
        ]
        if self.moved:
            link, file = (f"over the link ({self.host_access})", "a ring"), ("to and from the file", "pages in use")
            way, slots = file if self.device == "cpu" else link
            ring = f", through {slots} of {text_of_bytes(self.ring)}" if self.ring else ""
            rows.append(("moved in a step", f"{text_of_bytes(self.moved)} {way}{ring}"))
        lacking = f"; they have no {', '.join(self.unknown_rates)}" if self.unknown_rates else ""
        rows.append(("rates of", f"{self.rates.machine}{lacking}"))
        return f"{text_of_count(self.parameters)} parameters", rows

    @property
    def means(self) -> str:
        """The placement as reports name it: a CPU has no separate device memory."""
        return "ordinary memory" if self.device == "cpu" and self.placement == "device" else self.placement


def estimate(
    model: Any,
    *,
    rule: str | Rule = "adamw",
    param_dtype: torch.dtype | str | None = None,
    state_format: StateFormat = None,
    param_format: ParamFormat = None,
    placement: Placement | None = None,
    device_budget: Given | Budget = None,
    host_access: HostAccess | None = None,
    device: str | torch.device | None = None,
    rates: Rates | None = None,
) -> Estimate:
    """Estimate memory and time of an optimizer with these options.  Allocates nothing and needs no GPU.

    Args:
        model: a module, parameters or parameter groups as an optimizer takes them (also on the meta device; DTensors
            count with the shards of this process), a list of shapes, a dict of name to shape, or a number of
            parameters as ``7_000_000_000`` or ``"7B"``, or a name of ``pagedopt plan --size``, as ``"gpt2"``.
        rule: a name in ``pagedopt.rules.UPDATES`` (``"adamw"``, ``"sgd_momentum"``, …), or your own rule; its inputs
            name the state.
        param_dtype: dtype of parameters and gradients; None: their own, float32 for shapes.
        state_format, param_format, placement, device_budget, host_access: as in :class:`~pagedopt.PagedOptimizer`,
            except ``"auto"``, which is only known while training.  A :class:`Budget` may be of any bytes.
        device: ``"cuda"`` or ``"cpu"``; None: the parameters' device, ``"cuda"`` for shapes and the meta device.
        rates: rates of the machine it will run on, see :meth:`Rates.load`; None: assumed ones (an H200; a round guess
            for a CPU), as ``rates.machine`` says.  Nothing is measured.

    Raises:
        ValueError, TypeError: the optimizer would refuse an option, too, or ``model`` is none of these.

    Example:
        >>> print(pagedopt.estimate("7B", param_dtype="bfloat16", device_budget="2GiB"))
    """
    if not isinstance(rule, Rule) and rule not in UPDATES:
        raise ValueError(f"rule is {rule!r}; there are {', '.join(UPDATES)}, or one of your own (@pagedopt.rule)")
    rule = rule if isinstance(rule, Rule) else UPDATES[rule]
    check_format(state_format)
    check_param_options(param_format, "nearest")
    budget = Budget.parse(device_budget)
    if budget is not device_budget:
        budget.check_unit()
    check_placement(placement, budget, host_access)
    if budget.auto:
        raise ValueError(
            "device_budget is 'auto', which is read from the device as training goes; give bytes or a share"
        )
    found = describe(model, dtype_of_name(param_dtype, "param_dtype") if isinstance(param_dtype, str) else param_dtype)
    where = torch.device(device or found.device or "cuda")
    if where.type not in ARENAS:
        raise ValueError(f"device is {str(where)!r}; there are {', '.join(ARENAS)}")
    kind = kind_of(placement, where, budget)
    rates = rates or (ASSUMED_CPU if where.type == "cpu" else ASSUMED)
    way = kind.way(host_access)
    parts = _arenas(rule, found, state_format, param_format, kind, budget)
    stay, away = (sum(part.bytes[i] for part in parts) for i in range(2))
    slot = max((slot_bytes(part.layout) for part in parts), default=0) if away and way == "staged" else 0
    near = "host" if where.type == "cpu" else "device"
    steps, floor = _moved(parts, where.type == "cpu", way, slot, away)
    seconds = _join(sum, rates, steps)
    return Estimate(
        parameters=found.parameters,
        param_bytes=found.param_bytes,
        grad_bytes=sum(numel * dtype.itemsize for numel, dtype, _ in found.trained),
        device=where.type,
        placement=kind.name,
        budget=budget.limit(sum(part.layout.nbytes for part in parts)),
        host_access=way if away else None,
        by_place=total([{near: stay}, {kind.away or near: away}]),
        ring=SLOTS * slot,
        moved=2 * away,
        seconds=seconds,
        floor=_join(max, rates, floor),
        unknown_rates=tuple(n for n in steps if getattr(rates, n) is None) if seconds is None else (),
        rates=rates,
    )


@dataclass(frozen=True)
class _ArenaPart:
    """One arena: its layout, the number of resident pages, and the bytes a step reads and writes for each element."""

    layout: Layout
    resident: int
    traffic: Width
    columns: Sequence[Column]
    no_arena: bool

    @property
    def bytes(self) -> tuple[int, int]:
        """(resident, away)"""
        if self.no_arena:  # ordinary torch tensors, without the gaps of an arena
            sizes = self.layout.numels.tolist()
            return sum(c.real.itemsize * sum(map(c.entries, sizes)) for c in self.columns), 0
        return self.layout.divided(self.resident)

    @property
    def numel(self) -> int:
        """Elements that a step updates."""
        return int(self.layout.numels.sum())

    @property
    def stays(self) -> int:
        """Elements whose state is in resident pages, or that have no state."""
        return min(self.resident * self.layout.page_numel, self.numel) if self.layout.nbytes else self.numel


def _arenas(
    rule: Rule,
    found: Described,
    state_format: StateFormat,
    param_format: ParamFormat,
    kind: type[Arena],
    budget: Budget,
) -> list[_ArenaPart]:
    """Return the arenas that a :class:`Store` would make: one for each dtype of parameters and formats, in order."""
    by_formats: dict[tuple[torch.dtype, tuple[Format, ...]], list[int]] = {}
    for numel, dtype, own in found.trained:  # kernels see complex numbers as pairs of real ones
        said, real = state_format if own is INHERITED else own, real_dtype(dtype)
        states = [State(name, numel, rule.name, rule.moments.get(name)) for name in rule.inputs[2:]]
        stored = of_parameter(param_format, "nearest", dtype)
        number = dtype if stored is None else stored.stands_for(dtype)
        forms = tuple([format_of(said, state, number) for state in states])
        if stored is not None and stored.remainder is not None:
            forms = (*forms, stored.remainder)
        for state in states:
            check_squares(said, state, dtype)
        by_formats.setdefault((real, forms), []).append(numel * (2 if dtype.is_complex else 1))
    layouts, traffic, columns = [], [], []
    for (dtype, forms), numels in by_formats.items():
        lists = [dtype.itemsize, dtype.itemsize, *(sum(c.width for c in form.columns) for form in forms)]
        written = (*rule.writes, *range(len(rule.inputs), len(lists)))  # what parameters have lost is, too
        traffic.append(sum(lists) + sum(lists[i] for i in written))
        columns.append([column for form in forms for column in form.columns])
        block = max((form.block for form in forms), default=1)
        widths = [column.width for column in columns[-1]]
        layouts.append(lay_out(numels, widths, kind.granule, kind.stretch, block=block))
    residents = divide([(kind, layout) for layout in layouts], budget)
    return [_ArenaPart(*part, kind.plain) for part in zip(layouts, residents, traffic, columns, strict=True)]


def _moved(
    parts: Sequence[_ArenaPart], on_cpu: bool, way: str, slot: int, away: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a step moves at each rate: (one after the other, if copies overlap the update fully).

    ``away`` bytes of state are away, and ``slot`` are those of the largest page, if pages are staged.
    """
    work = int(sum(part.traffic * part.numel for part in parts))
    stays = int(sum(part.traffic * part.stays for part in parts))
    if on_cpu:
        file = {"file_read": away, "file_write": away} if away else {}
        return {"ram": stays, **file}, {"ram": work, **file}
    page = min(slot, away)  # the first page arrives, and the last one leaves, while the other direction is idle
    staged = {"up": page, "down": page, "both": 2 * (away - page)}
    link = {} if not away else {"in_place": 2 * away} if way == "in_place" else staged
    return {"device": stays, **link}, {"device": work, "both": 2 * away}


def _join(join: Callable[[list[float]], float], rates: Rates, nbytes: Mapping[str, int]) -> float | None:
    """Join the seconds that bytes take at each rate; None if a rate that is needed is not known."""
    needed = {name: (n, getattr(rates, name)) for name, n in nbytes.items() if n}
    if any(rate is None for _, rate in needed.values()):
        return None
    return join([0.0, *(n / rate for n, rate in needed.values())])
