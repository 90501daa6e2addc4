"""Where does the host time of one step() go?

The pieces of ``PagedAdamW.step()`` over 148, 1,000 and 5,000 small tensors of which nothing changed, each timed alone
in a warm loop, beside torch's fused step.  Every look at a tensor from Python is a call of its own, so a step that
looks at every parameter and gradient cannot cost less than a handful of calls per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from experiments import report
from experiments.bench import Case, measure
from pagedopt import PagedAdamW
from pagedopt.optim.launches import Launches
from pagedopt.optim.scalars import scalars_of


class _Nothing(torch.optim.Optimizer):
    """What torch's own wrapper around ``step`` costs."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def pieces(count: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name → what to time, for ``count`` parameters of 16 elements."""
    params = [torch.nn.Parameter(torch.randn(16, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer, fused = PagedAdamW(params), torch.optim.AdamW(params, fused=True)
    optimizer.step()
    fused.step()
    (bucket,) = Launches(optimizer).buckets
    sweep, group = bucket.sweep, optimizer.param_groups[0]
    grads = [p.grad for p in params]
    step = [1.0]

    def run() -> None:
        step[0] += 1
        sweep.run([bucket.rule.uniforms({**scalars_of(bucket.rule, group, optimizer.defaults), "step": step[0]})])

    return {
        "step(), whole": optimizer.step,
        "torch fused, whole": fused.step,
        "torch's wrapper around step()": _Nothing(params, {}).step,
        "fetch p.grad": lambda: [p.grad for p in params],
        "addresses and layouts of parameters": lambda: sweep.refresh([params, None]),
        "addresses and layouts of gradients": lambda: sweep.refresh([None, grads]),
        "new scalars, hand the table over, launch": run,
        "version counters": lambda: torch.autograd.graph.increment_version(bucket._written),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write JSON."""
    options = report.options("step_profile", __doc__).parse_args(arguments)
    if options.note is not None:
        print("step_profile has no note of its own; its numbers are in notes/fused_step.md")
        return 2
    console, device = report.console(), report.chosen_device(options.device)
    result: dict[str, Any] = {"device": device.type, "quick": options.quick, "pieces": {}}
    for count in (10, 20) if options.quick else (148, 1000, 5000):
        times = {}
        for name, run in pieces(count, device).items():  # one at a time: caches as warm as they get
            timings = measure([Case(name, run)], torch.device("cpu"), rounds=200, seconds=0.5)
            times[name] = timings[name].host.__dict__
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        result["pieces"][str(count)] = times
        rows = [(name, report.number(stats["median"])) for name, stats in times.items()]
        report.show(console, f"{count:,} tensors, {device.type}", ("piece", "host µs"), rows)
    console.print(f"written: {report.write(options.out, 'step_profile', device, result)}")
    return 0
