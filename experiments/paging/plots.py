"""Plots of ``paged_state``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.paging import bars
from experiments.paging.rivals import FUSED, OURS, OURS_IN_PLACE
from experiments.paging.spike import WARM

Draw = Callable[[Any, dict[str, Any]], None]


def shares(figure: Any, result: dict[str, Any]) -> None:
    """Time of a step against the share of state on the host: a line per way, dashed the price of the bytes alone."""
    rows = result["parts"]["sweep"]["rows"]
    axes = figure.subplots(1, 2, width_ratios=[3, 2])
    for way in dict.fromkeys(row["way"] for row in rows):
        points = sorted((row["away"], row["best"] / 1e3) for row in rows if row["way"] == way)
        for place in axes:
            (line,) = place.plot(*zip(*points, strict=True), marker="o", markersize=4, label=way)
        away, near = bars.at(rows, way, 0.0), bars.at(rows, way, 1.0)
        if away and near and len(points) > 2:
            ends = [near["best"] / 1e3, (away["away"] * away["best"] + near["best"]) / 1e3]
            for place in axes:
                place.plot([0, away["away"]], ends, "--", color=line.get_color(), alpha=0.5, linewidth=1)
    for place in axes:
        place.set(xlabel="share of state on the host", ylabel="ms a step")
        place.grid(alpha=0.3)
        place.legend(fontsize="small")
    ours = [row["best"] / 1e3 for row in rows if bars.over_line(rows, row["way"], 1.0) and row["gpu"]]
    axes[1].set_ylim(0, 1.1 * max(ours, default=1))
    axes[1].set_title("the same without the driver's paging", fontsize="medium")
    figure.set_size_inches(13, 5.5)
    figure.suptitle("A step of AdamW over 268 M parameters, 2.1 GB of state; dashed: x · (all away) + (all near)")


def rivals(figure: Any, result: dict[str, Any]) -> None:
    """Wall time of a step by contender."""
    rows = result["parts"]["rivals"]["rows"]
    names = [f"{row['name']}: {row['what']}" for row in rows]
    taken = [row["wall"]["median"] / 1e3 for row in rows]
    spread = [[t - row["wall"]["p10"] / 1e3 for t, row in zip(taken, rows, strict=True)],
              [row["wall"]["p90"] / 1e3 - t for t, row in zip(taken, rows, strict=True)]]  # fmt: skip
    known = {FUSED: "tab:green", OURS: "tab:blue", OURS_IN_PLACE: "tab:blue"}
    colors = [known.get(row["name"], "tab:gray") for row in rows]
    figure.set_size_inches(11, 1.5 + 0.42 * len(rows))
    axes = figure.subplots()
    drawn = axes.barh(names, taken, xerr=spread, color=colors)
    axes.bar_label(drawn, [f" {t:,.1f}" for t in taken], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("ms a step, wall")
    axes.set_title("268 M parameters; state on the host before and after, unless it says otherwise", fontsize="medium")


def timeline(figure: Any, result: dict[str, Any]) -> None:
    """Every step of the loops with large batches."""
    part = result["parts"]["spike"]
    axes = figure.subplots()
    for name, times in part["timeline"].items():
        steps = range(WARM + 1, len(times) + 1)
        axes.plot(steps, times[WARM:], marker=".", linewidth=1, label=name)
    axes.set(yscale="log", xlabel="step", ylabel="ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    figure.set_size_inches(11, 4.5)
    axes.set_title("Every 20th batch needs more memory than is left beside the state", fontsize="medium")


#: Name of a plot → the part it needs, and how it is drawn.
PLOTS: dict[str, tuple[str, Draw]] = {
    "shares": ("sweep", shares), "rivals": ("rivals", rivals), "spikes": ("spike", timeline),
}  # fmt: skip
