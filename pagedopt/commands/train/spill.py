"""The second act: train with all of PagedAdamW's state resident, and its twin on the same batches with most spilled."""

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
from ..tables import results_table, say
from .compare import TOLERANCE, broken, compare
from .contender import Contender
from .progress_report import show, text_of_places, warm_spread, write_values
from .train_options import EVERYTHING, TrainOptions

NAMES = ("resident", "spilled")
#: The act takes a tenth of the run's steps within these bounds, so that it is short beside the run.
MAX_STEPS, MIN_STEPS = 30, 5
#: Share of the state that stays by default, by type of device.
SHARE = {"cpu": 0.25, "cuda": 0.5}
NEAR = {"cpu": "in RAM", "cuda": "on the device"}
AWAY = {"file": "in a file", "host": "on the host"}


def twins(options: TrainOptions) -> tuple[TrainOptions, TrainOptions]:
    """Return the options of the resident and of the spilled twin. They differ in placement and budget alone."""
    device = torch.device(options.device)
    steps = min(MAX_STEPS, max(MIN_STEPS, options.steps // 10))
    resident = replace(
        options, steps=steps, checkpoint_every=0, spill=False, placement="device", device_budget=EVERYTHING
    )
    kind = ARENAS[device.type][options.placement or default_placement(device, Budget(0))]
    budget = options.device_budget
    if budget == EVERYTHING and kind.paged and kind.keeps_budget:
        budget = str(int(SHARE[device.type] * options.state_bytes))
    return resident, replace(resident, placement=kind.name, device_budget=budget)


def announcement(resident: TrainOptions, spilled: TrainOptions) -> str:
    """Return a line that says what the act is about to do."""
    device, budget = torch.device(spilled.device).type, spilled.budget
    if budget.auto:
        moved = "what has no room there"
    else:
        moved = "all of it" if budget.everything or budget.nothing else f"all but {budget}"
    away = AWAY[ARENAS[device][str(spilled.placement)].away or "host"]
    return (
        f"\nSecond act, spilling: {resident.steps} steps from the same start, once with PagedAdamW's state "
        f"{NEAR[device]}, once with {moved} {away}"
    )


def report(contenders: Sequence[Contender], path: Path, console: Console) -> int:
    """Show the act and add it to the run's JSON file. Return 1 if the twins differ, else 0."""
    results = {contender.name: summarize(contender) for contender in contenders}
    agree, sentence = verdict(contenders)
    show(console, table(list(results.values())), list(results.values()))
    say(console, sentence, whole=True)
    write_values(path, {**json.loads(path.read_text()), "spill": {**results, "agree": agree}})
    say(console, f"added to: {path}", whole=True)
    return 0 if agree else 1


def summarize(contender: Contender) -> dict[str, Any]:
    """Return a twin's measurements as JSON values."""
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
        "queued": contender.queued,
        "whole_step_ms": warm_spread(contender.curve.step_ms),
        "losses": contender.curve.losses,
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the twins. Its column of measured bytes is the memory that spilling is to save."""
    near = next(iter(results[0]["state_bytes"]))  # where the resident twin has its state
    return results_table(
        [
            {
                "state": result["state"],
                "bytes": text_of_places(result["state_bytes"]),
                f"{near}, measured": text_of_bytes(result["measured_bytes"].get(near, 0)),
                "optimizer ms": f"{result['optimizer_step_ms']['median']:.2f}" + " queued" * result["queued"],
                "step ms": f"{result['whole_step_ms']['median']:.1f}",
                "last loss": f"{result['losses'][-1]:.4f}",
            }
            for result in results
        ]
    )


def verdict(contenders: Sequence[Contender]) -> tuple[bool, str]:
    """Return (whether the twins agree, a sentence).

    On a CPU every bit must be equal. On a GPU gradients add up in an order that varies, so losses get a tolerance.
    """
    one, other = contenders
    if faults := broken({contender.name: contender.curve.losses for contender in contenders}):
        return False, " ".join(faults)
    steps = len(one.curve.losses)
    if one.device.type == "cpu":
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        equal = one.curve.losses == other.curve.losses and all(torch.equal(p, q) for p, q in pairs)
        return equal, f"Losses and weights of {steps} steps are {'equal bit for bit' if equal else 'NOT EQUAL'}."
    comparison = compare(one.curve.losses, other.curve.losses, TOLERANCE[one.device.type])
    return comparison.agree is True, comparison.sentence(steps, one.name, other.name)
