"""The second act: one PagedAdamW with all its state at hand and its twin with most of it spilled, on equal batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ...common.units import text_of_bytes
from ...paging.budget import Budget
from ...placements.choose import ARENAS, default_placement
from ..tables import FittingTable
from .compare import TOLERANCE, compare
from .contender import Contender
from .progress_report import text_of_places, warm_spread, write_values
from .train_options import EVERYTHING, TrainOptions

NAMES = ("resident", "spilled")
#: At most so many steps, and a tenth of the run where that is less: the act is short beside the first one.
MOST_STEPS, LEAST_STEPS = 30, 5
#: Share of the state that stays, by type of device, where no budget is given.
SHARE = {"cpu": 0.25, "cuda": 0.5}
NEAR = {"cpu": "in RAM", "cuda": "on the device"}
AWAY = {"file": "in a file", "host": "on the host"}


def twins(options: TrainOptions) -> tuple[TrainOptions, TrainOptions]:
    """The options of both, from those of the run: the same but for the place of the state."""
    device = torch.device(options.device)
    steps = min(MOST_STEPS, max(LEAST_STEPS, options.steps // 10))
    resident = replace(
        options, steps=steps, checkpoint_every=0, spill=False, placement="device", device_budget=EVERYTHING
    )
    kind = ARENAS[device.type][options.placement or default_placement(device, Budget(0))]
    budget = options.device_budget
    if budget == EVERYTHING and kind.paged and kind.keeps_budget:
        budget = str(int(SHARE[device.type] * options.state_bytes))
    return resident, replace(resident, placement=kind.name, device_budget=budget)


def announcement(resident: TrainOptions, spilled: TrainOptions) -> str:
    """Say what is about to happen."""
    device = torch.device(spilled.device).type
    budget = spilled.budget
    stays = "all of it" if budget.everything or budget.nothing else f"all but {budget}"
    stays = "what has no room there" if budget.auto else stays
    stays = "what so much time affords" if budget.seconds is not None else stays
    away = AWAY[ARENAS[device][str(spilled.placement)].away or "host"]
    return (
        f"\nSecond act, spilling: {resident.steps} steps from the same start, once with PagedAdamW's state "
        f"{NEAR[device]}, once with {stays} {away}"
    )


def report(contenders: Sequence[Contender], path: Path, console: Console) -> int:
    """Show the act and add it to the JSON file of the run; return 1 if the twins part, else 0."""
    results = {contender.name: summarize(contender) for contender in contenders}
    agree, words = verdict(contenders)
    console.print(table(list(results.values())))
    console.print(words, highlight=False, soft_wrap=True)
    content = {**json.loads(path.read_text()), "spill": {**results, "agree": agree}}
    write_values(path, content)
    console.print(f"added to: {path}", highlight=False, soft_wrap=True)
    return 0 if agree else 1


def summarize(contender: Contender) -> dict[str, Any]:
    """What a twin measured, as plain values."""
    optimizer: Any = contender.optimizer
    state = optimizer.memory_report()
    return {
        "state": contender.name,
        "placement": state.placement,
        "device_budget": state.budget,
        "state_bytes": dict(state.by_place),
        "measured_bytes": dict(state.measured),
        "ring_bytes": state.ring,
        "optimizer_step_ms": warm_spread(contender.curve.optimizer_ms),
        "whole_step_ms": warm_spread(contender.curve.step_ms),
        "losses": contender.curve.losses,
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The twins side by side; what the first has its state in is where room was to be saved."""
    near = next(iter(results[0]["state_bytes"]))
    shown = FittingTable("state")
    for heading in ("bytes", f"{near}, measured", "optimizer ms", "step ms", "last loss"):
        shown.add_column(heading, justify="right")
    for result in results:
        shown.add_row(
            result["state"],
            text_of_places(result["state_bytes"]),
            text_of_bytes(result["measured_bytes"].get(near, 0)),
            f"{result['optimizer_step_ms']['median']:.2f}",
            f"{result['whole_step_ms']['median']:.1f}",
            f"{result['losses'][-1]:.4f}",
        )
    return shown


def verdict(contenders: Sequence[Contender]) -> tuple[bool, str]:
    """Whether the twins agree, and say so in words. On a CPU nothing may differ, not in a single bit; a GPU adds
    up gradients in an order that changes from run to run."""
    one, other = contenders
    steps = len(one.curve.losses)
    if one.device.type == "cpu":
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        equal = one.curve.losses == other.curve.losses and all(torch.equal(p, q) for p, q in pairs)
        return equal, f"Losses and weights of {steps} steps are {'equal bit for bit' if equal else 'NOT EQUAL'}."
    found = compare(one.curve.losses, other.curve.losses, TOLERANCE[one.device.type])
    where = f"the largest difference in {steps} steps is {found.max_difference:.2g}, the tolerance {found.tolerance:g}"
    return found.agree, f"The losses {'lie' if found.agree else 'DO NOT lie'} on each other: {where}."
