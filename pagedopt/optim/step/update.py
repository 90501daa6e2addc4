"""One launch of a step, as a value: what it reads and writes, with which hyperparameters, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...launch.route import Route
from ...launch.sweep import Sweep
from ...paging.visits import Action
from ...placements.arena import Arena
from ...tables.columns import Tensors
from ..state.scalar_state import Numerals, ScalarState, Values
from .hyperparameters import Uniforms
from .kernel_views import KernelViews

#: A number of each parameter: which it is, its tensors, and what it becomes.
Count = tuple[ScalarState, Numerals, Values | float]


class Update(NamedTuple):
    """One launch, or one of the part at hand and one for each page that visits the device.

    It keeps alive what it reads and writes, until it is dropped.  Nothing has changed before :meth:`launch`.

    Attributes:
        sweep: the rule, and the table that says where the tensors lie, with which hyperparameters.
        ready: the kernel, compiled for them.
        stamp: the table's when this was prepared.
        lists: how kernels see the tensors.
        tensors: parameters, gradients (None: absent), and where they are needed state, list by list.
        seen: parameters and gradients as kernels see them.
        absent: the parameters that take no step, for want of a gradient.
        counts: what is counted.
        sets: hyperparameters, and numbers that follow from them, of each set that is in use.
        route: of its rows through pages; None: all lie where they are used.
        plan: launches and visits of pages, in their order.
        written: tensors whose version counters go up.
    """

    sweep: Sweep
    ready: Any
    stamp: int
    lists: KernelViews
    tensors: Tensors
    seen: Tensors
    absent: list[int]
    counts: tuple[Count, ...]
    sets: Uniforms
    route: Route | None
    plan: Sequence[Action]
    written: Numerals

    def launch(self, arenas: Sequence[Arena]) -> None:
        """Launch it on the current stream, and count it.

        Args:
            arenas: of state, by the numbers that the plan names.
        """
        if not self.lists.plain:
            self.lists.fill(self.tensors)
        mover = None if self.route is None else self.route.mover(arenas)
        self.sweep.launch(None, self.plan, mover, ready=self.ready)
        if not self.lists.plain:
            self.lists.bring_back(self.tensors)
        for numbers, tensors, coming in self.counts:
            numbers.write(tensors, coming, self.absent)
        torch.autograd.graph.increment_version(self.written)
