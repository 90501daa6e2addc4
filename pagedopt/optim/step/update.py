"""What a step does with one bucket, as a value: launches, tensors, hyperparameters, numbers that change."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from ...launch.route import Route
from ...launch.staged_graph import StagedGraph
from ...launch.sweep import Sweep
from ...paging.visits import Action
from ...placements.arena import Arena
from ...tables.columns import Tensors
from ..state.scalar_state import NumberTensors
from .host_numbers import Count
from .hyperparameters import Uniforms
from .kernel_views import KernelViews


class Update(NamedTuple):
    """One launch over all rows; or, if state is away, one for the rows at hand and one per page that visits the device.

    It keeps alive what it reads and writes until it is dropped.  Nothing changes before :meth:`launch`.

    Attributes:
        sweep: the rule and its pointer table.
        ready: the compiled kernel.
        stamp: the table's stamp when this was prepared.
        lists: how kernels see the tensors.
        tensors: parameters, gradients (None: absent) and, if needed, state, list by list.
        seen: parameters and gradients as kernels see them; kept alive for the launch.
        absent: parameters that take no step because they have no gradient.
        counts: the numbers that change.
        sets: the numbers of each set of hyperparameters in use.
        route: of the rows through pages; None: all state is updated where it lies.
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
    written: NumberTensors

    def launch(self, arenas: Sequence[Arena]) -> None:
        """Launch on the current stream, and count the step; a move's ``arena`` is an index in ``arenas``."""
        if self.lists.direct and self.route is not None:
            self.route.launch(self.sweep, self.plan, arenas, self.ready)
        elif self.lists.direct:
            self.sweep.launch(None, self.plan, ready=self.ready)
        else:
            for _ in self.passes(arenas):
                pass
        self.write_numbers()

    def passes(self, arenas: Sequence[Arena], whole: bool = False) -> Generator[None]:
        """Launch, and yield behind each launch (see :meth:`Sweep.passes`); the step is not counted.

        Args:
            arenas: see :meth:`launch`.
            whole: launch as a graph does, which moves all pages.
        """
        if not self.lists.direct:
            self.lists.fill(self.tensors)
        mover = None if self.route is None else self.route.mover(arenas)
        plan = self.route.whole_plan(self.sweep.table.host) if whole and self.route is not None else self.plan
        self.sweep.begun = False
        yield from self.sweep.passes(plan, mover, self.ready)
        if not self.lists.direct:
            self.lists.bring_back(self.tensors)

    def graph(self, arenas: Sequence[Arena]) -> StagedGraph | None:
        """Return a graph that carries it out, with an event behind each launch; None: it goes call by call."""
        return None if self.route is None else self.route.graph(self.sweep, arenas, self.ready, fenced=True)

    def check_slots(self) -> None:
        """Raise SlotsInUse if pages cannot be moved now."""
        if self.route is not None:
            self.route.store.ring(self.route.device).check()

    def launch_graph(self, graph: StagedGraph) -> bool:
        """Launch it; or launch nothing, as the driver refuses, and return False."""
        assert self.route is not None, "it has a graph"
        return self.route.launch_graph(self.sweep, graph)

    def rows_by_launch(self, whole: bool = False) -> Sequence[Sequence[int]]:
        """Return, for each launch, the indices of the parameters that it updates; some may have no gradient.

        Args:
            whole: of the launches of a graph, which moves all pages.
        """
        if self.route is None:
            return [range(len(self.seen) // 2)]
        return self.route.params_by_launch(whole)

    def write_numbers(self) -> None:
        """Write numbers that change, as the step count is, and raise version counters."""
        for numbers, tensors, coming in self.counts:
            numbers.write(tensors, coming, self.absent)
        torch.autograd.graph.increment_version(self.written)
