"""Plots as values.  matplotlib is an extra: without it nothing is drawn, and that is said.

A picture is as wide as a page shows it, so that its letters stay legible; names stand at what they name, in its colour;
an axis says so if it is logarithmic; bars begin at 0, stand in the order of their lengths and have their numbers inside
the frame.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.question import Experiment
from experiments.harness.revision import refuse
from experiments.harness.rows import Rows, newest, of_questions, read
from experiments.harness.show import number
from pagedopt.commands.results import as_json, new_figure

#: Colours that the colour-blind can tell apart (Okabe and Ito 2008), orange and purple dark enough for letters.
BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = "#0072B2", "#B37400", "#009E73", "#D55E00", "#AA5588", "#6E6E6E"
#: What lines of one panel are told apart by, where they lie on each other, too.
COLORS, MARKERS = (BLUE, ORANGE, GREEN, RED, PURPLE, GRAY, "black"), "osD^vXP"
#: Inches, and dots in one of them: 800 pixels wide a letter of 9 points is 12 pixels high.
PAGE, DPI = 8.0, 150
LETTERS = 9.0
#: Letters of a title that fit over one of two panels, and of a name that fit beside it.
NARROW, SHORT = 30, 16
#: Times so far apart are dots over a logarithmic axis: a bar has no length there.
FAR_APART = 100.0
#: Decades that an axis has fewer of to be divided at 2 and 5, too.
NEAR = 2.5


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
        ends = []
        for i, group in enumerate(rows.where(**self.where).groups(self.each)):
            points = sorted(((row[self.x], row[self.y]) for row in group if row[self.y]), key=lambda point: point[0])
            if points:
                across = [n for n, _ in points]
                middle = [stats["median"] for _, stats in points]
                errors = spread([stats for _, stats in points])
                axes.errorbar(across, middle, yerr=errors, linewidth=1.2, markersize=4.5, **look(i))
                ends.append((across[-1], middle[-1], str(group[0][self.each]), look(i)["color"]))
        axes.set(xscale="log", yscale="log", xlabel=f"{self.label or self.x} (log)", ylabel="µs (log)")
        axes.set_title(textwrap.fill(self.title, NARROW), fontsize=LETTERS + 1)
        axes.grid(alpha=0.3)
        label_beside(axes, ends)


def look(i: int) -> dict[str, str]:
    """Colour and marker of the line ``i`` of a panel; a hollow marker shows what lies beneath it."""
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "fillstyle": "none"}


def spread(measured: Sequence[Mapping[str, float]], unit: float = 1.0) -> list[list[float]]:
    """How far below and above their medians most of them lie."""
    return [[abs(stats[end] - stats["median"]) / unit for stats in measured] for end in ("p10", "p90")]


def bars(
    axes: Any, shown: Sequence[tuple[str, float, str]], unit: str, errors: Sequence[Sequence[float]] | None = None
) -> None:
    """Horizontal bars (name, length, colour), the shortest on top, each with its number inside the frame.

    Lengths far apart are dots over a logarithmic axis.

    Args:
        axes: of matplotlib.
        shown: the bars.
        unit: of their lengths.
        errors: how far below and above each length most of the samples lie.
    """
    order = sorted(range(len(shown)), key=lambda i: shown[i][1])
    names, lengths, colors = zip(*(shown[i] for i in order), strict=True)
    whiskers = None if errors is None else [[side[i] for i in order] for side in errors]
    at = range(len(order))
    ends = lengths if whiskers is None else [sum(pair) for pair in zip(lengths, whiskers[1], strict=True)]
    if min(lengths) > 0 and max(lengths) > FAR_APART * min(lengths):
        axes.set_xscale("log")
        axes.errorbar(lengths, at, xerr=whiskers, fmt="none", ecolor="black", elinewidth=0.8)
        axes.scatter(lengths, at, color=colors, s=36, zorder=3)
        axes.set_xlim(min(lengths) / 2, 8 * max(ends))
        axes.grid(axis="x", alpha=0.3)
        unit += " (log)"
    else:
        axes.barh(at, lengths, xerr=whiskers, color=colors, error_kw={"elinewidth": 0.8})
        axes.set_xlim(0, 1.25 * max(ends))
    for place, length, end in zip(at, lengths, ends, strict=True):
        axes.annotate(number(length), (end, place), (5, 0), textcoords="offset points", va="center", fontsize=LETTERS)
    axes.set_xlabel(unit)
    axes.set_yticks(at, names, fontsize=LETTERS)
    axes.set_ylim(len(order) - 0.4, -0.6)


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
        most = [max(map(len, groups[i : i + columns])) for i in range(0, len(groups), columns)]
        figure.set_size_inches(PAGE, sum(0.9 + 0.36 * count for count in most))
        places = figure.subplots(high, columns, squeeze=False, height_ratios=[1 + count for count in most]).flat
        for axes in places[len(groups) :]:
            axes.set_axis_off()
        for axes, group in zip(places, groups, strict=False):
            self._panel(axes, group)

    def _panel(self, axes: Any, rows: Rows) -> None:
        known = [(str(row[self.y]), row["gpu"] or row["wall"]) for row in rows if row[self.y] != self.line]
        shown = [
            (textwrap.fill(name, 20), stats["median"] / 1e3, BLUE if name.startswith(self.ours) else GRAY)
            for name, stats in known
        ]
        bars(axes, shown, "ms", spread([stats for _, stats in known], 1e3))
        floor = rows.number(lambda row: row["gpu"] or row["wall"], **{self.y: self.line})
        if floor is not None:
            axes.axvline(floor / 1e3, color=RED, linestyle="--", linewidth=1)
            axes.set_ylim(len(shown) + 0.2, -0.6)
            said = f" {self.line}, {number(floor / 1e3)}"
            axes.text(floor / 1e3, len(shown) - 0.1, said, color=RED, fontsize=LETTERS, va="center")
        title = ", ".join(str(rows[0][name]) for name in self.by)
        axes.set_title(textwrap.fill(title, NARROW), fontsize=LETTERS + 1)


@dataclass(frozen=True)
class Plot:
    """One PNG.

    Attributes:
        name: in the file's name.
        draw: into an empty matplotlib Figure, from rows; or panels, two beside each other where names are short.
        where: only rows with these values; nothing is drawn where there are none.
    """

    name: str
    draw: Callable[[Any, Rows], None] | Sequence[Lines]
    title: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path, rows: Rows) -> Path | None:
        """Draw to ``PATH-NAME.png``; returns the file, or None if there is nothing to draw or no matplotlib."""
        rows = rows.where(**self.where)
        figure = new_figure(PAGE, 5) if rows else None
        if figure is None:
            return None
        self.onto(figure, rows)
        return save(figure, self.target(path), rows)

    def onto(self, figure: Any, rows: Rows) -> None:
        """Draw into an empty matplotlib Figure."""
        if self.title:
            figure.suptitle(self.title, fontsize=LETTERS + 2)
        if callable(self.draw):
            self.draw(figure, rows)
        else:
            long = any(len(str(row[panel.each])) > SHORT for panel in self.draw for row in rows)
            columns = 1 if long or len(self.draw) == 1 else 2
            high = -(-len(self.draw) // columns)
            figure.set_size_inches(PAGE, 0.4 + 3.2 * high)
            for axes, panel in zip(figure.subplots(high, columns, squeeze=False).flat, self.draw, strict=False):
                panel.draw(axes, rows)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                plain_ticks(axis)

    def target(self, path: Path) -> Path:
        """The picture that belongs to a file of results."""
        return path.with_name(f"{path.stem}-{self.name}.png")


def save(figure: Any, target: Path, drawn: Any) -> Path:
    """Write a picture that says of which values it is made (see :func:`digest`)."""
    figure.savefig(target, dpi=DPI, metadata={"Source": digest(drawn)})
    return target


def digest(drawn: Any) -> str:
    """What a picture of these plain values bears, so that one of others is known to be stale."""
    return hashlib.sha256(as_json(drawn).encode()).hexdigest()[:16]


def plain_ticks(axis: Any) -> None:
    """On a logarithmic axis numbers as a person writes them, few enough to stand apart.

    Args:
        axis: of matplotlib, with its limits as they are to stay; left as it is where its ticks were chosen.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), FixedLocator):
        return
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1, 2, 5) if decades < NEAR else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_formatter(NullFormatter())


def label_beside(axes: Any, points: Sequence[tuple[float, float, str, str]], size: float = LETTERS) -> None:
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


def of_results(result: Mapping[str, Any], experiment: Experiment) -> list[tuple[Plot, Rows]]:
    """The pictures of what was measured, each with the rows that it is made of."""
    known = of_questions(result, experiment)
    return [(plot, known[q.name]) for q in experiment.questions if q.name in known for plot in q.listed("PLOTS")]


def draw_from(results: Path | None, folder: Path, experiment: Experiment) -> list[Path]:
    """Draw the pictures of a file of results, or else of the newest in a folder, beside it; returns them.

    Raises:
        SystemExit: there are no results, or no matplotlib.
    """
    path = results or newest(folder, experiment.name)
    if new_figure(1, 1) is None:
        refuse("there is no matplotlib: pip install matplotlib")
    plots = of_results(read(path, experiment), experiment)
    return [file for plot, found in plots if (file := plot.save(path, found))]
