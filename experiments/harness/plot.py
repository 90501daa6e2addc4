"""Plots as values.  matplotlib is an extra: without it nothing is drawn, and that is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.rows import Rows
from pagedopt.commands.results import new_figure


@dataclass(frozen=True)
class Lines:
    """One panel, both axes logarithmic: a line per value of a column, with its spread.

    Attributes:
        x: the column across.
        y: the column of measured numbers (µs).
        each: a line for each of its values.
        label: what ``x`` counts.
    """

    title: str
    x: str
    y: str
    each: str
    where: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def draw(self, axes: Any, rows: Rows) -> None:
        """Draw into a matplotlib Axes."""
        for group in rows.where(**self.where).groups(self.each):
            points = sorted(((row[self.x], row[self.y]) for row in group if row[self.y]), key=lambda point: point[0])
            if points:
                across = [n for n, _ in points]
                low, middle, high = ([stats[k] for _, stats in points] for k in ("p10", "median", "p90"))
                line = axes.plot(across, middle, marker="o", markersize=3, label=group[0][self.each])[0]
                axes.fill_between(across, low, high, alpha=0.15, color=line.get_color())
        axes.set(xscale="log", yscale="log", xlabel=self.label or self.x, ylabel="µs")
        axes.set_title(self.title, fontsize="medium")
        axes.grid(alpha=0.3, which="both")
        if axes.lines:
            axes.legend(fontsize="small")


@dataclass(frozen=True)
class Horizontal:
    """A panel per group of rows: horizontal bars of measured numbers (µs, drawn in ms) with their spread.

    Attributes:
        y: the column that names a bar.
        by: columns whose values make a group, and its panel's title.
        line: the name of the row that is drawn as a line across the others.
        ours: names that begin so have our color.
    """

    y: str
    by: Sequence[str]
    line: str
    ours: str

    def draw(self, figure: Any, rows: Rows) -> None:
        """Draw into a matplotlib Figure, two panels beside each other."""
        groups = list(rows.groups(*self.by))
        columns = 2 if len(groups) > 1 else 1
        high = -(-len(groups) // columns)
        figure.set_size_inches(12, 1 + 2.8 * high)
        places = figure.subplots(high, columns, squeeze=False).flat
        for axes in places[len(groups) :]:
            axes.set_axis_off()
        for axes, group in zip(places, groups, strict=False):
            self._panel(axes, group)

    def _panel(self, axes: Any, rows: Rows) -> None:
        bars = [(row[self.y], row["gpu"] or row["wall"]) for row in rows if row[self.y] != self.line]
        taken = [stats["median"] / 1e3 for _, stats in bars]
        spread = [
            [(stats["median"] - stats["p10"]) / 1e3 for _, stats in bars],
            [(stats["p90"] - stats["median"]) / 1e3 for _, stats in bars],
        ]
        names = [name for name, _ in bars]
        colors = ["tab:blue" if name.startswith(self.ours) else "tab:gray" for name in names]
        axes.barh(names, taken, xerr=spread, color=colors)
        floor = rows.number(lambda row: row["gpu"] or row["wall"], **{self.y: self.line})
        if floor is not None:
            axes.axvline(floor / 1e3, color="tab:red", label=self.line)
            axes.legend(fontsize="small")
        if max(taken) > 30 * min(taken):
            axes.set_xscale("log")
        axes.invert_yaxis()
        axes.set_title(", ".join(str(rows[0][name]) for name in self.by), fontsize="medium")
        axes.set_xlabel("ms")


@dataclass(frozen=True)
class Plot:
    """One PNG.

    Attributes:
        name: in the file's name.
        draw: into an empty matplotlib Figure, from rows; or panels, two beside each other.
        where: only rows with these values; nothing is drawn where there are none.
    """

    name: str
    draw: Callable[[Any, Rows], None] | Sequence[Lines]
    title: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path, rows: Rows) -> Path | None:
        """Draw to ``PATH-NAME.png``; returns the file, or None if there is nothing to draw or no matplotlib."""
        rows = rows.where(**self.where)
        figure = new_figure(11, 7.5) if rows else None
        if figure is None:
            return None
        if self.title:
            figure.suptitle(self.title)
        if callable(self.draw):
            self.draw(figure, rows)
        else:
            places = figure.subplots(-(-len(self.draw) // 2), min(2, len(self.draw)), squeeze=False)
            for axes, panel in zip(places.flat, self.draw, strict=False):
                panel.draw(axes, rows)
        target = path.with_name(f"{path.stem}-{self.name}.png")
        figure.savefig(target, dpi=130)
        return target


#: Colours that the colour-blind can tell apart (Okabe and Ito 2008), the orange dark enough for letters.
BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = "#0072B2", "#B37400", "#009E73", "#D55E00", "#CC79A7", "#6E6E6E"


def label_beside(axes: Any, points: Sequence[tuple[float, float, str, str]], size: float = 9) -> None:
    """Write names in a column to the right of the axes, each joined with its point; none lies on another.

    Args:
        axes: of matplotlib, with its limits and scales as they are to stay.
        points: (x, y, name, colour).
        size: of the letters.
    """
    axes.get_xlim(), axes.get_ylim()  # settles what lies where in the axes
    place = axes.transData + axes.transAxes.inverted()
    ordered = sorted(
        ((*place.transform((x, y)), x, y, name, color) for x, y, name, color in points), key=lambda p: p[1]
    )
    step = size * 1.4 / 72 * axes.figure.dpi / axes.get_window_extent().height
    heights = spaced([float(point[1]) for point in ordered], step)
    for (_, _, x, y, name, color), height in zip(ordered, heights, strict=True):
        axes.annotate(
            name, (x, y), (1.03, height), "data", "axes fraction", fontsize=size, color=color, va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.45, "linewidth": 0.7, "relpos": (0, 0.5)},
        )  # fmt: skip


def spaced(wanted: Sequence[float], step: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Heights near those wanted (rising), at least ``step`` apart, between two bounds as far as there is room."""
    found: list[float] = []
    for height in wanted:
        found.append(max(height, found[-1] + step if found else low))
    ceiling = high
    for i in reversed(range(len(found))):
        found[i] = min(found[i], ceiling)
        ceiling = found[i] - step
    return found
