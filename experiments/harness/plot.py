"""Pictures as values, of panels one above or beside the other.  matplotlib is an extra: without it nothing is drawn.

A picture is as wide as a page shows it, so that its letters stay legible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.panels import GRAY, LETTERS, NARROW, WIDE, Panel
from experiments.harness.question import Experiment
from experiments.harness.revision import refuse
from experiments.harness.rows import Rows, newest, of_questions, read
from pagedopt.commands.results import as_json, new_figure

#: Inches, and dots in one of them: 800 pixels wide a letter of 9 points is 12 pixels high.
PAGE, DPI = 8.0, 150
WHISKERS = "whiskers: from the 10th to the 90th percentile"


@dataclass(frozen=True)
class Plot:
    """One PNG.

    Attributes:
        name: in the file's name.
        draw: into an empty matplotlib Figure, from rows; or panels, two beside each other where names are short.
        by: the panels are drawn for each group of rows that are alike in these columns.
        where: only rows with these values; nothing is drawn where there are none.
    """

    name: str
    draw: Callable[[Any, Rows], None] | Sequence[Panel]
    title: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    by: Sequence[str] = ()

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
            figure.suptitle(self.title.format_map(rows[0]), fontsize=LETTERS + 2)
        if callable(self.draw):
            self.draw(figure, rows)
        else:
            groups = list(rows.groups(*self.by))
            shown = [(panel, group) for group in groups for panel in self.draw if group.where(**panel.where)]
            self._panels(figure, shown)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                plain_ticks(axis)
        if any(has_whiskers(axes) for axes in figure.axes):
            figure.supxlabel(WHISKERS, fontsize=LETTERS - 1, color=GRAY)

    def _panels(self, figure: Any, panels: Sequence[tuple[Panel, Rows]]) -> None:
        columns = 1 if len(panels) == 1 or any(panel.is_wide(group) for panel, group in panels) else 2
        lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
        heights = [max(panel.height(group) for panel, group in line) for line in lines]
        figure.set_size_inches(PAGE, (0.4 if self.title else 0.0) + sum(heights))
        places = list(figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights).flat)
        for axes, (panel, group) in zip(places, panels, strict=False):
            panel.onto(axes, group, WIDE if columns == 1 else NARROW)
        for axes in places[len(panels) :]:
            axes.set_axis_off()

    def target(self, path: Path) -> Path:
        """The picture that belongs to a file of results."""
        return path.with_name(f"{path.stem}-{self.name}.png")


def has_whiskers(axes: Any) -> bool:
    """Whether spreads are drawn."""
    from matplotlib.container import ErrorbarContainer

    return any(isinstance(drawn, ErrorbarContainer) and (drawn.has_xerr or drawn.has_yerr) for drawn in axes.containers)


def save(figure: Any, target: Path, drawn: Any) -> Path:
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
