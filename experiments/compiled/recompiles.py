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
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from experiments.lab import Bar, Row, Rows, Run, Table, last_line, series
from experiments.works.fresh import rows_of
from experiments.works.models import HYPER, Work
from pagedopt import PagedAdamW

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
    OURS: (PagedAdamW, {**HYPER}),
    "ours, lr a tensor": (PagedAdamW, {"lr": None}),
}
#: Every way has its lr changed; other changes are for foreach and for ours.
CASES = [(way, LR) for way in WAYS] + [
    (way, what) for what in (NOTHING, MOVED, MISSING, GROUP, LOADED) for way in (FOREACH, OURS)
]
TOYS = [(FOREACH, LR), (OURS, LR)]


def measure(run: Run) -> Iterator[Row]:
    """A row per way and change: graphs made by each step, steps run in one, how long those took that made one (µs)."""
    for row in rows_of(run, changed, str(run.device), *run.size((CASES, STEPS), (TOYS, 2)), limit=LIMIT):
        yield row
        if row["ended"]:
            run.left_out.append(f"{row['way']}: {row['ended']}")


def parameters(device: torch.device, count: int) -> list[torch.nn.Parameter]:
    """So many of (4, 4)."""
    return Work("recompiled", [(4, 4)] * count).parameters(device)


def changed(device: str, cases: Sequence[Sequence[str]], steps: int) -> Iterator[Row]:
    """The rows, of a process of its own."""
    where = torch.device(device)
    for way, what in cases:
        about = {"way": way, "change": what, "device": where.type, "clock": "wall", "steps": steps, "ended": None}
        cls, options = WAYS[way]
        try:
            lr = torch.tensor(1e-3, device=where) if options["lr"] is None else options["lr"]
            yield {**about, **watched(Counted(cls(parameters(where, 2), **{**options, "lr": lr})), what, steps)}
        except Exception as error:  # torch refuses some ways, and a compiler's may be anything
            nothing: Row = dict.fromkeys(("by_step", "ran", "compiling", "reason", "warned"))
            yield {**about, **nothing, "ended": f"{type(error).__name__}: {error}"}


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


class Counted:
    """A step, compiled if it is not ours, that counts graphs (of ours: kernels) made, and steps run in one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        from pagedopt.kernels import cpu, cuda

        torch._dynamo.reset()
        self.optimizer, self.graphs, self.ran = optimizer, 0, 0
        self.is_ours = isinstance(optimizer, PagedAdamW)
        self._caches: list[Any] = [found for module in (cpu, cuda) for found in vars(module).values()
                                   if hasattr(found, "cache_info")]  # fmt: skip
        for cache in self._caches:  # a process makes none that it already has
            cache.cache_clear()

        @torch.compile(backend=self.backend)
        def step() -> None:
            optimizer.step()

        self._compiled = step

    def step(self) -> None:
        """What a user calls."""
        if self.is_ours:
            self.optimizer.step()
            self.ran += 1
        else:
            self._compiled()

    @property
    def made(self) -> int:
        """So far."""
        return sum(cache.cache_info().misses for cache in self._caches) if self.is_ours else self.graphs

    def backend(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """``aot_eager``, listened to."""
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend("aot_eager")(module, inputs)
        self.graphs += 1

        def call(*arguments: Any) -> Any:
            self.ran += 1
            return compiled(*arguments)

        return call


def watched(counted: Counted, what: str, steps: int) -> Row:
    """Graphs made until after each step, steps run in one, times of steps that made one, why one was, warnings."""
    by_step: list[int] = []
    compiling: list[float] = []
    with contextlib.redirect_stderr(heard := io.StringIO()):  # where the handler that is made now writes to
        torch._logging.set_logs(recompiles=True)
        for i in range(steps):
            if i:
                change(counted.optimizer, what, i)
            begin = time.perf_counter()
            counted.step()
            if by_step and counted.made > by_step[-1]:
                compiling.append((time.perf_counter() - begin) * 1e6)
            by_step.append(counted.made)
        torch._logging.set_logs()
    reasons = re.findall(r"- \d+/\d+: (.+?)(?:\s{2,}#|\n|$)", heard.getvalue())
    warned = heard.getvalue().count("hit config.recompile_limit")
    times = series(compiling, "wall") if compiling else None
    found = {"by_step": by_step, "ran": counted.ran, "compiling": times}
    return {**found, "reason": reasons[-1] if reasons else None, "warned": warned}


def derive(rows: Rows) -> Rows:
    """Graphs made after the first step, and steps that ran in none."""
    found = Rows()
    for row in rows:
        made = row["by_step"]
        again, eager = (None, None) if made is None else (made[-1] - made[0], row["steps"] - row["ran"])
        found.append({**row, "again": again, "eager": eager, "is_ours": row["way"].startswith("ours")})
    return found


TABLES = [
    Table("{steps} steps of AdamW over two tensors on {device}, with a change before each but the first", columns={
        "step": "way", "what changes": "change", "made again": "again", "steps run eagerly": "eager",
        "warnings": "warned", "a step that compiles, µs": "compiling",
        "why": lambda row: row["reason"] or last_line()(row),
    })
]  # fmt: skip
BARS = [Bar("ours: kernels made after the first step, whatever changes", "again", at_most=0, is_ours=True)]
