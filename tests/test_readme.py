"""The front page: its figures come from results that are kept, its commands and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from command_line import Program
from experiment_runs import clocks, emptied, made_of, undated
from paths import ROOT

from experiments import readme
from experiments.__main__ import main as experiments
from experiments.kept import NOTES
from experiments.lab import Rows
from experiments.lecture.page import Results
from experiments.pictures import digest

sys.path.append(str(ROOT / "scripts"))
import drawings

PAGES = ["README.md", "notes/usage.md", "notes/setup.md", "notes/migrating.md", "notes/options.md",
         "notes/methods.md", "notes/README.md"]  # fmt: skip
TEXT = (ROOT / "README.md").read_text()
#: Of the pages that are filled together.
TEXTS = {page: (ROOT / page).read_text() for page in readme.PAGES}
#: What was measured, in any of its units.
FIGURE = re.compile(r"\d(?:[\d.,]*\d)? ?(?:ms|µs|seconds?|[GMT]i?B/s|%(?! of)| times\b|x faster|tokens)")


def test_the_figures_come_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    for page, text in TEXTS.items():
        (tmp_path / page).write_text(emptied(text))
        assert emptied(text) != text
    monkeypatch.setattr(readme, "FOLDER", tmp_path)
    monkeypatch.setattr(readme, "PICTURE", tmp_path / "budgets.png")
    assert experiments(["readme"]) == 0
    for page, text in TEXTS.items():
        assert undated((tmp_path / page).read_text()) == undated(text), "python -m experiments readme"


def test_the_picture_is_made_of_what_is_kept() -> None:
    assert f"](../{readme.PICTURE.relative_to(ROOT)})" in TEXTS["notes/usage.md"]
    assert made_of(readme.PICTURE) == digest(readme.of_one_run(Results())), "python -m experiments readme"


def test_drawings_are_those_of_today_s_code() -> None:
    for name, draw in drawings.DRAWINGS.items():
        assert (drawings.FOLDER / f"{name}.svg").read_text() == draw(), "python scripts/drawings.py"
    assert {path.stem for path in drawings.FOLDER.iterdir()} == set(drawings.DRAWINGS)


@pytest.mark.parametrize("page", readme.PAGES)
def test_no_figure_stands_outside_of_what_is_filled(page: str) -> None:
    """But for what a user writes, in code."""
    text = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", emptied(TEXTS[page]), flags=re.M | re.S)
    assert not FIGURE.findall(text)
    assert FIGURE.findall("it is 16 % slower and takes 3.25 times as long"), "the pattern finds some"


def test_the_card_of_24_gb_is_reckoned_as_plan_does(program: Program) -> None:
    shown = [line.split(" | ") for line in readme.seven_billion(Results()).splitlines() if line.startswith("| ")][1:]
    for options, line in (("", shown[0]), ("--budget 0", shown[1])):
        said = program.says("plan", "--params", "7B", "--param-dtype", "bfloat16", *options.split())
        assert f"{line[1]} GiB" in said
    fits = [line[2] != "does not fit" for line in shown]
    assert fits == [float(line[1]) < 24 for line in shown] == [False, False, True, True]


@pytest.mark.parametrize(("ours", "whose"), [(500.0, "ours"), (900.0, "torch's")])
def test_the_shorter_step_is_told_by_its_gpu_time(ours: float, whose: str) -> None:
    rows = Rows([{"case": "PagedAdamW", **clocks(99.0, ours)}, {"case": "torch fused", **clocks(1.0, 700.0)}])
    assert readme.shorter(rows) == whose


def test_plans_that_are_shown_are_made(program: Program) -> None:
    lines = re.findall(r"^    pagedopt (plan .*?)(?:  +#.*)?$", "".join(TEXTS.values()), re.M)
    assert lines
    for line in lines:
        assert "GiB" in program.says(*shlex.split(line))


def test_targets_that_are_named_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"make ([a-z][a-z-]*)", (ROOT / page).read_text())}
    assert {"train", "test"} <= named <= targets


@pytest.mark.parametrize("page", ["README.md", *(f"notes/{path.name}" for path in sorted(NOTES.glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            known = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in known, target


def test_the_front_page_is_short_and_in_order() -> None:
    """What it is, picture, table, code, install, what to take; only then the rest."""
    assert len(TEXT.split()) <= 900
    wanted = ["](experiments/results/seven_billion-nvidia-h200-speed-and-memory.png)", "<!-- begin numbers -->",
              "```python", "pip install -e", "    make train", "    make test", "| you have | use |",
              "## What it is not for", "## How it works", "## Read on"]  # fmt: skip
    places = [TEXT.index(words) for words in wanted]
    assert places == sorted(places)


def test_the_front_page_s_table_is_of_one_run() -> None:
    table, run = readme.blocks(Results(), "README.md")["numbers"], Results().of("seven_billion")
    assert run is not None
    machine = run["machine"]
    assert f"one {machine['gpu']}:" in table
    assert f"{machine['when'][:10]}, torch {machine['versions']['torch']}" in table
    assert table.count("measured at") == 1
    rows = readme.asked(Results(), "seven_billion.seven_billion")
    for case, name in readme.FINETUNES.items():
        (row,) = rows.where(case=case, batch=4, card="")
        assert f"| {name} | {row['taken']:.1f} | {row['tokens_s']:,.0f} |" in table
