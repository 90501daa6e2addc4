"""Room for state: out-of-memory errors with advice, and what state occupies and costs, in words."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..common.units import text_of_bytes, text_of_seconds
from ..paging.budget import Budget
from ..system.warn import log
from ..tables.tensors import local
from .rule_optimizer import Group, RuleOptimizer, state_tensors

if TYPE_CHECKING:
    from ..planning.estimate import Estimate

#: State of fewer bytes is not what fills a memory.
LITTLE = 1 << 20


def _near_place(groups: Iterable[Group]) -> str:
    """Return where resident state of these parameters lies: ``device``, or ``host`` for parameters on a CPU."""
    return "device" if any(p.is_cuda for group in groups for p in group["params"]) else "host"


def estimated(optimizer: RuleOptimizer, budget: Budget | str | None) -> Estimate:
    """Estimate the optimizer with another budget, by assumed rates, the rule of its first group and its best way."""
    from ..planning.estimate import estimate  # here: a step without new state does not need it

    rule = optimizer.update_of(optimizer.param_groups[0])
    return estimate(
        optimizer.param_groups, rule=rule, state_format=optimizer.state_format, param_format=optimizer.param_format,
        device_budget=budget,
    )  # fmt: skip


def advice(optimizer: RuleOptimizer, by_place: Mapping[str, int]) -> str:
    """Return in words what a smaller budget frees and costs; ``by_place`` is empty before there is state."""
    near = _near_place(optimizer.param_groups)
    whole = estimated(optimizer, None)
    here = by_place.get(near, 0) if by_place else whole.state_bytes
    holds = "holds" if by_place else "will hold"
    if here < LITTLE:
        return f"the optimizer's state {holds} {text_of_bytes(here)} here: it is not what fills the memory"
    budget = _round(here // 2)
    less = estimated(optimizer, budget)
    freed = text_of_bytes(max(0, here - less.by_place.get(near, 0)))
    text = f"state {holds} {text_of_bytes(here)} here; device_budget={budget!r} frees {freed}"
    cost, machine = _cost(less, whole)
    text += f" and costs about {cost} a step (rates of {machine})"
    movable = optimizer.store.moves(state_tensors(optimizer))
    return text + (f": set_device_budget({budget!r})" if movable else ", when the optimizer is made")


def _cost(less: Estimate, whole: Estimate) -> tuple[str, str]:
    """Return how much longer a step takes with ``less`` on the device, and by whose rates."""
    return text_of_seconds((less.seconds or 0.0) - (whole.seconds or 0.0)), less.rates.machine  # assumed ones lack none


def _round(nbytes: int) -> str:
    """Return at most ``nbytes`` as a budget that a person would write."""
    return f"{int(nbytes / 2**30 * 10) / 10:g}GiB" if nbytes >= 1 << 30 else f"{max(1, nbytes >> 20)}MiB"


def tell(optimizer: RuleOptimizer, why: str, before: Mapping[str, int], seconds: float) -> None:
    """Log that the call ``why`` moved state in ``seconds``; ``before`` has the bytes by place before the call."""
    if not log.isEnabledFor(logging.INFO):
        return
    now = optimizer.store.planned(()).by_place
    moved = text_of_bytes(sum(max(0, nbytes - before.get(place, 0)) for place, nbytes in now.items()))
    name, waited = type(optimizer).__name__, text_of_seconds(seconds)
    log.info("%s: %s moved (%s), waited %s: %s", name, moved, why, waited, _where(optimizer))


def tell_made(optimizer: RuleOptimizer, made: Sequence[torch.Tensor] = (), by: str = "") -> None:
    """Log that a step, or the user's call ``by``, has made state; ``optimizer.state`` may still lack ``made``."""
    if log.isEnabledFor(logging.INFO):
        name, budget = type(optimizer).__name__, optimizer.store.budget.shown
        where = _where(optimizer, made)
        log.info("%s: state made%s (device_budget %s): %s", name, by and f" by {by}", budget, where)


def _where(optimizer: RuleOptimizer, made: Sequence[torch.Tensor] = ()) -> str:
    """Return bytes by place and what a step moves for them, in words."""
    report = optimizer.store.planned([*state_tensors(optimizer), *map(local, made)])
    near = _near_place(optimizer.param_groups)
    places = ", ".join(f"{text_of_bytes(nbytes)} on {place}" for place, nbytes in report.by_place.items() if nbytes)
    away = sum(nbytes for place, nbytes in report.by_place.items() if place != near)
    if not away:
        return f"{places or '0 B'} ({report.means}); a step moves nothing"
    text = f"{places} ({report.means}); a step now moves {text_of_bytes(2 * away)} "
    text += "to and from the file" if near == "host" else "over the link"
    try:
        whole = estimated(optimizer, None)
        cost, machine = _cost(estimated(optimizer, Budget(max(0, whole.state_bytes - away))), whole)
    except (ValueError, TypeError, RuntimeError):  # from a user's own rule or format: logging must not fail for it
        return text
    return f"{text}, about {cost} (rates of {machine})"


#: Part of the message of the RuntimeError that torch's CPU allocator raises.
HOST_IS_FULL = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory of a device or of the host ran out."""
    host = isinstance(error, RuntimeError) and HOST_IS_FULL in str(error)
    return host or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def advise(error: BaseException, optimizer: RuleOptimizer, before: str = "") -> None:
    """Add a note to ``error``: ``before``, then the bytes of state, and what a smaller budget frees and costs."""
    with contextlib.suppress(Exception):  # a failure here must not replace the error that the user has to see
        error.add_note(before + advice(optimizer, optimizer.store.report(state_tensors(optimizer)).by_place))
