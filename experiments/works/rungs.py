"""The rungs of the ladder for an addition, SGD with and without momentum, and AdamW, and what each launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import pagedopt
from experiments.works import batching, contenders
from experiments.works.batching import Kernels, Limits
from experiments.works.contenders import ADAMW, COMPILED, FOREACH, FUSED, GRAPH, LOOP, MOMENTUM, SGD, Build, Family
from experiments.works.reference import Bound
from pagedopt.rules import UPDATES, Rule
from pagedopt.rules.adamw import adamw
from pagedopt.rules.elementwise import add
from pagedopt.rules.sgd import sgd, sgd_momentum
from pagedopt.tables.layout import HEADER, WORD, HostTable, batches
from pagedopt.transports.by_value import ARGUMENT_BYTES

LIST, STRUCT = "one pointer list (ours)", "ours in structs of 4 KB"
#: What torch chooses if it is told nothing.
DEFAULT = "torch, by default"
#: The added multiple.
ALPHA = -1e-3


@dataclass(frozen=True)
class Operation:
    """Something that a step may do to every parameter, on every rung.

    Attributes:
        builds: by rung; those that a GPU is needed for are in it.
        each: kernels of the loop for a tensor, on a GPU.
        on_cpu: operators of the loop for a tensor, on a CPU: the step count is a tensor there, too.
        kernels: of foreach; of the fused kernel ``fused``.
        rule: of ours.
    """

    name: str
    builds: dict[str, Build]
    each: int
    on_cpu: int
    kernels: Kernels
    fused: Kernels
    rule: Rule

    def expected(self, rung: str, numels: Sequence[int], limits: Limits) -> int | None:
        """Kernels that a rung launches on a GPU, as its text says; None where that is a compiler's choice."""
        if rung == LOOP:
            return self.each * len(numels)
        if rung == STRUCT:
            return by_value(self.rule, numels)
        foreach, fused = limits.step(numels, self.kernels), limits.step(numels, self.fused)
        return {FOREACH: foreach, DEFAULT: foreach, FUSED: fused, LIST: 1}.get(rung)

    def operators(self, rung: str, count: int) -> int | None:
        """Operators of torch that a rung calls on a CPU, whose default is the loop."""
        if rung in (LOOP, DEFAULT):
            return self.on_cpu * count
        if rung == FOREACH:
            return len(self.kernels) + (self.on_cpu > self.each)
        return len(self.fused) if rung == FUSED else 0


def by_value(rule: Rule, numels: Sequence[int]) -> int:
    """Launches of ours if the table travels in structs of 4 KB; an optimizer's has room for twice its one group."""
    table = HostTable(len(rule.inputs), numels, rule.uniform_count, sets=2 if rule.name in UPDATES else 1)
    return len(list(batches(table, (ARGUMENT_BYTES[0] - HEADER.itemsize) // WORD)))


def stepped(family: Family) -> dict[str, Build]:
    """An optimizer on every rung."""
    return {
        LOOP: contenders.theirs(family, foreach=False),
        FOREACH: contenders.theirs(family, foreach=True),
        FUSED: contenders.theirs(family, fused=True),
        DEFAULT: contenders.theirs(family),
        GRAPH: contenders.graphed(family),
        COMPILED: contenders.compiled(family),
        LIST: contenders.ours(family),
        STRUCT: contenders.ours(family, transport="struct"),
    }


def adding(run: Callable[[list[torch.Tensor], list[torch.Tensor]], object], rung: str = "") -> Build:
    """An addition of multiples of gradients, without an optimizer around it; compiled or as a graph on those rungs."""

    def build(params: list[torch.nn.Parameter]) -> Bound:
        values, grads = [p.detach() for p in params], [p.grad for p in params if p.grad is not None]
        added = torch.compile(run) if rung == COMPILED else run

        def once() -> object:
            return added(values, grads)

        return contenders.graph_of(once) if rung == GRAPH else Bound(once)

    return build


def add_each(values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """One by one."""
    for value, grad in zip(values, grads, strict=True):
        value.add_(grad, alpha=ALPHA)


def add_together(values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """In torch's foreach."""
    torch._foreach_add_(values, grads, alpha=ALPHA)


def add_by_value(values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """In ours, in structs."""
    pagedopt.multi_tensor_apply(add, [values, grads], {"alpha": ALPHA}, transport="struct")


ADD = {
    LOOP: adding(add_each),
    FOREACH: adding(add_together),
    GRAPH: adding(add_together, GRAPH),
    COMPILED: adding(add_together, COMPILED),
    LIST: adding(lambda values, grads: pagedopt.foreach_add_(values, grads, alpha=ALPHA)),
    STRUCT: adding(add_by_value),
}
OPERATIONS = (
    Operation("add", ADD, 1, 1, batching.FOREACH_SGD, (), add),
    Operation(SGD.name, stepped(SGD), 1, 1, batching.FOREACH_SGD, ((2, False),), sgd),
    Operation(MOMENTUM.name, stepped(MOMENTUM), 3, 3, batching.FOREACH_MOMENTUM, ((3, False),), sgd_momentum),
    # The fused step counts its steps on the GPU, in a launch over a list of numbers.
    Operation(ADAMW.name, stepped(ADAMW), 8, 9, batching.FOREACH_ADAMW, ((4, False), (1, False)), adamw),
)
