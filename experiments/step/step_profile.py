"""Where does the host time of one step() that looks in Python go?

Answer (H200's host, 2026-11): of 497 µs for 1,000 tensors, 54 fetch gradients, 217 look at addresses and layouts, 81
count versions, 15 launch.

The pieces of ``PagedAdamW.step()`` with ``PAGEDOPT_LOOK=python``, which is the long way, over 148, 1,000 and 5,000
small tensors of which nothing changed, each timed alone in a warm loop, beside torch's fused step.  Every look at a
tensor from Python is a call of its own, so such a step cannot cost less than a handful of calls per tensor.  A compiled
look has no pieces that can be called from here: ``step_host`` times it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.lab import Case, Page, Row, Rows, Run
from experiments.step.step_host import looking_in_python
from pagedopt import PointerTable

MEASURES = ("launch", "tables", "optim")


class _Nothing(torch.optim.Optimizer):
    """What torch's own wrapper around ``step`` costs."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def measure(run: Run) -> Iterator[Row]:
    """A row per count and piece, with its host time (µs)."""
    run.rounds, run.seconds = run.size((200, 0.5), (10, 0.1))
    for count in run.each(run.size((148, 1000, 5000), (10, 20))):
        for name, piece in pieces(count, run.device).items():  # one at a time: caches as warm as they get
            host = run.host([Case(name, piece)])[name]
            yield {"count": count, "device": run.device.type, "piece": name, "host": host}
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)


def pieces(count: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name → what to time, for ``count`` parameters of 16 elements."""
    params = [torch.nn.Parameter(torch.randn(16, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer, fused = looking_in_python([{"params": params}]), torch.optim.AdamW(params, fused=True)
    optimizer.step()
    fused.step()
    assert optimizer._plan is not None
    (launch,) = optimizer._plan.launches
    written = optimizer._prepare().work[0].written
    sweep, group = launch.sweep, optimizer.param_groups[0]
    grads = [p.grad for p in params]
    tables = PointerTable([params]), PointerTable([grads])
    step = [1.0]

    def run() -> None:
        step[0] += 1
        (beta1, beta2), given = group["betas"], {name: group[name] for name in ("lr", "eps", "weight_decay")}
        sweep.run([launch.rule.uniforms({**given, "beta1": beta1, "beta2": beta2, "step": step[0]})])

    return {
        "step(), whole, looking in Python": optimizer.step,
        "torch fused, whole": fused.step,
        "torch's wrapper around step()": _Nothing(params, {}).step,
        "fetch p.grad": lambda: [p.grad for p in params],
        "addresses and layouts of parameters": lambda: tables[0].refresh([params]),
        "addresses and layouts of gradients": lambda: tables[1].refresh([grads]),
        "new scalars, hand the table over, launch": run,
        "version counters": lambda: torch.autograd.graph.increment_version(written),
    }


def report(page: Page, rows: Rows) -> None:
    """A table."""
    page.table("{count:,} tensors, {device}", rows, {"piece": "piece", "host µs": "host"}, by=("count",))
