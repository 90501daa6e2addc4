"""What makes a compiled step compile again, and what does it do when it has done so too often?

Answer: see notes/compiled_optimizer.md.

Twelve steps of AdamW over two tensors, with a change before each but the first.  Counted are the graphs that Dynamo
hands to its back end, and the steps that run in one: the others are eager.  Which changes need a new graph is Dynamo's
to say, so the back end is ``aot_eager``, which writes no kernels.  Of ours, kernels made for a step are counted.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from experiments.columns import last_line
from experiments.lab import Page, Row, Rows, Run
from experiments.works.apart import rows_of
from experiments.works.models import HYPER, Work
from pagedopt import PagedAdamW
from pagedopt.kernels import cpu, cuda

MEASURES = ("optim",)
STEPS, LIMIT = 12, 150
LR, MOVED, MISSING = "lr", "gradients in other memory", "a gradient is missing, every other step"
GROUP, LOADED, NOTHING = "a new group", "loaded state", "nothing"
FOREACH, OURS = "foreach, lr a float", "ours, lr a float"
#: Name → the class and its options; an lr of None is a tensor.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    FOREACH: (torch.optim.AdamW, {**HYPER, "foreach": True}),
    "foreach, lr a tensor": (torch.optim.AdamW, {"lr": None, "foreach": True}),
    "foreach, lr a tensor, capturable": (torch.optim.AdamW, {"lr": None, "foreach": True, "capturable": True}),
    "loop, lr a float": (torch.optim.AdamW, {**HYPER, "foreach": False}),
    "loop, lr a tensor": (torch.optim.AdamW, {"lr": None, "foreach": False}),
    OURS: (PagedAdamW, HYPER),
    "ours, lr a tensor": (PagedAdamW, {"lr": None}),
}
#: Every way has its lr changed; other changes are for foreach and for ours.
CASES = [(way, LR) for way in WAYS] + [
    (way, what) for what in (NOTHING, MOVED, MISSING, GROUP, LOADED) for way in (FOREACH, OURS)
]
TOYS = [(FOREACH, LR), (OURS, LR)]
#: What ours keeps kernels in.
KERNELS = [found for module in (cpu, cuda) for found in vars(module).values() if hasattr(found, "cache_info")]


def measure(run: Run) -> Iterator[Row]:
    """A row per way and change: graphs made until after each step, and steps run in one."""
    yield from rows_of(run, changed, str(run.device), *run.size((CASES, STEPS), (TOYS, 2)), limit=LIMIT)


def parameters(device: torch.device, count: int) -> list[torch.nn.Parameter]:
    """So many of (4, 4)."""
    return Work("recompiled", [(4, 4)] * count).parameters(device)


def changed(device: str, cases: Sequence[Sequence[str]], steps: int) -> Iterator[Row]:
    """The rows, of a process of its own; what torch refuses has none but the reason."""
    where = torch.device(device)
    for way, what in cases:
        cls, options = WAYS[way]
        lr = torch.tensor(1e-3, device=where) if options["lr"] is None else options["lr"]
        found: Row = {"by_step": None, "ended": None}
        try:
            found |= watched(cls(parameters(where, 2), **{**options, "lr": lr}), what, steps)
        except Exception as error:  # a compiler's may be anything
            found["ended"] = f"{type(error).__name__}: {error}"
        yield {"way": way, "change": what, "device": where.type, "steps": steps, **found}


def change(optimizer: torch.optim.Optimizer, what: str, i: int) -> None:
    """What is done before the step of this number."""
    group, once = optimizer.param_groups[0], i == STEPS // 2
    params, lr = group["params"], 1e-3 / (1 + i)
    if what == LR:
        group["lr"] = group["lr"].fill_(lr) if torch.is_tensor(group["lr"]) else lr
    elif what == MOVED:
        for p in params:
            p.grad = p.detach().clone()
    elif what == MISSING:
        params[-1].grad = None if i % 2 else torch.ones_like(params[-1])
    elif what == GROUP and once:
        optimizer.add_param_group({"params": parameters(params[0].device, 1)})
    elif what == LOADED and once:
        optimizer.load_state_dict(optimizer.state_dict())


def compiled(optimizer: torch.optim.Optimizer, counts: Counter[str]) -> Callable[[], object]:
    """A compiled step that counts graphs made, and calls of one."""
    from torch._dynamo.backends.registry import lookup_backend

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graph = lookup_backend("aot_eager")(module, inputs)
        counts["made"] += 1

        def call(*arguments: Any) -> Any:
            counts["ran"] += 1
            return graph(*arguments)

        return call

    @torch.compile(backend=backend)
    def step() -> None:
        optimizer.step()

    torch._dynamo.reset()
    return step


def ours(optimizer: torch.optim.Optimizer, counts: Counter[str]) -> Callable[[], object]:
    """A step of ours that counts kernels made: all that it takes, whatever this process made before."""
    for cache in KERNELS:
        cache.cache_clear()

    def step() -> None:
        optimizer.step()
        counts["made"] = sum(cache.cache_info().misses for cache in KERNELS)
        counts["ran"] += 1

    return step


def watched(optimizer: torch.optim.Optimizer, what: str, steps: int) -> Row:
    """Graphs made until after each step, steps run in one, why the last one was made, and warnings."""
    counts, by_step = Counter[str](), list[int]()
    step = (ours if isinstance(optimizer, PagedAdamW) else compiled)(optimizer, counts)
    with contextlib.redirect_stderr(heard := io.StringIO()):  # where the handler that is made now writes to
        torch._logging.set_logs(recompiles=True)
        for i in range(steps):
            if i:
                change(optimizer, what, i)
            step()
            by_step.append(counts["made"])
        torch._logging.set_logs()
    reasons = re.findall(r"- \d+/\d+: (.+?)(?:\s{2,}#|\n|$)", heard.getvalue())
    warned = heard.getvalue().count("hit config.recompile_limit")
    return {"by_step": by_step, "ran": counts["ran"], "reason": reasons[-1] if reasons else None, "warned": warned}


def derive(rows: Rows) -> Rows:
    """Graphs made after the first step, and steps that ran in none."""
    found = Rows()
    for row in rows:
        made = row["by_step"]
        counts = {"again": made[-1] - made[0], "eager": row["steps"] - row["ran"]} if made else {}
        found.append({**row, **counts, "is_ours": row["way"].startswith("ours")})
    return found


def of_ours(rows: Rows) -> str | None:
    """How many kernels ours has made in how many such runs."""
    made = [row["again"] for row in rows.where(is_ours=True) if "again" in row]
    return f"Ours, in {len(made)} such runs: {sum(made)} kernels made after the first step." if made else None


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, and what is held to a limit."""
    page.table("{steps} steps of AdamW over two tensors on {device}, with a change before each but the first",
        rows.where(is_ours=False), {"step": "way", "what changes": "change", "made again": "again",
        "steps run eagerly": "eager",
        "why": lambda row: last_line()(row) or row["reason"] or ""})  # fmt: skip
    page.say(of_ours(rows))
    page.bar("ours: kernels made after the first step, whatever changes", rows.where(is_ours=True), "again", "≤ 0")
