"""The page of claims: every id, every number from a JSON, the same page again; verdicts that can turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from lecture_rows import MADE, PINNED, TORCH, Row, gpt2, listed
from paths import ROOT

from experiments.harness import question
from experiments.harness.rows import Rows
from experiments.lecture import page, readings
from experiments.lecture.claims import LATER, NOT_HERE, NOT_YET, VERDICTS, Claim, Reading, Said, claims
from experiments.lecture.readings import READINGS

IDS = [f"{letter}{n}" for letter, last in (("A", 37), ("C", 14), ("D", 12)) for n in range(1, last + 1)]
CLAIMS = {claim.id: claim for claim in claims()}


def test_every_claim_is_there_once() -> None:
    assert [claim.id for claim in claims()] == IDS
    lines = Counter(re.findall(r"^\| ([ACD]\d+) \|", page.page(), re.MULTILINE))
    assert lines == Counter(IDS)


def test_the_page_comes_out_again() -> None:
    assert page.page() == (ROOT / "notes" / "lecture.md").read_text(), "python -m experiments lecture"


def test_who_shows_a_claim_is_there_or_will_be() -> None:
    looked = 0
    for claim in CLAIMS.values():
        assert (claim.reading is not None or claim.id in READINGS) is bool(claim.shown), claim.id
        if claim.shown and (found := question.find(claim.experiment)):
            looked += 1
            assert claim.shown.partition(".")[2] in [q.name for q in found[0].questions], claim.shown
        if claim.later:
            assert question.find(claim.later) is None, f"{claim.id}: {claim.later} is here"
    assert looked >= 8
    assert not {claim.id for claim in CLAIMS.values() if claim.id in READINGS and claim.reading}


def test_every_number_comes_from_a_json() -> None:
    """What a line shows is in its rows, and another measurement shows another number."""
    results = page.Results()
    shown = 0
    for claim in CLAIMS.values():
        rows = results.rows(claim.shown) if claim.shown else None
        said = page.reading(claim)(rows) if rows else None
        if said is None:
            assert page.line(claim, results).ours == ""
            continue
        shown += 1
        assert page.line(claim, results).ours == said.words
        for value in said.values.values():
            if isinstance(value, float):
                other = page.reading(claim)(Rows(scaled(row) for row in rows))
                assert other is None or other.words != said.words, claim.id
                break
    assert shown >= 5


def scaled(row: Row) -> Row:
    """A row whose measured numbers are 7 times as large."""
    return {
        name: {key: 7 * number for key, number in cell.items()} if isinstance(cell, dict) and "median" in cell
        else 7 * cell if isinstance(cell, float) else cell
        for name, cell in row.items()
    }  # fmt: skip


def test_a_text_has_no_number_of_its_own() -> None:
    with pytest.raises(ValueError, match="has a number that comes from no row"):
        Said("16 kernels", True)
    with pytest.raises(ValueError, match="has a number"):
        Reading({}, "{kernels} of 36", ("kernels", "==", 36))(Rows([{"kernels": 36}]))
    said = Said("GPT-2: {ms} ms in {kernels} kernels: {text}", True, {"ms": 1.23456, "kernels": 1234, "text": "a\nb"})
    assert said.words == "GPT-2: 1.23 ms in 1,234 kernels: a"


def test_a_claim_says_where_it_is_shown() -> None:
    about = {"claim": "c", "number": "", "source": "000"}
    for wrong in (
        {},
        {"shown": "a.b", "later": "c"},
        {"not_here": "no time"},
        {"shown": "a.b", "verdicts": ["true", "?"]},
    ):
        with pytest.raises(ValueError, match="X1: "):
            Claim("X1", **about, **wrong)
    assert page.line(Claim("X1", **about, not_here="the talk's logistics"), page.Results()).verdict.startswith(NOT_HERE)
    assert page.line(Claim("X1", **about, later="copies"), page.Results()).verdict == LATER


def test_results_that_are_not_there_are_not_measured_yet(tmp_path: Path) -> None:
    empty = page.Results(tmp_path)
    verdicts = {page.line(claim, empty).verdict for claim in CLAIMS.values()}
    assert verdicts == {LATER, NOT_YET}
    kept = json.loads((ROOT / "experiments" / "results" / "pointer_transports-nvidia-h200.json").read_text())
    (tmp_path / "pointer_transports-cpu.json").write_text(json.dumps(kept))
    assert page.Results(tmp_path).rows("pointer_transports.attempts") is None, "claims are about GPUs"
    dirty = {**kept, "machine": {**kept["machine"], "commit": "abc1234", "dirty": True}}
    (tmp_path / "pointer_transports-gpu.json").write_text(json.dumps(dirty))
    with pytest.raises(SystemExit):
        page.Results(tmp_path).rows("pointer_transports.attempts")


# --- what rows say


@pytest.mark.parametrize("name", MADE)
def test_a_verdict_can_turn(name: str) -> None:
    claim = CLAIMS[name]
    for rows, holds in zip(MADE[name], (True, False), strict=True):
        said = page.reading(claim)(Rows(rows))
        assert said is not None
        assert said.holds is holds, said.words
        assert said.words
        assert "{" not in said.words
    assert page.reading(claim)(Rows()) is None


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (
            "A15",
            [listed(TORCH, 900), listed(PINNED, 950), listed("memcpy", 32)],
            "900 µs, pinned 950 µs; our ring 32.0 µs",
        ),
        ("A27", [gpt2("Triton over our table", 1, 1), gpt2("PagedAdamW, device", 0.9, 1)], "in 1 ms, ours in 0.9"),
    ],
)
def test_what_only_can_be_so(name: str, rows: list[Row], words: str) -> None:
    said = page.reading(CLAIMS[name])(Rows(rows))
    assert said is not None
    assert words in said.words


def test_a_layer_is_named_with_its_parameters() -> None:
    said = page.reading(CLAIMS["C14"])(Rows(MADE["C14"][0]))
    assert said is not None
    assert "855,700,000 parameters: 6 ms (GPU), 95.0 % of a copy; torch fused takes 1.2 x that" in said.words


def test_trips_are_compared_by_one_clock() -> None:
    """Of 512 trips a GPU's time cannot be had: what is said of 64 is a wall's, too."""
    rows = page.Results().rows("optimizer_ladder.trucks")
    said = page.reading(CLAIMS["A2"])(rows) if rows else None
    assert said is not None
    assert rows is not None
    walls = [rows.number("wall", way=readings.FOREACH, size=size) for size in (1, 8)]
    assert [said.values[name] for name in ("one_ms", "eight_ms")] == [wall / 1e3 for wall in walls if wall]
    assert said.words.startswith("wall: 512 trips")


def test_every_verdict_is_a_known_one() -> None:
    results = page.Results()
    found = {page.line(claim, results).verdict.partition(":")[0] for claim in CLAIMS.values()}
    assert found <= set(VERDICTS)


def test_the_readme_lists_every_experiment() -> None:
    text = (ROOT / "experiments" / "README.md").read_text()
    for experiment in question.every():
        assert re.search(rf"^\| \d* \| `{experiment.name}` \|.*\| \d.* \| \d+ \|$", text, re.MULTILINE), experiment.name


#: Where the names come from by which readings find their rows.
NAMED = {
    "experiments.works.contenders": ("LOOP", "FOREACH", "FUSED", "OURS", "COMPILED", "TRITON"),
    "experiments.works.rungs": ("DEFAULT", "LIST"),
    "experiments.works.slices": ("SPLIT", "COMBINED"),
    "experiments.ladder.trucks": (),
}


@pytest.mark.parametrize("module", NAMED)
def test_rows_are_found_by_the_names_that_they_have(module: str) -> None:
    known = pytest.importorskip(module)
    for name in NAMED[module]:
        assert getattr(readings, name) == getattr(known, name, getattr(readings, name)), name
    if module.endswith("slices"):
        assert known.LIST == readings.POINTERS
    if module.endswith("trucks"):
        assert {readings.FOREACH, readings.OURS} <= set(known.WAYS)
