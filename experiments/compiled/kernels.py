"""How many kernels does the compiler make of an optimizer of one's own over N tensors, as a list and as a loop?

Answer: see notes/compiled_optimizer.md.

Lion and Signum, written with ``_foreach`` operators as anybody would, compiled; Lion as a loop over tensors, with
``combo_kernels`` too; and as a rule, which is one launch over a list of pointers.  Kernels are counted in traces; those
of torch's AdamW are in the part first_call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from experiments.columns import last_line
from experiments.lab import Page, Row, Rows, Run
from experiments.works.apart import rows_of
from experiments.works.first_steps import kernels_of
from experiments.works.models import Step, Work
from experiments.works.slices import combo
from pagedopt import PagedLion

LR, BETA1, BETA2 = 1e-4, 0.9, 0.99
LIMIT = 150
NEEDS_GPU = True
MEASURES = ("launch", "tables")
Tensors = list[torch.Tensor]
#: An update of parameters from gradients and momenta, in place.
Update = Callable[[Tensors, Tensors, Tensors], object]
#: Numbers of tensors by way.
Plan = dict[str, tuple[int, ...]]


def lion(params: Tensors, grads: Tensors, momenta: Tensors) -> None:
    """Lion: the sign of what lies between the momentum and the gradient."""
    update = torch._foreach_lerp(momenta, grads, 1 - BETA1)
    torch._foreach_add_(params, torch._foreach_sign(update), alpha=-LR)
    torch._foreach_lerp_(momenta, grads, 1 - BETA2)


def signum(params: Tensors, grads: Tensors, momenta: Tensors) -> None:
    """Signum: the sign of the momentum."""
    torch._foreach_lerp_(momenta, grads, 1 - BETA1)
    torch._foreach_add_(params, torch._foreach_sign(momenta), alpha=-LR)


def lion_loop(params: Tensors, grads: Tensors, momenta: Tensors) -> None:
    """Lion, tensor by tensor."""
    for p, grad, momentum in zip(params, grads, momenta, strict=True):
        p.add_(torch.lerp(momentum, grad, 1 - BETA1).sign(), alpha=-LR)
        momentum.lerp_(grad, 1 - BETA2)


LIST, LOOP, COMBOS = "Lion, _foreach", "Lion, loop", "Lion, loop with combo_kernels"
SIGNUM, RULE = "Signum, _foreach", "Lion as a rule (ours)"
UPDATES: dict[str, Update] = {LIST: lion, LOOP: lion_loop, COMBOS: lion_loop, SIGNUM: signum, RULE: lion}
ON_GPU: Plan = {
    RULE: (10, 36, 110, 1000), LIST: (10, 36, 110), LOOP: (10, 36), COMBOS: (10, 36), SIGNUM: (110,),
}  # fmt: skip
TOYS: Plan = {RULE: (2,), LIST: (2,)}


def measure(run: Run) -> Iterator[Row]:
    """A row per way and N: kernels of a call, and how far a first update is off from the eager one."""
    plan = run.size(ON_GPU, TOYS)
    cases = [(way, count) for way, counts in plan.items() for count in counts]
    yield from rows_of(run, called, str(run.device), cases, limit=LIMIT)


def lists(count: int, device: torch.device) -> tuple[Tensors, Tensors, Tensors]:
    """Parameters, gradients, momenta."""
    params = Work("own", [(64, 64)] * count).parameters(device)
    grads = [p.grad for p in params if p.grad is not None]
    return [p.detach() for p in params], grads, [torch.zeros_like(grad) for grad in grads]


def ruled(params: Tensors, grads: Tensors) -> PagedLion:
    """Ours, over these."""
    leaves = [torch.nn.Parameter(p) for p in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad
    return PagedLion(leaves, lr=LR, betas=(BETA1, BETA2))


def built(way: str, tensors: tuple[Tensors, Tensors, Tensors]) -> Step:
    """A step of ours, or a compiled update."""
    if way == RULE:
        return ruled(*tensors[:2]).step
    how: dict[str, Any] = {"options": combo()} if way == COMBOS else {}
    return partial(torch.compile(UPDATES[way], fullgraph=True, dynamic=False, **how), *tensors)


def called(device: str, cases: Sequence[tuple[str, int]]) -> Iterator[Row]:
    """The rows, of a process of its own."""
    where = torch.device(device)
    for way, count in cases:
        torch._dynamo.reset()
        row: Row = {"way": way, "count": count, "kernels": None, "error": None, "ended": None}
        tensors, right = lists(count, where), lists(count, where)
        UPDATES[way](*right)
        try:
            step = built(way, tensors)
            step()
            both = zip(tensors[0], right[0], strict=True)
            row["error"] = max(float((one - other).abs().max()) for one, other in both) / LR
            row["kernels"] = kernels_of(step)
        except Exception as error:  # a compiler's may be anything
            row["ended"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.grid("kernels over N tensors of 64 x 64", rows, "way", "count",
        lambda row: last_line()(row) or row["kernels"], "N")  # fmt: skip
    page.bar("compiled optimizers of one's own: off from eager, in updates", rows, "error", "≤ 0.001")
    page.bar("ours, launches at any N", rows.where(way=RULE), "kernels", "≤ 1")
