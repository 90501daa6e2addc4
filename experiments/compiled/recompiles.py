"""What makes a compiled step compile again, and what does it do when it has done so too often?

Answer: see notes/compiled_optimizer.md.

Twelve steps of AdamW over two tensors, with a change before each but the first.  Counted are the graphs that Dynamo
hands to its back end, and the steps that run in one: the others are eager.  Which changes need a new graph is Dynamo's
to say, so the back end is ``aot_eager``, which writes no kernels.  Of ours, kernels are counted that are made for a step.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from experiments.lab import Bar, Row, Rows, Run, Table, last_line, series
from experiments.works.fresh import rows_of
from experiments.works.models import HYPER, Work
from pagedopt import PagedAdamW

STEPS, LIMIT = 12, 150
Params = list[torch.nn.Parameter]
Optimizer = torch.optim.Optimizer
#: What is done to an optimizer before its step of this number.
Change = Callable[[Optimizer, int], None]


def parameters(device: torch.device, count: int = 2) -> Params:
    """So many of (4, 4)."""
    return Work("recompiled", [(4, 4)] * count).parameters(device)


def of(optimizer: Optimizer) -> Params:
    """Parameters of its first group."""
    found: Params = optimizer.param_groups[0]["params"]
    return found


def another_lr(optimizer: Optimizer, i: int) -> None:
    """Warm up: another one for every step, in its tensor if it is one."""
    group = optimizer.param_groups[0]
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(1e-3 / (1 + i))
    else:
        group["lr"] = 1e-3 / (1 + i)


def new_gradients(optimizer: Optimizer, i: int) -> None:
    """In other memory."""
    for p in of(optimizer):
        p.grad = p.detach().clone()


def missing_gradient(optimizer: Optimizer, i: int) -> None:
    """Every other step the last one has none."""
    last = of(optimizer)[-1]
    last.grad = None if i % 2 else torch.ones_like(last)


def new_group(optimizer: Optimizer, i: int) -> None:
    """Once."""
    if i == STEPS // 2:
        optimizer.add_param_group({"params": parameters(of(optimizer)[0].device, 1)})


def loaded_state(optimizer: Optimizer, i: int) -> None:
    """Once, its own."""
    if i == STEPS // 2:
        optimizer.load_state_dict(optimizer.state_dict())


CHANGES: dict[str, Change] = {
    "nothing": lambda optimizer, i: None,
    "lr": another_lr,
    "gradients in other memory": new_gradients,
    "a gradient is missing, every other step": missing_gradient,
    "a new group": new_group,
    "loaded state": loaded_state,
}
FOREACH, OURS = "foreach, lr a float", "ours, lr a float"
#: Name → what makes the optimizer of parameters and a tensor with the learning rate.
WAYS: dict[str, Callable[[Params, torch.Tensor], Optimizer]] = {
    FOREACH: lambda params, lr: torch.optim.AdamW(params, **HYPER, foreach=True),
    "foreach, lr a tensor": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
    "foreach, lr a tensor, capturable": lambda params, lr: torch.optim.AdamW(
        params, lr=lr, foreach=True, capturable=True
    ),
    "loop, lr a float": lambda params, lr: torch.optim.AdamW(params, **HYPER, foreach=False),
    "loop, lr a tensor": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=False),
    OURS: lambda params, lr: PagedAdamW(params, **HYPER),
    "ours, lr a tensor": lambda params, lr: PagedAdamW(params, lr=lr),
}
#: Every way has its lr changed; other changes are for lr a float in foreach, and for ours.
CASES = [(way, "lr") for way in WAYS] + [(way, name) for name in CHANGES if name != "lr" for way in (FOREACH, OURS)]
TOYS = [(FOREACH, "lr"), (OURS, "lr")]


def measure(run: Run) -> Iterator[Row]:
    """A row per way and change: graphs made by each step, steps run in one, how long those took that made one (µs)."""
    cases, count = run.size((CASES, STEPS), (TOYS, 3))
    found = list(rows_of(run, changed, str(run.device), cases, count, limit=LIMIT))
    yield from found
    for row in found:
        if row["ended"]:
            run.left_out.append(f"{row['way']}: {row['ended']}")


def changed(device: str, cases: Sequence[Sequence[str]], steps: int) -> Iterator[Row]:
    """The rows, of a process of its own."""
    where = torch.device(device)
    for way, change in cases:
        about = {"way": way, "change": change, "device": where.type, "clock": "wall", "steps": steps}
        nothing: Row = dict.fromkeys(("by_step", "ran", "compiling", "reason", "warned"))
        try:
            optimizer = WAYS[way](parameters(where), torch.tensor(1e-3, device=where))
            counted = Made(where) if isinstance(optimizer, PagedAdamW) else Graphs()
            yield {**about, "ended": None, **watched(optimizer, counted, CHANGES[change], steps)}
        except (RuntimeError, ValueError, NotImplementedError) as error:  # torch refuses some ways
            yield {**about, **nothing, "ended": f"{type(error).__name__}: {error}"}


class Graphs:
    """Counts the graphs that Dynamo makes, and the calls of them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.made = self.ran = 0

    def step_of(self, optimizer: Optimizer) -> Callable[[], object]:
        """What a user calls."""

        @torch.compile(backend=self.backend)
        def step() -> None:
            optimizer.step()

        return step

    def backend(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """``aot_eager``, listened to."""
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend("aot_eager")(module, inputs)
        self.made += 1

        def call(*arguments: Any) -> Any:
            self.ran += 1
            return compiled(*arguments)

        return call


class Made:
    """Counts the kernels that ours makes; none is compiled again that a process already has."""

    def __init__(self, device: torch.device) -> None:
        from pagedopt.kernels import cpu, cuda

        module = cuda if device.type == "cuda" else cpu
        self._caches: list[Any] = [found for found in vars(module).values() if hasattr(found, "cache_info")]
        for cache in self._caches:
            cache.cache_clear()
        self.ran = 0

    @property
    def made(self) -> int:
        """So far."""
        return sum(cache.cache_info().misses for cache in self._caches)

    def step_of(self, optimizer: Optimizer) -> Callable[[], object]:
        """Its step, each of which runs in a kernel."""

        def step() -> None:
            optimizer.step()
            self.ran += 1

        return step


def watched(optimizer: Optimizer, counted: Graphs | Made, change: Change, steps: int) -> Row:
    """Graphs or kernels made after each step, steps run in them, times of steps that made one, why the last was made."""
    step, by_step, compiling, heard = counted.step_of(optimizer), [], [], io.StringIO()
    with contextlib.redirect_stderr(heard):  # where the handler that is made now writes to
        torch._logging.set_logs(recompiles=True)
        for i in range(steps):
            if i:
                change(optimizer, i)
            before, begin = counted.made, time.perf_counter()
            step()
            if i and counted.made > before:
                compiling.append((time.perf_counter() - begin) * 1e6)
            by_step.append(counted.made)
        torch._logging.set_logs()
    warned = heard.getvalue().count("hit config.recompile_limit")
    reasons = re.findall(r"- \d+/\d+: (.+?)(?:\s{2,}#|\n|$)", heard.getvalue())
    times = series(compiling, "wall") if compiling else None
    reason = reasons[-1] if reasons else None
    return {"by_step": by_step, "ran": counted.ran, "compiling": times, "reason": reason, "warned": warned}


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
        "step": "way", "what changes": "change", "made again": "again", "steps run eagerly": "eager", "warnings": "warned",
        "a step that compiles, µs": "compiling", "why": lambda row: row["reason"] or last_line()(row),
    })
]  # fmt: skip
BARS = [Bar("ours: kernels made after the first step, whatever changes", "again", at_most=0, is_ours=True)]
