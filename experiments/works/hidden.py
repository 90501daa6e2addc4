"""Iterations of a GPT whose state is on the device, or on the host with its step exposed or hidden, and their times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch

from experiments.clock import series
from experiments.columns import ms, ratio
from experiments.comparing import over
from experiments.lab import Column, Row, Rows, Run
from experiments.works.staged import staged
from experiments.works.training import Load, Make, Training
from pagedopt import PagedAdamW
from pagedopt.formats.floating import StateFormat
from pagedopt.planning.sizes import SIZES

FUSED, RESIDENT, EXPOSED, HIDDEN = "torch fused, resident", "resident", "on the host, exposed", "on the host, hidden"
CALLS, NEARLY = "on the host, exposed, call by call", "on the host but for 64 MiB, hidden"
MODELS = {"355 M": "gpt2-medium", "1.56 B": "gpt2-xl"}
#: (model, load, format of state, way)
Plan = tuple[str, Load, str, str]


def iterations(run: Run, plan: Sequence[Plan]) -> Iterator[Row]:
    """A row per model, load, format of state and way; toys are the last three of a plan."""
    for model, load, state, way in run.each(run.size(plan, plan[-3:])):
        about = {"model": model, "load": str(load), "state": state, "way": way}
        with run.attempt(", ".join(about.values())):
            size = SIZES[run.size(MODELS[model], "tiny")]
            with staged("calls" if way == CALLS else "graph"):
                training = Training(run.device, size, load, maker(way, state))
            if way in (HIDDEN, NEARLY):
                training.optimizer.attach(training.model)
            yield {**about, **timed(run, training)}
            del training


def maker(way: str, state: str) -> Make:
    """What makes the optimizer of a way."""
    if way == FUSED:
        return partial(torch.optim.AdamW, fused=True)
    budget = {RESIDENT: None, NEARLY: "64MiB"}.get(way, 0)
    return partial(PagedAdamW, state_format=cast(StateFormat, state), device_budget=budget)


def timed(run: Run, training: Training) -> Row:
    """Times of iterations (µs), and device memory at the peak (bytes)."""
    for _ in range(3):
        training.iterate()
    training.wait()
    training.host.clear()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begins = [training.iterate() for _ in range(run.size(8, 2))]  # of the last one no end is marked: no forward follows
    training.wait()
    whole = [after.since(before) for before, after in itertools.pairwise(begins)]
    return {
        "time": series(whole, "GPU" if run.device.type == "cuda" else "wall"),
        "step_host": series(training.host, "host"),
        "peak": torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0,
    }


def beside_resident(rows: Rows) -> Rows:
    """Over the resident and the exposed way."""
    found = Rows()
    for row in rows:
        same = {name: row[name] for name in ("model", "load")}
        resident = rows.first(**same, way=RESIDENT) or {}
        exposed = rows.first(**same, state=row["state"], way=EXPOSED) or {}
        found.append({
            **row, "clock": row["time"]["clock"], "host_ms": row["step_host"]["median"] / 1e3,
            "of_resident": over(row["time"], resident.get("time")),
            "of_exposed": over(row["time"], exposed.get("time")), "name": f"{row['way']}, {row['state']}",
        })  # fmt: skip
    return found


COLUMNS: dict[str, Column] = {
    "state": lambda row: f"{row['state']}, {row['way']}", "ms": ms("time"), "÷ resident": ratio("of_resident"),
    "host: step()": ms("step_host"), "GB at the peak": lambda row: row["peak"] / 1e9,
}  # fmt: skip
TITLE = "{model} parameters, {load}; ms an iteration ({clock}), a sequence has 1,024 tokens"
