"""What does torch.compile make of a step of ours: graphs, clones, bits, and time beside the eager step?

Answer: see notes/custom_op.md.

The step is one operator, ``pagedopt::step_``, in the graph of a function that does nothing else; so its time beside the
eager step's is what guards and the runtime of the compiler take.  Bits are compared after each of four steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.lab import Bar, Case, Row, Rows, Run, Table, over, ratio, yes_or_no
from experiments.works.models import HYPER, Work
from pagedopt import PagedAdamW

MEASURES = ("clock", "registered", "step")
NOTE = "custom_op"
EAGER, BACKENDS = "eager", ("aot_eager", "inductor")
STEPS = 4


def work(count: int) -> Work:
    """So many small tensors."""
    return Work(f"{count} x 64²", [(64, 64)] * count)


def stepping(count: int, device: torch.device, backend: str) -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Parameters, and a step of theirs."""
    params = work(count).parameters(device)
    optimizer = PagedAdamW(params, **HYPER)

    def step() -> None:
        optimizer.step()

    return params, step if backend == EAGER else torch.compile(step, backend=backend, fullgraph=True)


def code_of(step: Callable[[], Any]) -> str:
    """What Inductor writes for the first call."""
    from torch._inductor.utils import run_and_get_code

    return "".join(run_and_get_code(step)[1])


def measure(run: Run) -> Iterator[Row]:
    """A row per number of tensors and way: graphs, copies in the code, and times."""
    for count in run.each(run.size((10, 100, 300), (4,))):
        torch._dynamo.reset()
        cases, seen = list[Case](), dict[str, Row]()
        want = list[list[torch.Tensor]]()
        for name in (EAGER, *BACKENDS):
            params, step = stepping(count, run.device, name)
            torch._dynamo.utils.counters.clear()
            code = code_of(step) if name == "inductor" else (step() or "")
            copies = len(re.findall(r"\bclone\(|\bcopy_\(|empty_strided", code.partition("def call(")[2]))
            same = True
            for i in range(STEPS):
                step()
                values = [p.detach().clone() for p in params] if name == EAGER else want[i]
                want += [values] if name == EAGER else []
                same = same and all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            seen[name] = {"graphs": graphs, "copies": copies if name == "inductor" else None, "same": same}
            cases.append(Case(name, step))
        for row in run.time(cases, tensors=count, device=run.device.type):
            yield {**row, **seen[row["case"]]}


def derive(rows: Rows) -> Rows:
    """What each takes over the eager step, by the host's clock."""
    found = Rows()
    for row in rows:
        one = rows.first(case=EAGER, tensors=row["tensors"], device=row["device"])
        assert one is not None, "the eager step is timed, too"
        found.append({**row, "of_eager": over(row["host"], one["host"]), "differs": int(not row["same"])})
    return found


TABLES = [
    Table("a step of AdamW over {tensors} tensors on {device}", by=("tensors",), columns={
        "step": "case", "graphs": "graphs", "copies in Inductor's code": "copies", "bits of the eager step":
        yes_or_no("same"), "host, µs": "host", "÷ eager": ratio("of_eager"),
    })
]  # fmt: skip
BARS = [
    Bar("compiled steps with other bits than eager ones", lambda rows: sum(row["differs"] for row in rows), at_most=0),
    Bar("copies in Inductor's code", "copies", at_most=0),
    Bar("graphs of four steps", "graphs", at_most=1),
]
