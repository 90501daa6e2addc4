"""How many kernels does the compiler make of an optimizer of one's own over N tensors, as a list and as a loop?

Answer: see notes/compiled_optimizer.md.

Lion and Signum, written with ``_foreach`` operators as anybody would, compiled; Lion as a loop over tensors, with
``combo_kernels`` too, and as one function mapped over lists (``foreach_map``); and as a rule, which is one launch over
a list of pointers.  Kernels are counted in traces on a GPU; on a CPU the loops that Inductor wrote.  AdamW of torch is
counted in the part first_call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from experiments.lab import Bar, Grid, Row, Run, last_line
from experiments.works.first_steps import kernels_of
from experiments.works.fresh import rows_of
from experiments.works.models import Work
from experiments.works.slices import combo
from pagedopt import PagedLion

LR, BETA1, BETA2 = 1e-4, 0.9, 0.99
LIMIT = 170
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


def lion_mapped(params: Tensors, grads: Tensors, momenta: Tensors) -> None:
    """Lion as functions of one tensor that are mapped over lists."""
    from torch._higher_order_ops.foreach_map import foreach_map

    new = foreach_map(lambda p, g, m: p - LR * torch.lerp(m, g, 1 - BETA1).sign(), params, grads, momenta)
    moved = foreach_map(lambda m, g: torch.lerp(m, g, 1 - BETA2), momenta, grads)
    torch._foreach_copy_(params, new)
    torch._foreach_copy_(momenta, moved)


LIST, LOOP, COMBOS, MAPPED = "Lion, _foreach", "Lion, loop", "Lion, loop with combo_kernels", "Lion, foreach_map"
SIGNUM, RULE = "Signum, _foreach", "Lion as a rule (ours)"
UPDATES: dict[str, Update] = {
    LIST: lion, LOOP: lion_loop, COMBOS: lion_loop, MAPPED: lion_mapped, SIGNUM: signum,
}  # fmt: skip
ON_GPU: Plan = {LIST: (1, 10, 36, 110), LOOP: (1, 10, 36), COMBOS: (1, 10, 36), MAPPED: (1, 10, 36), SIGNUM: (10, 110)}
ON_CPU: Plan = {LIST: (1, 4, 8), LOOP: (1, 4, 8), MAPPED: (4,), SIGNUM: (4,)}
#: What is compared with each; with Lion if nothing is said.
EAGER = {SIGNUM: signum}
#: Traced, and not compiled.
TOYS: Plan = {LIST: (2,)}
RULES = (1, 10, 36, 110, 1000)


def measure(run: Run) -> Iterator[Row]:
    """A row per way and N: kernels of a call, and how far a first update is off from the eager one."""
    if run.device.type == "cuda":
        for count in run.size(RULES, (2,)):
            step = ruled(*lists(count, run.device)[:2]).step
            step()
            kernels = kernels_of(step, run.device)
            yield {"way": RULE, "count": count, "device": "cuda", "kernels": kernels, "error": None, "ended": None}
    plan = run.size(ON_GPU if run.device.type == "cuda" else ON_CPU, TOYS)
    cases = [(way, count) for way, counts in plan.items() for count in counts]
    yield from rows_of(run, compiled, str(run.device), cases, run.quick, limit=LIMIT)
    if run.device.type == "cpu":
        run.left_out.append(f"{COMBOS}, launches: need a GPU")


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


def compiled(device: str, cases: Sequence[tuple[str, int]], traced: bool) -> Iterator[Row]:
    """The rows of what is compiled, of a process of its own."""
    from torch._inductor import metrics

    where = torch.device(device)
    for way, count in cases:
        torch._dynamo.reset()
        metrics.reset()
        row: Row = {"way": way, "count": count, "device": where.type, "kernels": None, "error": None, "ended": None}
        how: dict[str, Any] = {"backend": "aot_eager"} if traced else {"options": combo()} if way == COMBOS else {}
        try:
            call = partial(torch.compile(UPDATES[way], fullgraph=True, dynamic=False, **how), *lists(count, where))
            right = lists(count, where)
            for update in (call, partial(EAGER.get(way, lion), *right)):
                update()
            both = zip(call.args[0], right[0], strict=True)
            row["error"] = max(float((one - other).abs().max()) for one, other in both) / LR
            row["kernels"] = None if traced else kernels_of(call, where)
        except Exception as error:  # a compiler's may be anything
            row["ended"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row


TABLES = [
    Grid(
        lambda rows: f"kernels over N tensors of 64 x 64 on {rows[0]['device']} (on a CPU loops that Inductor wrote)",
        "way", "count", lambda row: last_line()(row) or row["kernels"], "N",
    )
]  # fmt: skip
BARS = [
    Bar("compiled optimizers of one's own: off from eager, in updates", "error", at_most=1e-3),
    Bar("ours, launches at any N", "kernels", at_most=1, way=RULE),
]
