"""What does the host do in a step: step() alone in a loop, and finding that tensors lie where they did?

Answer (host of an H200, 2026-11): 293 µs over 148 tensors (torch fused 733); 242 µs to look at 1,000.

The tables of :mod:`experiments.step.close_to_a_copy` have the host's time, too, but there other contenders run in
between and take the processor's caches: the two say how much a step costs in a loop of its own, and amid other work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from experiments.lab import Case, Page, Row, Rows, Run, formatted
from experiments.works.contenders import FUSED, OURS
from experiments.works.models import Work
from pagedopt import PagedAdamW, PointerTable

MEASURES = ("launch", "tables", "optim")
ALONE, REFRESH = "step() alone", "refresh"
#: A median with its unit.
HOST = formatted("host", "{:,.0f} µs")


def measure(run: Run) -> Iterator[Row]:
    """A row per case, with its host time (µs): matters of the host, timed as such; nothing waits for the GPU."""
    count = run.size(1000, 20)
    params = Work("refresh", [(2, 3)] * count, torch.float32, 28, 0).parameters(run.device)
    grads = [p.grad for p in params]
    one, two = PointerTable([params]), PointerTable([params, grads])
    cases = [
        Case("one list", lambda: one.refresh([params])),
        Case("parameters and gradients", lambda: two.refresh([params, grads])),
    ]
    for name, host in run.host(cases).items():
        yield {"what": REFRESH, "device": run.device.type, "case": name, "host": host}

    work = Work("alone", [(16,)] * run.size(148, 4), torch.float32, 28, 0)
    for name, make in ((OURS, PagedAdamW), (FUSED, functools.partial(torch.optim.AdamW, fused=True))):
        optimizer = make(work.parameters(run.device))
        for _ in range(10):
            optimizer.step()
        # The GPU is done with these tensors long before the host is.
        host = run.host([Case(name, optimizer.step)], rounds=10 * run.rounds)[name]
        yield {"what": ALONE, "device": run.device.type, "case": name, "host": host}


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    page.table("step() over 148 small tensors, nothing else in between", rows.where(what=ALONE),
        {"optimizer": "case", "host": HOST})  # fmt: skip
    page.detail.table("refresh of 1,000 unchanged tensors", rows.where(what=REFRESH), {"lists": "case", "host": HOST})
    page.bar("host time of step(), 148 tensors, alone", rows.where(what=ALONE, case=OURS, device="cuda"),
        "host", at_most=120, unit="µs")  # fmt: skip
    page.bar("refreshing 1,000 unchanged tensors", rows.where(what=REFRESH, case="one list"), "host",
        at_most=250, unit="µs")  # fmt: skip
