"""One launch's share of an optimizer: parameters of one rule, device and dtypes, with their table and step counts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..apply import Sweep
from ..pointers import LayoutError, TensorList
from ..rules import Rule
from .route import route

if TYPE_CHECKING:
    from .base import PagedOptimizer

Member = tuple[torch.Tensor, int]


class Bucket:
    """Parameters that one launch updates.

    Args:
        optimizer: whose groups and state.
        rule: what to do.
        members: (parameter, index of its group).
        fresh: ids of parameters whose state was made just now, so that they have no steps behind them.
    """

    def __init__(self, optimizer: PagedOptimizer, rule: Rule, members: list[Member], fresh: set[int]) -> None:
        self.rule = rule
        self.params = [p for p, _ in members]
        self.groups = np.array([g for _, g in members], np.int64)
        states = [optimizer.state[p] for p in self.params]
        self.fixed: list[list[torch.Tensor]] = [[s[name] for s in states] for name in rule.inputs[2:]]
        self.grads: list[torch.Tensor | None] = [p.grad for p in self.params]
        self.sets = 2 * len(set(self.groups.tolist()))
        lists: list[TensorList] = [self.params, self._laid_out(self.grads), *self.fixed]
        self.route = route(optimizer.store, self.params, self.fixed)
        self.sweep = self._sweep(optimizer, lists)
        # One tensor holds all step counts, so that counting is one addition; state shows views of it.
        self.steps = torch.tensor(
            [_steps_so_far(s, id(p) in fresh) for p, s in zip(self.params, states, strict=True)], dtype=torch.float32
        )
        self._counts: npt.NDArray[np.float32] = self.steps.numpy()
        if optimizer.has_step:
            for state, step in zip(states, self.steps.unbind(), strict=True):
                state["step"] = step
        self._expected = np.full_like(self._counts, -1)
        self._absent: list[int] = []
        self._pattern: list[tuple[int, int]] = []  # (group, a row) of each set of hyperparameters
        # Views share the version counter of their base: one bump serves all state of an arena.
        bases = {id(b): b for f in self.fixed for x in f for b in [x if x._base is None else x._base]}
        self._written = [t for t in (*self.params, *bases.values()) if not t.is_inference()]
        self.grads = []

    @classmethod
    def partition(cls, optimizer: PagedOptimizer, fresh: set[int]) -> list[Bucket]:
        """Sort all parameters with state by what a launch must have in common."""
        found: dict[tuple[Any, ...], list[Member]] = {}
        for index, group in enumerate(optimizer.param_groups):
            rule = optimizer.rule_of(group)
            for p in group["params"]:
                if p.grad is None and p not in optimizer.state:
                    continue
                grad = p.dtype if p.grad is None else p.grad.dtype
                state = tuple(optimizer.state[p][name].dtype for name in rule.inputs[2:])
                found.setdefault((rule, p.device, p.dtype, grad, state), []).append((p, index))
        return [cls(optimizer, key[0], members, fresh) for key, members in found.items()]

    def _sweep(self, optimizer: PagedOptimizer, lists: list[TensorList]) -> Sweep:
        rows, shape = (self.route.rows, self.route.geometry) if self.route else (None, None)
        return Sweep(
            self.rule, lists, transport=optimizer.transport, sets=self.sets, blocks=optimizer.blocks, rows=rows,
            geometry=shape,
        )  # fmt: skip

    def refresh(self) -> None:
        """Take the addresses of parameters and gradients as they are now.

        Raises:
            ValueError, TypeError: see :meth:`PointerTable.refresh`; nothing has changed then.
        """
        self.grads = grads = [p.grad for p in self.params]
        try:
            self.sweep.refresh([self.params, grads])
        except LayoutError:
            self.grads = self._laid_out(grads)
            self.sweep.refresh([self.params, self.grads])

    def _laid_out(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients with the strides of their parameters; others are copied (autograd gives them alike)."""
        return [
            torch.empty_like(p, dtype=g.dtype).copy_(g)
            if g is not None and g.layout is torch.strided and g.shape == p.shape and g.stride() != p.stride()
            else g
            for p, g in zip(self.params, grads, strict=True)
        ]

    def run(self, optimizer: PagedOptimizer) -> None:
        """Launch the update of every parameter that has a gradient, and count the step."""
        absent = self.sweep.table.absent
        if len(absent) == len(self.params):
            return
        if absent != self._absent or not (self._counts == self._expected).all():
            self._find_pattern(optimizer, absent)
        groups, counts = optimizer.param_groups, self._counts
        scalars = [self.rule.uniforms(optimizer.scalars(groups[g], float(counts[row]) + 1)) for g, row in self._pattern]
        if self.route is None:
            self.sweep.run(scalars)
        else:
            self.sweep.compile()  # nothing may fail once pages are on their way
            with contextlib.closing(self.route.spans(self.sweep.table.host, absent)) as spans:
                self.sweep.run(scalars, spans)
        counts += 1
        written = self._written
        if absent:
            counts[absent] -= 1
            away = {id(self.params[i]) for i in absent}
            written = [t for t in written if id(t) not in away]
        self._expected[:] = counts
        torch.autograd.graph.increment_version(written)
        self.grads = []

    def _find_pattern(self, optimizer: PagedOptimizer, absent: list[int]) -> None:
        """Which rows share hyperparameters: those of one group with as many steps behind them."""
        keys = self.groups * (1 << 32) + self._counts.astype(np.int64)
        present = np.setdiff1d(np.arange(len(keys)), absent)
        _, first, inverse = np.unique(keys[present], return_index=True, return_inverse=True)
        if len(first) > self.sets:
            self._widen(optimizer, len(first))
        self._pattern = [(int(self.groups[row]), int(row)) for row in present[first]]
        self._absent = absent
        sets = np.zeros(len(keys), np.int64)
        sets[present] = inverse
        self.sweep.table.assign_sets(sets)

    def _widen(self, optimizer: PagedOptimizer, sets: int) -> None:
        """Make room for more sets of hyperparameters: parameters have begun to differ in their number of steps."""
        self.sets = 2 * sets
        lists: list[TensorList] = [self.params, self.grads, *self.fixed]
        self.sweep = self._sweep(optimizer, lists)


def _steps_so_far(state: dict[str, Any], fresh: bool) -> float:
    """The count that state holds; where a rule keeps none, state that was there before has seen a step."""
    return float(state["step"]) if "step" in state else float(not fresh)
