"""The picture of ``notes/usage.md``: state on the device and time of a step, ours and rivals'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.lab import Rows, number
from experiments.pictures import BLUE, GRAY, LETTERS, PAGE, save, stacked
from pagedopt.commands.tables import new_figure


def draw(rows: Rows, about: str, target: Path) -> Path | None:
    """Bars for budgets and for rivals: GiB of state on the device, and ms a step; None without matplotlib."""
    if (figure := new_figure(PAGE, 1.1 + 0.3 * len(rows))) is None:
        return None
    figure.suptitle(
        f"A step of AdamW with {max(row['here'] + row['away'] for row in rows) / 2**30:.0f} GiB of state in float32\n"
        f"{about}\n"
        "solid: the step (torchao's with a backward), pale: its pages pushed out afterwards, by our harness",
        fontsize=LETTERS + 2,
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 3])
    panel(left, rows, [row["here"] / 2**30 for row in rows], [0.0] * len(rows), "GiB of state on the device")
    panel(right, rows, [row["ms"] for row in rows], [row["alone"] or 0.0 for row in rows], "ms a step, wall")
    left.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=LETTERS)
    left.set_ylim(len(rows) - 0.4, -0.6)
    return save(figure, target, rows)


def panel(axes: Any, rows: Rows, values: list[float], firsts: list[float], label: str) -> None:
    """A bar per row, ours in another colour, each with its number inside the frame; solid as far as its first part."""
    stacked(axes, values, firsts, [GRAY if row["share"] is None else BLUE for row in rows])
    for at, value in enumerate(values):
        axes.annotate(number(value), (value, at), (7, 0), textcoords="offset points", va="center", fontsize=LETTERS)
    axes.set_xlim(0, 1.2 * max(values))
    axes.set_xlabel(label)
