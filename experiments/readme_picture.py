"""The picture of ``notes/usage.md``: time of a step by state on the host, ours by its budget, and rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.lab import Row, Rows
from experiments.pictures import BLUE, GRAY, PAGE, Lines, onto, save
from pagedopt.commands.tables import new_figure

OURS = "pagedopt, by device_budget"


class Steps(Lines):
    """Axes that show that nothing is on the host."""

    def draw(self, axes: Any, rows: Rows) -> None:
        """The limits first: names are put beside the axes."""
        axes.set_xlim(-0.1, 1.05 * max(row["gib"] for row in rows))
        super().draw(axes, rows)


PANEL = Steps(
    title="AdamW, {about}",
    unit="ms a step, wall",
    x="gib",
    y="ms",
    each="line",
    log="y",
    label="GiB of state on the host",
    colors=lambda name: BLUE if name == OURS else GRAY,
    inches=3.8,
)


def draw(rows: Rows, about: str, target: Path) -> Path | None:
    """A line of ours, and a mark for each rival; None without matplotlib."""
    if (figure := new_figure(PAGE, 5)) is None:
        return None
    shown = Rows(point for row in rows for point in points(row, about))
    onto(figure, shown, [PANEL], "A step takes longer with each GiB of state on the host, ours the least in float32")
    return save(figure, target, rows)


def points(row: Row, about: str) -> list[Row]:
    """A step; and of a rival whose pages we push out, the step alone."""
    named = {"about": about, "gib": row["away"] / 2**30}
    line = row["name"] if row["share"] is None else OURS
    alone = [{**named, "line": f"{row['name']}, step alone", "ms": row["alone"]}] if row["alone"] else []
    return [{**named, "line": line, "ms": row["ms"]}, *alone]
