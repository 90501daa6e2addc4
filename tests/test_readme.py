"""The front page: its figures come from results that are kept, its commands and links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
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


@pytest.mark.parametrize(
    ("part", "column", "filled"),
    [("paged_state.rivals", "wall", "memory and time"), ("seven_billion.seven_billion", "time", "numbers")],
)
def test_another_measurement_makes_another_page(part: str, column: str, filled: str, tmp_path: Path) -> None:
    kept = Results().folder
    for name in ("paged_state", "fused_step", "in_8_bits", "in_16_bits", "captured_step",
                 "optimizer_ladder", "seven_billion"):  # fmt: skip
        for measured in kept.glob(f"{name}-nvidia-h[12]00*.json"):
            shutil.copy(measured, tmp_path)
    name, _, part = part.partition(".")
    path = tmp_path / f"{name}-nvidia-h200.json"
    found = json.loads(path.read_text())
    for row in found["parts"][part]["rows"]:
        row[column] = {key: value if key == "clock" else 2 * value for key, value in row[column].items()}
    path.write_text(json.dumps(found))
    before, after = (readme.blocks(results) for results in (Results(), Results(tmp_path)))
    assert [block for block in before if before[block] != after[block]] == [filled]
    pictured = digest(readme.of_one_run(Results(tmp_path))) == made_of(readme.PICTURE)
    assert pictured is (name != "paged_state")


def test_one_clock_times_all_and_what_is_no_step_is_said() -> None:
    rows = readme.budgets(Results())
    assert set(readme.RIVALS.values()) < set(rows.values("name"))
    shown = ("paged_state.sweep", "paged_state.rivals", "in_8_bits.in_8_bits")
    known = [row for part in shown for row in readme.asked(Results(), part)]
    walls = {row["wall"]["median"] / 1e3 for row in known if row.get("wall")}
    assert {row["ms"] for row in rows} <= walls
    parts = {row["name"]: row["alone"] for row in rows if row["alone"]}
    assert set(parts) == {readme.RIVALS[name] for name in (readme.RIVAL, readme.RIVAL_8BIT)}
    assert set(parts.values()) <= walls
    text = readme.blocks(Results())["memory and time"]
    assert "ms a step, wall |" in text
    assert text.count("its step alone") == len(parts)


def table(name: str) -> list[dict[str, str]]:
    """A row per line of a table."""
    lines = [line[2:-2].split(" | ") for line in readme.blocks(Results())[name].splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_what_is_more_than_a_step_is_called_so() -> None:
    (row,) = readme.asked(Results(), "paged_state.rivals").where(name=readme.OFFLOAD)
    assert readme.RIVALS[readme.OFFLOAD] == f"{readme.OFFLOAD}, {row['what']}"
    assert readme.RIVALS[readme.OFFLOAD] in readme.blocks(Results())["memory and time"]


def test_steps_of_two_processes_are_compared_by_the_gpu() -> None:
    by_name = {row["name"]: row for row in readme.budgets(Results())}
    ours, fused = by_name[readme.HERE[1.0]], by_name["torch fused"]
    times = f"{fused['gpu_ms'] / ours['gpu_ms']:.2f} times as long as ours.\n"
    assert f"By the GPU torch's fused step takes {times}" in readme.blocks(Results())["memory and time"]


def test_a_plan_stands_beside_what_steps_reach() -> None:
    shares = readme.reached(Results())
    assert all(0.5 < share < 1 for share in shares.values())
    wanted = [shares["resident"], shares["away"], shares["away"], shares["int8"]]
    for row, share in zip(table("seven billion"), wanted, strict=True):
        _, _, _, rates, steps, _ = row.values()
        assert float(steps) == pytest.approx(float(rates) / share, rel=0.01)


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
