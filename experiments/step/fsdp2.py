"""Is an iteration of FSDP2 over two GPUs as fast as with torch's fused AdamW?

Answer: yes: 0.97 of its time over two H200s, as the step of the shards takes half as long as torch's.

Two processes, each with a GPU of its own (on a CPU: over gloo), train three stacks of transformer layers: with
PagedAdamW, all state on the device; with PagedAdamW, all state away; with torch's fused AdamW.  They take turns,
iteration by iteration, on the same batches; an iteration is forward, backward, step and zero_grad, from a barrier until
the GPU is idle, as the first of the processes sees it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run, gb_per_s, series, spread
from experiments.step.sharded_process import AWAY, FUSED, LINK, OURS, iterations

MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
PROCESSES = GPUS = 2
TURNS = "turns"
#: Seconds until a process is killed.
LIMIT = 120
#: 1.01 thousand million parameters; 2,048 tokens in each process.
FULL = {"width": 2048, "layers": 20, "batch": 4, "tokens": 512}
TOY = {"width": 16, "layers": 2, "batch": 2, "tokens": 8}
#: Losses of the warm-up may differ by so much: bfloat16 makes a rounding of a weight one of its own.
ALIKE = 2e-2


def measure(run: Run) -> Iterator[Row]:
    """Rows for iterations, and for the steps in them: times of ours and torch's (µs), ours over torch's by turns.

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
    (theirs,) = found[0].where(case=FUSED)
    for link in found[0].where(case=LINK):
        yield {"kind": LINK, "bytes": link["bytes"], "time": series(link["times"], "GPU")}
    for case in (OURS, AWAY):
        (ours,) = found[0].where(case=case)
        check_losses(ours["losses"], theirs["losses"])
        for what, clock in (("iterations", "wall"), ("steps", "GPU" if run.device.type == "cuda" else "wall")):
            ratios = [one / other for one, other in zip(ours[what], theirs[what], strict=True)]
            samples = {"ours": ours[what], "theirs": theirs[what], "ratio": ratios}
            times = {name: series(values, clock) for name, values in samples.items()}
            yield {
                "kind": TURNS,
                "what": what,
                "case": case,
                "parameters": ours["parameters"],
                "away": ours["away"],
                **times,
            }


def check_losses(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Compare the losses of both contenders.

    Raises:
        RuntimeError: they are not the same ones.
    """
    if not all(math.isclose(one, other, rel_tol=ALIKE) for one, other in zip(ours, theirs, strict=True)):
        raise RuntimeError(f"the losses of {OURS} are {ours}, those of {FUSED} {theirs}")


def derive(rows: Rows) -> Rows:
    """Steps with the floor of their bytes away: these, up and down at once, at the rate of the link."""
    link = rows.first(kind=LINK)
    pace = link["time"]["median"] / link["bytes"] if link else None
    away = [row.get("what") == "steps" and row["away"] for row in rows]
    clock = link and link["time"]["clock"]
    return Rows(
        {**row, "floor": nbytes * pace, "clock": clock} if nbytes and pace else row
        for row, nbytes in zip(rows, away, strict=True)
    )


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    page.table("FSDP2 over two processes, {parameters:,} parameters", rows.where(kind=TURNS),
        {"what": "what", "ours": "case",
        "state away in each process, bytes": lambda row: f"{row['away']:,}",
        "ours, µs (p10 to p90)": spread("ours"), f"{FUSED}, µs": spread("theirs"),
        "ours over theirs, in turn": spread("ratio"), "turns": lambda row: f"{row['ratio']['n']}",
        "floor of the bytes away, µs": "floor"})  # fmt: skip
    page.detail.table("copies up and down at once, in both processes", rows.where(kind=LINK),
        {"bytes each way": lambda row: f"{row['bytes']:,}", "µs": spread("time"),
        "GB/s each way": gb_per_s("bytes", "time")})  # fmt: skip
    page.bar("an iteration of FSDP2, all state on the devices, over that with torch fused",
        rows.where(what="iterations", case=OURS), "ratio", at_most=1.05, unit="x")  # fmt: skip
