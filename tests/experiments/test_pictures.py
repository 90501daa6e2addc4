"""Pictures that are kept: made of the results beside them, with labels and without a legend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures
import pytest
from pictures import made_of, needs_matplotlib

from experiments.harness import question
from experiments.harness.main import KEPT, main
from experiments.harness.panels import Bars
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
@pytest.mark.parametrize(("least", "label"), [(1.0, "ms, wall"), (0.01, "ms, wall (log)")], ids=["bars", "dots"])
def test_bars_are_sorted_and_their_axis_is_named(least: float, label: str) -> None:
    axes = new_figure(PAGE, 2).subplots()
    rows = Rows({"name": name, "time": {"clock": "wall", "median": time, "p10": time, "p90": time + 10}}
                for name, time in zip("abc", (3.0, least, 70.0), strict=True))  # fmt: skip
    Bars(title="three bars", name="name", length="time", unit="ms").onto(axes, rows)
    assert [name.get_text() for name in axes.get_yticklabels()] == ["b", "a", "c"]
    assert axes.get_xlabel() == label
    assert bool(axes.patches) is (label == "ms, wall"), "a bar has no length on a logarithmic axis"


@needs_matplotlib
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_picture_says_what_its_whiskers_are(spread: float) -> None:
    time = {"clock": "wall", "median": 3.0, "p10": 3.0 - spread, "p90": 3.0} if spread else 3.0
    rows = Rows([{"name": "a", "time": time}])
    figure = drawn(Plot("one", [Bars(title="a bar", name="name", length="time")]), rows)
    assert (figure.get_supxlabel() == WHISKERS) is bool(spread)


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
