"""Pictures that are kept: made of the results beside them, legible at 800 pixels, nothing on the curves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures
import pytest
from pictures import made_of, needs_matplotlib

from experiments.harness import question
from experiments.harness.main import KEPT, main
from experiments.harness.panels import COLORS, Bars, Lines, label_beside
from experiments.harness.plot import PAGE, WHISKERS, Plot, digest, of_results
from experiments.harness.rows import Rows, read
from pagedopt.commands.results import new_figure


def kept() -> Iterator[tuple[Path, Plot, Rows]]:
    """Every plot of every file of results that is kept, with what it shows."""
    for path in sorted(KEPT.glob("*.json")):
        if found := question.find(path.name.partition("-")[0]):
            for plot, rows in of_results(read(path, found[0]), found[0]):
                if rows := rows.where(**plot.where):
                    yield path, plot, rows


def drawn(plot: Plot, rows: Rows) -> Any:
    """Its figure."""
    figure = new_figure(PAGE, 5)
    plot.onto(figure, rows)
    return figure


def test_without_matplotlib_pictures_are_skipped_and_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "new_figure", lambda *_: None)
    monkeypatch.delenv("CI", raising=False)
    assert not pictures.can_draw()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="install matplotlib"):
        pictures.can_draw()


def test_a_picture_is_made_of_the_rows_that_are_kept() -> None:
    pictures = {plot.target(path): digest(rows) for path, plot, rows in kept()}
    assert len(pictures) >= 13
    stale = [path.name for path, wanted in pictures.items() if not path.exists() or made_of(path) != wanted]
    assert not stale, "python -m experiments NAME --draw [JSON]"


@needs_matplotlib
def test_drawing_again_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in_16_bits-nvidia-h200.json"
    path.write_text((KEPT / path.name).read_text())
    found = question.find("in_16_bits")
    assert found
    assert main(found[0], ["--draw", str(path)]) == 0
    picture = tmp_path / "in_16_bits-nvidia-h200-in-16-bits.png"
    assert str(picture) in capsys.readouterr().out
    assert made_of(picture) == made_of(KEPT / picture.name)
    known = json.loads(path.read_text())
    known["parts"]["in_16_bits"]["rows"][0]["wall"]["median"] *= 2
    path.write_text(json.dumps(known))
    main(found[0], ["--draw", str(path)])
    assert made_of(picture) != made_of(KEPT / picture.name)


@needs_matplotlib
def test_pictures_have_no_legend_and_say_which_axes_are_logarithmic() -> None:
    for path, plot, rows in kept():
        figure = drawn(plot, rows)
        assert figure.get_figwidth() == PAGE, (path, plot.name)
        for axes in figure.axes:
            assert axes.get_legend() is None, (path, plot.name)
            for scale, label in (
                (axes.get_xscale(), axes.get_xlabel()),
                (axes.get_yscale(), axes.get_ylabel() or axes.figure.axes[0].get_ylabel()),
            ):
                assert ("(log" in label) is (scale in ("log", "symlog")), (path, plot.name, label)


@needs_matplotlib
@pytest.mark.long
def test_numbers_at_an_axis_stand_apart() -> None:
    for path, plot, rows in kept():
        figure = drawn(plot, rows)
        figure.draw_without_rendering()
        for axes in figure.axes:
            for axis, low, high in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
                texts = [tick.label1 for tick in axis.get_major_ticks() + axis.get_minor_ticks()]
                inside = [text for text in texts if text.get_text() and text.get_visible() and in_view(axis, text)]
                boxes = sorted((text.get_window_extent() for text in inside), key=lambda box: getattr(box, low))
                for one, next_ in itertools.pairwise(boxes):
                    assert getattr(one, high) <= getattr(next_, low), (path.name, plot.name, axes.get_title())


def in_view(axis: Any, text: Any) -> bool:
    """Whether a number's tick lies within the axis."""
    low, high = sorted(axis.get_view_interval())
    return low <= text.get_position()[axis.axis_name == "y"] <= high


@needs_matplotlib
@pytest.mark.parametrize(
    ("lengths", "label"),
    [((3.0, 1.0, 70.0), "ms, wall"), ((3.0, 0.01, 70.0), "ms, wall (log)")],
    ids=["bars", "dots"],
)
def test_bars_are_sorted_and_their_numbers_stand_inside_the_frame(lengths: tuple[float, ...], label: str) -> None:
    figure = new_figure(PAGE, 2)
    axes = figure.subplots()
    times = [{"clock": "wall", "median": length, "p10": length, "p90": length + 10} for length in lengths]
    rows = Rows({"name": name, "time": time} for name, time in zip("abc", times, strict=True))
    Bars(title="three bars", name="name", length="time", unit="ms").onto(axes, rows)
    figure.draw_without_rendering()
    assert [name.get_text() for name in axes.get_yticklabels()] == ["b", "a", "c"]
    heights = [axes.transData.transform((1, y))[1] for y in axes.get_yticks()]
    assert heights == sorted(heights, reverse=True), "the shortest on top"
    frame = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1
    assert axes.get_xlabel() == label
    assert bool(axes.patches) is (label == "ms, wall"), "a bar has no length on a logarithmic axis"


@needs_matplotlib
@pytest.mark.parametrize("across", [0.05, 0.6, 1.1])
def test_what_a_line_across_bars_is_stands_inside_the_frame(across: float) -> None:
    figure = new_figure(PAGE, 2)
    axes = figure.subplots(1, 2)[0]
    rows = Rows([{"name": "a", "time": 1.0}, {"name": "copy of its bytes", "time": across}])
    Bars(title="a bar", name="name", length="time", line="copy of its bytes").onto(axes, rows)
    figure.draw_without_rendering()
    box, frame = axes.texts[-1].get_window_extent(), axes.get_window_extent()
    assert frame.x0 <= box.x0 <= box.x1 <= frame.x1


@needs_matplotlib
def test_lines_of_a_panel_have_colours_of_their_own() -> None:
    for path, plot, rows in kept():
        for panel in () if callable(plot.draw) else plot.draw:
            if isinstance(panel, Lines) and not panel.colors:
                names = {str(row[panel.each]) for row in rows.where(**panel.where)}
                assert len(names) <= len(set(COLORS)), (path, plot.name)


@needs_matplotlib
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_picture_says_what_its_whiskers_are(spread: float) -> None:
    time = {"clock": "wall", "median": 3.0, "p10": 3.0 - spread, "p90": 3.0} if spread else 3.0
    rows = Rows([{"name": "a", "time": time}])
    figure = drawn(Plot("one", [Bars(title="a bar", name="name", length="time")]), rows)
    assert (figure.get_supxlabel() == WHISKERS) is bool(spread)


@needs_matplotlib
def test_a_bar_is_solid_as_far_as_its_first_part_and_its_numbers_lie_within() -> None:
    axes = new_figure(PAGE, 2).subplots()
    rows = Rows([{"name": "a", "time": 140, "alone": 50}, {"name": "b", "time": 60, "alone": None}])
    Bars(title="two bars", name="name", length="time", first="alone").onto(axes, rows)
    whole, first = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert (whole, first) == ([60, 140], [0, 50])
    assert [bar.get_alpha() or bar.get_facecolor()[3] for bar in axes.containers[0]] == [1, pytest.approx(0.35)]
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["50.0", "60.0", "140"]


@needs_matplotlib
def test_names_beside_a_panel_do_not_lie_on_each_other() -> None:
    from matplotlib.text import Text

    figure = new_figure(PAGE, 3)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1])
    label_beside(axes, [(1, 0.5 + i / 1000, name, "black") for i, name in enumerate("abcd")])
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: float(box.y0))
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))
    assert min(box.x0 for box in boxes) > axes.get_window_extent().x1


@needs_matplotlib
@pytest.mark.long
def test_pictures_are_drawn_as_they_would_be_today(tmp_path: Path) -> None:
    """To the pixel, where this is the matplotlib that drew them."""
    from matplotlib import __version__, image

    for path, plot, rows in kept():
        picture = plot.target(path)
        if f"Matplotlib version{__version__}".encode() in picture.read_bytes():
            again = plot.save(tmp_path / path.name, rows)
            assert again
            assert (image.imread(again) == image.imread(picture)).all(), f"{picture.name}: --draw, and look at it"
