"""Pictures, of panels one above or beside the other: lines with their spread, and bars.

Names stand at what they name, in its colour; an axis says its clock, its unit and whether it is logarithmic; bars begin
at 0, stand in the order of their lengths and have their numbers inside the frame.  A picture is as wide as a page shows
it, so that its letters stay legible.  matplotlib is an extra: without it nothing is drawn.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.clock import Series
from experiments.json_text import as_json
from experiments.lab import Column, Page, Row, Rows, cell, number, number_in
from pagedopt.commands.tables import new_figure

#: Inches, and dots in one of them: 800 pixels wide a letter of 9 points is 12 pixels high.
PAGE, DPI = 8.0, 150
WHISKERS = "whiskers: from the 10th to the 90th percentile"

#: Colours that the colour-blind can tell apart (Okabe and Ito 2008), orange and purple dark enough for letters.
BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = "#0072B2", "#B37400", "#009E73", "#D55E00", "#AA5588", "#6E6E6E"
SKY = "#45A5DE"
#: What lines of one panel are told apart by, where they lie on each other, too.
COLORS, MARKERS = (BLUE, ORANGE, GREEN, RED, PURPLE, GRAY, "black", SKY), "osD^v<>p"
LETTERS = 9.0
#: Letters of a title that fit over a panel and over one of two, and of a name that fit beside the latter.
WIDE, NARROW, SHORT = 76, 30, 16
#: Around a number that a line would run through.
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
#: Bars with lengths so far apart are dots over a logarithmic axis: a bar has no length there.
FAR_APART = 100.0


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: with fields of the first row, as "{work}".
        unit: of what is drawn; behind it stands the clock.
        colors: of names; by default each has the next colour.
        where: only rows with these values.
        inches: the height, where it does not follow from the rows.
    """

    title: str
    unit: str = "µs"
    colors: Callable[[str], str] | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    inches: float = 3.2

    def onto(self, axes: Any, rows: Rows, letters: int = WIDE) -> None:
        """Draw into a matplotlib Axes, under the title, of which so many letters stand in one line."""
        rows = rows.where(**self.where)
        axes.set_title(textwrap.fill(self.title.format_map(rows[0]), letters), fontsize=LETTERS + 1)
        self.draw(axes, rows)

    def draw(self, axes: Any, rows: Rows) -> None:
        """Draw rows of the panel."""
        raise NotImplementedError

    def height(self, rows: Rows) -> float:
        """Inches."""
        return self.inches

    def is_wide(self, rows: Rows) -> bool:
        """Whether nothing has room beside it."""
        return False

    def labelled(self, clock: str, log: bool = False) -> str:
        """The unit, the clock and the kind of an axis."""
        return ", ".join(filter(None, (self.unit, clock))) + (" (log)" if log else "")


@dataclass(frozen=True, kw_only=True)
class Lines(Panel):
    """A line per value of a column, with its spread where it is of series; who has one point is a mark.

    Attributes:
        x, y: columns of numbers or series; rows without one are not drawn.
        each: a line for each of its values, which is its name.
        label: what ``x`` counts.
        log: the logarithmic axes: "xy", "x", "y" or "".
        zero: the axes that begin at 0: "xy", "x" or "".
        level: a name, and a column whose number in the first row is drawn as a line across.
    """

    x: Column
    y: Column
    each: str
    label: str = ""
    log: str = "xy"
    zero: str = ""
    level: tuple[str, Column] | None = None

    def is_wide(self, rows: Rows) -> bool:
        """Where a name is long."""
        return any(len(str(row[self.each])) > SHORT for row in rows)

    def draw(self, axes: Any, rows: Rows) -> None:
        """Each line, and its name beside its end."""
        for axis in self.log:
            getattr(axes, f"set_{axis}scale")("log")
        for axis, most in zip("xy", map(max, list(zip(*self.points(rows), strict=True))[:2]), strict=True):
            if axis in self.zero:  # now: names are put beside the axes
                getattr(axes, f"set_{axis}lim")(-0.02 * most, 1.05 * most)
        ends = [self.line(axes, i, group) for i, group in enumerate(rows.groups(self.each)) if self.points(group)]
        if self.level and ends:
            height = number_in(rows[0], self.level[1]) or 0.0
            axes.axhline(height, color=RED, linestyle="--", linewidth=1)
            ends.append((max(end[0] for end in ends), height, self.level[0], RED))
        axes.grid(alpha=0.3)
        axes.set_xlabel((self.label or str(self.x)) + (" (log)" if "x" in self.log else ""))
        axes.set_ylabel(self.labelled(clock_of(rows, self.y), "y" in self.log))
        label_beside(axes, ends)

    def points(self, rows: Rows) -> list[tuple[float, float, Any]]:
        """(x, y, cell of y), from left to right."""
        known = ((number_in(row, self.x), number_in(row, self.y), cell(row, self.y)) for row in rows)
        return sorted(((x, y, of) for x, y, of in known if x is not None and y is not None), key=lambda point: point[0])

    def line(self, axes: Any, i: int, rows: Rows) -> tuple[float, float, str, str]:
        """Draw the line ``i``; returns its end, its name and its colour."""
        across, up, cells = zip(*self.points(rows), strict=True)
        name, style = str(rows[0][self.each]), look(i)
        style |= {"color": self.colors(name)} if self.colors else {}
        errors = spread(cells) if isinstance(cells[0], Mapping) else None
        axes.errorbar(across, up, yerr=errors, linewidth=1.2, markersize=4.5, **style)
        return across[-1], up[-1], name, style["color"]


@dataclass(frozen=True, kw_only=True)
class Bars(Panel):
    """Horizontal bars, the shortest on top, each with its number, and with its spread if it is a series.

    Attributes:
        name: what stands beside a bar.
        length: a column of numbers or of series.
        scale: lengths are divided by it.
        line: the name of the row that is drawn as a line across the others.
        first: how much of a length is solid, with its number, and the rest pale; without one all is solid.
        wrap: letters of a name that stand in one line.
    """

    name: Column
    length: Column
    scale: float = 1.0
    line: str = ""
    first: Column = ""
    wrap: int = 20

    def height(self, rows: Rows) -> float:
        """By the number of bars, and by the lines that the longest name has."""
        shown = rows.where(**self.where)
        lines = max(len(textwrap.wrap(str(cell(row, self.name)), self.wrap)) for row in shown)
        return 0.9 + max(0.36, 0.04 + 0.155 * lines) * len(shown)

    def draw(self, axes: Any, rows: Rows) -> None:
        """The bars, and the line across them."""
        known = {str(cell(row, self.name)): row for row in rows if number_in(row, self.length) is not None}
        floor = known.pop(self.line, None)
        names = sorted(known, key=lambda name: self.scaled(known[name], self.length))
        shown, at = [self.scaled(known[name], self.length) for name in names], range(len(names))
        cells = [cell(known[name], self.length) for name in names]
        errors = spread(cells, self.scale) if isinstance(cells[0], Mapping) else None
        ends = [length + (errors[1][i] if errors else 0.0) for i, length in enumerate(shown)]
        colors = [self.colors(name) if self.colors else BLUE for name in names]
        log = 0 < FAR_APART * shown[0] < shown[-1]
        if log:
            axes.set_xscale("log")
            axes.errorbar(shown, at, xerr=errors, fmt="none", ecolor="black", elinewidth=0.8)
            axes.scatter(shown, at, color=colors, s=36, zorder=3)
            axes.set_xlim(shown[0] / 2, 8 * max(ends))
            axes.grid(axis="x", alpha=0.3)
        else:
            stacked(axes, shown, [self.scaled(known[name], self.first) for name in names], colors, errors)
            axes.set_xlim(0, 1.25 * max(ends))
        beside = {"textcoords": "offset points", "va": "center", "fontsize": LETTERS, "bbox": CLEAR}
        for height, length, end in zip(at, shown, ends, strict=True):
            axes.annotate(number(length), (end, height), (5, 0), **beside)
        axes.set_xlabel(self.labelled(clock_of(rows, self.length), log))
        axes.set_yticks(at, [textwrap.fill(name, self.wrap) for name in names], fontsize=LETTERS)
        axes.set_ylim(len(names) - 0.4, -0.6)
        if floor is not None:
            axes.axvline(across := self.scaled(floor, self.length), color=RED, linestyle="--", linewidth=1)
            axes.set_ylim(len(names) + 0.2, -0.6)
            name_below(axes, across, len(names) - 0.1, f" {self.line}, {number(across)} ")

    def scaled(self, row: Row, column: Column) -> float:
        """A cell as long as it is drawn; 0 where the row has no number."""
        return (number_in(row, column) or 0.0) / self.scale


@dataclass(frozen=True, kw_only=True)
class Matrix(Panel):
    """A square for each row of results, green, red or yellow by its text, which is not written where it is good.

    What is ``fine`` is green, and written.

    Attributes:
        down, across: columns whose values are the lines and the columns of the matrix.
        hatch: of a row, whether its square is hatched.
    """

    down: str
    across: str
    text: str
    good: Sequence[str] = ()
    fine: Sequence[str] = ()
    bad: Sequence[str] = ()
    hatch: Callable[[Row], bool] = lambda row: False

    def height(self, rows: Rows) -> float:
        """By the number of lines."""
        return 1.2 + 0.36 * len(rows.values(self.down))

    def draw(self, axes: Any, rows: Rows) -> None:
        """The squares."""
        down, across = rows.values(self.down), rows.values(self.across)
        for row in rows:
            y, x, text = down.index(row[self.down]), across.index(row[self.across]), str(row[self.text])
            color = "#A8DCC8" if text in (*self.good, *self.fine) else "#F2B8A0" if text in self.bad else "#E8E0A0"
            hatch = "//" if self.hatch(row) else ""
            axes.barh(y, 1, left=x, height=1, color=color, edgecolor="white", hatch=hatch)
            axes.text(x + 0.5, y, "" if text in self.good else textwrap.fill(text, 14), ha="center", va="center",
                      fontsize=LETTERS - 2)  # fmt: skip
        names = [[name.replace(", ", ",\n") for name in names] for names in (down, across)]
        axes.set_yticks(range(len(down)), names[0], fontsize=LETTERS - 2)
        axes.set_xticks([x + 0.5 for x in range(len(across))], names[1], fontsize=LETTERS - 2, rotation=90)
        axes.set_xlim(0, len(across))
        axes.set_ylim(len(down) - 0.5, -0.5)


def stacked(axes: Any, lengths: list[float], firsts: list[float], colors: list[str], errors: Any = None) -> None:
    """Bars whose first parts are solid, with their numbers, and the rest pale; without a first part all is solid."""
    pale = [(color, 0.35 if first else 1.0) for color, first in zip(colors, firsts, strict=True)]
    axes.barh(range(len(lengths)), lengths, xerr=errors, color=pale, error_kw={"elinewidth": 0.8})
    solid, shown = axes.barh(range(len(lengths)), firsts, color=colors), [number(x) if x else "" for x in firsts]
    axes.bar_label(solid, shown, label_type="center", color="white", fontsize=LETTERS)


def name_below(axes: Any, across: float, height: float, name: str) -> None:
    """Write what a line across bars is on the side of it that has room, or else over it."""
    place = float((axes.transData - axes.transAxes).transform((across, height))[0])
    place, side = (place, "left") if place < 0.2 else (place, "right") if place > 0.8 else (0.5, "center")
    about = {"color": RED, "fontsize": LETTERS, "va": "center", "ha": side, "bbox": CLEAR}
    axes.text(place, height, name, transform=axes.get_yaxis_transform(), **about)


def clock_of(rows: Rows, column: Column) -> str:
    """The clock of a column: of its series, or that which its rows name; "" where it is of no time."""
    found = next((value for row in rows if (value := cell(row, column)) is not None), None)
    return str(found["clock"] if isinstance(found, Mapping) else rows[0].get("clock", ""))


def look(i: int) -> dict[str, str]:
    """Colour and marker of the line ``i`` of a panel; a hollow marker shows what lies beneath it."""
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "fillstyle": "none"}


def spread(measured: Sequence[Series], unit: float = 1.0) -> list[list[float]]:
    """How far below and above their medians most of them lie."""
    return [[abs(found[end] - found["median"]) / unit for found in measured] for end in ("p10", "p90")]


def label_beside(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names in a column to the right of the axes, each joined with its point; none lies on another.

    Args:
        axes: of matplotlib, with its limits and scales as they are to stay.
        points: (x, y, name, colour).
    """
    axes.get_xlim(), axes.get_ylim()  # settles what lies where in the axes
    place = axes.transData + axes.transAxes.inverted()
    ordered = sorted(((float(place.transform(point[:2])[1]), *point) for point in points), key=lambda p: p[0])
    step = LETTERS * 1.4 / 72 * axes.figure.dpi / axes.get_window_extent().height
    heights = spaced([point[0] for point in ordered], step)
    for (_, x, y, name, color), height in zip(ordered, heights, strict=True):
        axes.annotate(
            name, (x, y), (1.03, height), "data", "axes fraction", fontsize=LETTERS, color=color, va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.45, "linewidth": 0.7, "relpos": (0, 0.5)},
        )  # fmt: skip


def spaced(wanted: Sequence[float], step: float) -> list[float]:
    """Heights near those wanted (rising), at least ``step`` apart, between 0 and 1 as far as there is room."""
    found: list[float] = []
    for height in wanted:
        found.append(max(height, found[-1] + step if found else 0.0))
    ceiling = 1.0
    for i in reversed(range(len(found))):
        found[i] = min(found[i], ceiling)
        ceiling = found[i] - step
    return found


# --- whole pictures


def save_all(page: Page, path: Path) -> list[Path]:
    """Draw the pictures of a page to ``PATH-NAME.png``; returns the files, none without matplotlib."""
    found = []
    for name, rows, draw, title, by in page.pictures:
        if (figure := new_figure(PAGE, 5)) is not None:
            onto(figure, rows, draw, title, by)
            found.append(save(figure, path.with_name(f"{path.stem}-{name}.png"), rows))
    return found


def onto(figure: Any, rows: Rows, draw: Any, title: str = "", by: Sequence[str] = ()) -> None:
    """Draw into an empty Figure: by a function of it and the rows, or panels, for each group alike in ``by``."""
    if title:
        figure.suptitle(title.format_map(rows[0]), fontsize=LETTERS + 2)
    if callable(draw):
        draw(figure, rows)
    else:
        shown = [(panel, group) for group in rows.groups(*by) for panel in draw if group.where(**panel.where)]
        columns = 1 if len(shown) == 1 or any(panel.is_wide(group) for panel, group in shown) else 2
        lines = [shown[i : i + columns] for i in range(0, len(shown), columns)]
        heights = [max(panel.height(group) for panel, group in line) for line in lines]
        figure.set_size_inches(PAGE, (0.4 if title else 0.0) + sum(heights))
        places = list(figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights).flat)
        for axes, (panel, group) in zip(places, shown, strict=False):
            panel.onto(axes, group, WIDE if columns == 1 else NARROW)
        for axes in places[len(shown) :]:
            axes.set_axis_off()
    for axes in figure.axes:
        plain_ticks(axes.xaxis)
        plain_ticks(axes.yaxis)
    if any(has_whiskers(axes) for axes in figure.axes):
        figure.supxlabel(WHISKERS, fontsize=LETTERS - 1, color=GRAY)


def has_whiskers(axes: Any) -> bool:
    """Whether spreads are drawn."""
    from matplotlib.container import ErrorbarContainer

    return any(isinstance(drawn, ErrorbarContainer) and (drawn.has_xerr or drawn.has_yerr) for drawn in axes.containers)


def save(figure: Any, target: Path, drawn: Iterable[Any]) -> Path:
    """Write a picture that says of which values it is made (see :func:`digest`)."""
    figure.savefig(target, dpi=DPI, metadata={"Source": digest(drawn)})
    return target


def digest(drawn: Any) -> str:
    """What a picture of these plain values bears, so that one of others is known to be stale."""
    return hashlib.sha256(as_json(drawn).encode()).hexdigest()[:16]


def plain_ticks(axis: Any) -> None:
    """On a logarithmic axis, its limits settled, numbers as a person writes them, few enough to stand apart.

    Ticks that were chosen stay where they are.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,.12g}")
    if axis.get_scale() == "symlog":
        axis.set_major_formatter(plain)
    if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), FixedLocator):
        return
    low, high = axis.get_view_interval()
    few_decades = math.log10(high / low) < 2.5
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,), numticks=12))
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(NullFormatter())
