"""What an optimizer's state costs where it is, in words: for the log, and beside an out-of-memory error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from ...common.units import text_of_bytes, text_of_seconds
from ...paging.budget import Budget
from ...planning.estimate import Estimate, estimate
from ...system.log import log
from ...tables.shards import local
from ..state.rule_optimizer import Group, RuleOptimizer
from .members import state_tensors

#: Bytes below which state is not what fills a memory.
LITTLE = 1 << 20


def near_place(groups: Iterable[Group]) -> str:
    """Where the budget keeps state of these parameters: ``device``, or ``host`` beside a CPU."""
    return "device" if any(p.is_cuda for group in groups for p in group["params"]) else "host"


def estimated(optimizer: RuleOptimizer, budget: Budget | str | None) -> Estimate:
    """What the optimizer takes with another budget, with the rule of its first group and where it spills best.

    Times are by the rates that a budget was reckoned with, else by assumed ones, which their name says.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rule = optimizer.rule_of(optimizer.param_groups[0])
    known, form = optimizer.affordable.known, optimizer.state_format
    return estimate(params, rule=rule, state_format=form, device_budget=budget, rates=known)


def advice(optimizer: RuleOptimizer, by_place: Mapping[str, int]) -> str:
    """What a smaller budget would give back and cost, in a sentence.

    Args:
        by_place: bytes of state, as :class:`~pagedopt.MemoryReport` has them; none before there is state.
    """
    near = near_place(optimizer.param_groups)
    whole = estimated(optimizer, None)
    here = by_place.get(near, 0) if by_place else whole.state_bytes
    holds = "holds" if by_place else "will hold"
    if here < LITTLE:
        return f"the optimizer's state {holds} {text_of_bytes(here)} here: it is not what fills the memory"
    budget = _round(here // 2)
    less = estimated(optimizer, budget)
    text = f"state {holds} {text_of_bytes(here)} here; device_budget={budget!r} frees "
    text += text_of_bytes(max(0, here - less.by_place.get(near, 0)))
    if less.seconds is not None and whole.seconds is not None:
        cost = text_of_seconds(less.seconds - whole.seconds)
        text += f" and costs about {cost} a step (rates of {less.rates.machine})"
    movable = optimizer.store.moves(state_tensors(optimizer))
    return text + (f": set_device_budget({budget!r})" if movable else ", when the optimizer is made")


def _round(nbytes: int) -> str:
    """A budget of no more than so many bytes, as one writes it."""
    return f"{int(nbytes / 2**30 * 10) / 10:g}GiB" if nbytes >= 1 << 30 else f"{max(1, nbytes >> 20)}MiB"


def tell(optimizer: RuleOptimizer, why: str, before: Mapping[str, int], seconds: float) -> None:
    """Log that bytes have moved.

    Args:
        why: they did, as the call that a user made.
        before: bytes by place.
        seconds: it took, the device waited for.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    now = optimizer.store.planned(()).by_place
    moved = sum(max(0, nbytes - before.get(place, 0)) for place, nbytes in now.items())
    name = type(optimizer).__name__
    log.info(
        "%s: %s moved (%s), waited %s: %s", name, text_of_bytes(moved), why, text_of_seconds(seconds), _where(optimizer)
    )


def tell_made(optimizer: RuleOptimizer, made: Sequence[torch.Tensor] = (), by: str = "") -> None:
    """Log that state was made.

    Args:
        made: tensors that are not in ``optimizer.state`` yet.
        by: the call of a user's that made it; "" for a step.
    """
    if log.isEnabledFor(logging.INFO):
        log.info(
            "%s: state made%s (device_budget %s): %s",
            type(optimizer).__name__,
            by and f" by {by}",
            optimizer.store.budget.shown,
            _where(optimizer, made),
        )


def _where(optimizer: RuleOptimizer, made: Sequence[torch.Tensor] = ()) -> str:
    """Bytes by place, and what a step costs for them."""
    report = optimizer.store.planned([*state_tensors(optimizer), *map(local, made)])
    near = near_place(optimizer.param_groups)
    places = ", ".join(f"{text_of_bytes(nbytes)} on {place}" for place, nbytes in report.by_place.items() if nbytes)
    away = sum(nbytes for place, nbytes in report.by_place.items() if place != near)
    if not away:
        return f"{places or '0 B'} ({report.means}); a step moves nothing"
    way = "to and from the file" if near == "host" else "over the link"
    return f"{places} ({report.means}); a step now moves {text_of_bytes(2 * away)} {way}{_time(optimizer, away)}"


def _time(optimizer: RuleOptimizer, away: int) -> str:
    """How long that takes, by the rates that the budget was reckoned with, or by assumed ones."""
    try:
        with_it, without = (estimated(optimizer, budget) for budget in (Budget.leaving(away), None))
    except (ValueError, TypeError, RuntimeError):  # of a rule or format of one's own: the log is no reason to fail
        return ""
    if with_it.seconds is None or without.seconds is None:
        return ""
    return f", about {text_of_seconds(with_it.seconds - without.seconds)} (rates of {with_it.rates.machine})"


__all__ = ["advice", "near_place", "tell", "tell_made"]
