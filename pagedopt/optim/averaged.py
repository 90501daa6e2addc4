"""Parameters and their averages change places, as steps of a rule of their own over parameter and state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from ..formats.floating import AVERAGE
from ..rules import Rule, rule
from ..tables.tensors import local
from .columns import Columns
from .gather import Member, Members
from .plan import Plan, grads_of_shards
from .rule_optimizer import RuleOptimizer, occurrences


@rule
def swapped(param, grad, param_ema):  # type: ignore[no-untyped-def]
    """Each takes the other's place."""
    before = param
    param = param_ema
    param_ema = before
    return param, param_ema


@rule
def shown(param, grad, param_ema):  # type: ignore[no-untyped-def]
    """The average is shown in the place of a parameter that somebody keeps."""
    param = param_ema
    return param


class Shown:
    """Averages that are where parameters were, until :meth:`end`.

    A parameter that has no average, for want of a gradient, stays.  One whose average is in another dtype would lose
    part of it in its place: such a parameter is copied, and its average is, too.

    Raises:
        as a step.
    """

    def __init__(self, optimizer: RuleOptimizer) -> None:
        params = [p for _, _, p in occurrences(optimizer) if AVERAGE in (optimizer.state.get(p) or {})]
        self._rules = {p: swapped if optimizer.state[p][AVERAGE].dtype is p.dtype else shown for p in params}
        self._kept = {p: p.detach().clone() for p, by in self._rules.items() if by is shown}
        _carry_out(optimizer, self._rules)

    def end(self, optimizer: RuleOptimizer) -> None:
        """Put the parameters back where they were.  Raises as a step."""
        # The other way around: of parameters that share memory the last one was the last to be shown.
        _carry_out(optimizer, {p: by for p, by in self._rules.items() if by is swapped}, backwards=True)
        with torch.no_grad():
            for p, values in self._kept.items():
                p.copy_(values)


def _carry_out(optimizer: RuleOptimizer, rules: Mapping[torch.Tensor, Rule], backwards: bool = False) -> None:
    """Take a step of these rules, each parameter once; it is not counted."""
    found, params = {}, []
    for index, (group, said, p) in enumerate(occurrences(optimizer)):
        params.append(p)
        if p in rules and p not in found:
            columns = Columns.of(optimizer, [AVERAGE], p, said)
            entry = {key: optimizer.state[p][key] for key in columns}
            found[p] = Member(p, group, rules[p], (), entry, columns, index, local(p))
    if not found:
        return
    lengths = tuple([len(group["params"]) for group in optimizer.param_groups])
    members = Members([*found.values()], [], tuple(params), lengths, ())
    with _as_gradients([*found]):
        shards = grads_of_shards(optimizer, None, None)
        plan, now, ready = Plan.of(optimizer, members, lambda *_: False, None, shards)
        step = plan.prepare(optimizer, now, ready, shards)
        step._replace(work=step.work[::-1] if backwards else step.work).run()


@contextlib.contextmanager
def _as_gradients(params: list[torch.Tensor]) -> Iterator[None]:
    """A ``with`` block in which parameters are their own gradients, for rules that read none: a step skips parameters
    without one."""
    before = [p.grad for p in params]
    try:
        for p in params:
            p.grad = p.detach()
        yield
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad
