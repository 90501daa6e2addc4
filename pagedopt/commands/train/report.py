"""What the contenders have measured: a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from ...common.units import text_of_bytes
from ..results import new_figure
from ..tables import results_table
from .contender import Contender

FINAL_STEPS = 10  # the loss in the table is their mean, since batches differ
PLACES = {"device": "black", "host": "dimgray", "file": "lightgray"}  # and their colours


def table(contenders: Sequence[Contender], tokens: int) -> Table:
    """Return a row for each contender, after steps of ``tokens`` tokens; losses are of steps that all have taken."""
    state = [contender.state_bytes() for contender in contenders]
    places = [place for place in PLACES if any(by_place[place] for by_place in state)]
    rows = [
        {
            "optimizer": contender.name,
            "loss": f"{fmean(contender.losses[: len(contenders[-1].losses)][-FINAL_STEPS:]):.4f}",
            "tokens/s": f"{1e3 * tokens / median(contender.step_ms):,.0f}",
            "optimizer ms (median)": f"{median(contender.optimizer_ms):.2f}",
            **{f"state on {place}": text_of_bytes(by_place[place]) for place in places},
        }
        for contender, by_place in zip(contenders, state, strict=True)
    ]
    return results_table(rows)


def draw(path: Path, contenders: Sequence[Contender]) -> str:
    """Draw the loss curves, and the bytes of state by place. Return a line that says where, or why not."""
    if (figure := new_figure(11, 4.5)) is None:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    state = [contender.state_bytes() for contender in contenders]
    for contender, width in zip(contenders, (7, 4, 1), strict=False):  # the curves lie on each other
        curves.plot(range(1, len(contender.losses) + 1), contender.losses, linewidth=width, label=contender.name)
    beneath = [0.0] * len(state)
    for place, color in PLACES.items():
        heights = [by_place[place] / 2**20 for by_place in state]
        if any(heights):
            bars.bar([c.name for c in contenders], heights, bottom=beneath, color=color, label=f"on {place}")
            beneath = [low + high for low, high in zip(beneath, heights, strict=True)]
    curves.set(xlabel="step", ylabel="training loss (nats per byte)")
    bars.set(ylabel="optimizer state (MiB)", ylim=(0, 1.25 * max(beneath)))  # the legend stands above the bars
    for axes in (curves, bars):
        axes.legend()
    figure.savefig(path, dpi=150)
    return f"picture: {path}"
