"""Is an iteration of FSDP2 over two GPUs as fast as with torch's fused AdamW?

Answer: yes: 0.97 of its time over two H200s, as the step of the shards takes half as long as torch's.

Two processes, each with a GPU of its own (on a CPU: over gloo), train two stacks of transformer layers: one with
PagedAdamW, all state on the device, one with torch's fused AdamW.  Both take turns, iteration by iteration, on the same
batches; an iteration is forward, backward, step and zero_grad, from a barrier until the GPU is idle, as the first of
the processes sees it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from experiments.harness.child import Child
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table, number
from experiments.harness.time import Stats
from experiments.step.sharded_process import FUSED, OURS, iterations

PROCESSES = 2
#: Seconds until a process is killed.
LIMIT = 120
#: 1.01 thousand million parameters; 2,048 tokens in each process.
FULL = {"width": 2048, "layers": 20, "batch": 4, "tokens": 512}
TOY = {"width": 16, "layers": 2, "batch": 2, "tokens": 8}
#: Losses of the warm-up may differ by so much: bfloat16 makes a rounding of a weight one of its own.
ALIKE = 2e-2


def measure(run: Run) -> Iterator[Row]:
    """A row per contender: times of its iterations and of the steps in them (µs), turn by turn.

    Raises:
        RuntimeError: a process failed, or the contenders do not learn alike.
    """
    there = torch.cuda.device_count()
    if run.device.type == "cuda" and there < PROCESSES:
        run.leave_out(f"FSDP2 over {PROCESSES} GPUs: there is {there}")
        return
    warmup, rounds = run.size((5, 40), (2, 3))
    with tempfile.TemporaryDirectory(prefix="pagedopt-group-") as folder:
        store = str(Path(folder) / "store")
        children = [
            Child(iterations, rank, PROCESSES, run.device.type, store, run.size(FULL, TOY), warmup, rounds, limit=LIMIT)
            for rank in range(PROCESSES)
        ]
        found = [Rows(child) for child in children]
    for rank, child in enumerate(children):
        if child.ended:
            raise RuntimeError(f"process {rank} {child.ended}")
    check(found[0])
    yield from found[0]


def check(rows: Rows) -> None:
    """
    Raises:
        RuntimeError: the losses of the contenders are not the same ones.
    """
    ours, theirs = (torch.tensor(rows.where(case=case)[0]["losses"]) for case in (OURS, FUSED))
    if not torch.allclose(ours, theirs, rtol=ALIKE, atol=0):
        raise RuntimeError(f"the losses of {OURS} are {ours.tolist()}, those of {FUSED} {theirs.tolist()}")


def derive(rows: Rows) -> Rows:
    """A row per thing that was timed: both contenders', and ours over torch's, turn by turn."""
    found = Rows()
    if not rows:
        return found
    (ours,), (theirs,) = rows.where(case=OURS), rows.where(case=FUSED)
    for what in ("iterations", "steps"):
        pairs = list(zip(ours[what], theirs[what], strict=True))
        stats = {
            "ours": Stats.of(ours[what]), "theirs": Stats.of(theirs[what]), "ratio": Stats.of([a / b for a, b in pairs])
        }  # fmt: skip
        found.append({"what": what, "parameters": ours["parameters"], **{name: vars(s) for name, s in stats.items()}})
    return found


def with_spread(name: str, row: Row) -> str:
    """A median, with what nine tenths are above, and below."""
    return "{} ({} to {})".format(*(number(row[name][which]) for which in ("median", "p10", "p90")))


TABLES = [
    Table("FSDP2 over two processes, {parameters:,} parameters", {
        "what": "what", f"{OURS}, µs (p10 to p90)": lambda row: with_spread("ours", row),
        f"{FUSED}, µs": lambda row: with_spread("theirs", row),
        "ours over theirs, in turn": lambda row: with_spread("ratio", row),
        "turns": lambda row: f"{row['ratio']['n']}",
    })
]  # fmt: skip
BARS = [Bar("an iteration of FSDP2 over that with torch fused", "ratio", at_most=1.05, unit="x", what="iterations")]
