"""What does it cost in each step to look where tensors lie, and how much memory is kept for it?

Answer: see notes/pointer_lifetime.md.

The host's time, nothing having changed: comparing all addresses with those of the table, as a step of ours does; the
same in Python; and the guards by which a function that torch has compiled knows its tensors again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from experiments.lab import Case, Page, Row, Rows, Run, number
from pagedopt import Sweep
from pagedopt.rules import RULES

MEASURES = ("launch", "tables")
COUNTS = (10, 100, 1000, 10_000)
LOOK, PYTHON, GUARDS, STEP = "looking (ours)", "data_ptr() in Python", "TensorGuards (torch.compile)", "run (ours)"


def measure(run: Run) -> Iterator[Row]:
    """A row per number of tensors and way: the host's time; bytes of the table."""
    run.rounds, run.seconds = run.size((200, 0.5), (3, 0.05))
    for count in run.each(run.size(COUNTS, (10, 100))):
        tensors = list(torch.rand(count, 6, device=run.device).unbind())
        sweep = Sweep(RULES["mul_scalar"], [tensors])
        sweep.run({"scalar": 1.0})
        at = [t.data_ptr() for t in tensors]
        cases = [
            Case(LOOK, sweep.table.follow),
            Case(PYTHON, partial(lambda tensors, at: [t.data_ptr() for t in tensors] == at, tensors, at)),
            Case(STEP, partial(sweep.run, {"scalar": 1.0})),
        ]
        with run.attempt(GUARDS, (Exception,)):
            cases.append(Case(GUARDS, partial(guards(tensors).check, *tensors)))
        for name, host in run.host(cases).items():
            yield {"case": name, "count": count, "device": run.device.type, "host": host,
                   "held": sweep.table.host.words.nbytes}  # fmt: skip


def guards(tensors: list[torch.Tensor]) -> Any:
    """As ``torch.compile`` makes them for its arguments."""
    make: Any = torch._C._dynamo.guards.TensorGuards
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def sentence(rows: Rows) -> str | None:
    """Of the longest list."""
    most = max(rows.values("count"), default=0)
    known = {row["case"]: row["host"]["median"] for row in rows.where(count=most)}
    held = rows.number("held", count=most)
    if not known or held is None:
        return None
    each = ", ".join(f"{name} {number(us)} µs" for name, us in sorted(known.items(), key=lambda item: item[1]))
    return f"- {most:,} tensors: {each}; the table has {number(held / most)} bytes a tensor."


def report(page: Page, rows: Rows) -> None:
    """A table and what follows."""
    page.grid("host µs, on {device}", rows, "case", "count", "host", "tensors")
    page.say(sentence(rows))
