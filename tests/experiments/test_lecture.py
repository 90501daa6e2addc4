"""The page of claims: every id, every number from a JSON, the same page again; verdicts that can turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from experiment_runs import emptied, undated
from paths import ROOT

from experiments.kept import find
from experiments.lab import Rows
from experiments.lecture import page
from experiments.lecture.claims import LATER, NOT_HERE, NOT_YET, VERDICTS, Claim, claims
from experiments.lecture.readings import READINGS
from tests.experiments.lecture_rows import MADE, Row

IDS = [f"{letter}{n}" for letter, last in (("A", 37), ("C", 14), ("D", 12)) for n in range(1, last + 1)]
CLAIMS = {claim.id: claim for claim in claims()}


def test_every_claim_is_there_once() -> None:
    assert [claim.id for claim in claims()] == IDS
    lines = Counter(re.findall(r"^\| ([ACD]\d+) \|", page.page(), re.MULTILINE))
    assert lines == Counter(IDS)


def test_the_page_comes_out_again() -> None:
    assert undated(page.page()) == undated(page.TABLE.read_text()), "python -m experiments lecture"


def test_the_story_quotes_claims_and_is_short() -> None:
    story, quotes = page.STORY.read_text(), page.quotes()
    for block, text in quotes.items():
        assert f"<!-- begin {block} -->\n{text}\n<!-- end {block} -->" in story, "python -m experiments lecture"
    assert not [block for block in quotes if set(block.split()) - set(CLAIMS)]
    assert not re.search(r"\d ?(ms|µs|s|%|GB/s|MiB|x)\b", emptied(story)), "numbers come from results"
    assert len(story.split()) <= 1800


def test_the_list_of_notes_has_each_and_says_how_many_claims_are_shown() -> None:
    text = page.INDEX.read_text()
    assert page.summary([page.line(claim, page.Results()) for claim in claims()]) in text, (
        "python -m experiments lecture"
    )
    for note in page.NOTES.glob("*.md"):
        assert note == page.INDEX or f"]({note.name})" in text, note.name


def test_who_shows_a_claim_is_there_or_will_be() -> None:
    looked = 0
    for claim in CLAIMS.values():
        if claim.shown and (found := find(claim.experiment)):
            looked += 1
            assert claim.shown.partition(".")[2] in found[0].questions, claim.shown
        if claim.later:
            assert find(claim.later) is None, f"{claim.id}: {claim.later} is here"
    assert looked >= 8


def test_every_number_comes_from_a_json() -> None:
    """What a line shows is in its rows, and another measurement shows another number."""
    results = page.Results()
    shown = 0
    for claim in CLAIMS.values():
        rows = results.rows(claim.shown) if claim.shown else None
        said = claim.said(rows) if rows else None
        if said is None:
            assert page.line(claim, results).ours == ""
            continue
        shown += 1
        assert page.line(claim, results).ours == said.words
        for value in said.values.values():
            if isinstance(value, float):
                other = claim.said(Rows(scaled(row) for row in rows))
                assert other is None or other.words != said.words, claim.id
                break
    assert shown >= 5


def scaled(row: Row) -> Row:
    """A row whose measured numbers are 7 times as large."""
    series = {name: cell for name, cell in row.items() if isinstance(cell, dict) and "median" in cell}
    plain = {name: 7 * cell for name, cell in row.items() if isinstance(cell, float)}
    return {**row, **plain, **{name: {**cell, "median": 7 * cell["median"]} for name, cell in series.items()}}


def test_a_text_shows_cells_in_their_units() -> None:
    about = {"claim": "c", "shown": "a.b", "rows": {"one": {}}, "holds": [["one.kernels", ">", 0]]}
    claim = Claim("X1", **about, ours="GPT-2: {one.us} µs, {one.us:ms} ms in {one.kernels} kernels: {one.text}")
    row = {"us": 1234.56, "kernels": 1234, "text": "a\nb"}
    said = claim.said(Rows([row]))
    assert said is not None
    assert (said.words, said.holds) == ("GPT-2: 1,235 µs, 1.23 ms in 1,234 kernels: a", True)
    assert claim.said(Rows([{**row, "us": None}])) is None, "not measured"


#: What each part was read from; why a claim need not be shown; digits that are part of a name, all others are cells.
SOURCES = {"A": ("", "000", "001"), "C": ("", "002"), "D": ("", "003")}
REASONS = re.compile("logistics|was not run|compilers refuse")
NAMES = re.compile(r"GPT-2|Llama 70B|float32|float64|int8|16 bytes|(4|32) KB|\{[^}]*\}")


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_claim_says_where_it_is_shown_and_when_it_is_true(claim: Claim) -> None:
    assert sum(map(bool, (claim.shown, claim.later, claim.not_here))) == 1
    assert not claim.not_here or REASONS.search(claim.not_here)
    assert len(set(claim.verdicts)) == 2
    assert set(claim.verdicts) <= set(VERDICTS[:4])
    assert bool(claim.rows) is bool(claim.holds)
    assert not claim.shown or bool(claim.rows) is not (claim.id in READINGS)
    assert claim.source in SOURCES[claim.id[0]]
    assert not re.search(r"\d", NAMES.sub("", claim.ours)), "a number that comes from no row"


def test_results_that_are_not_there_are_not_measured_yet(tmp_path: Path) -> None:
    empty = page.Results(tmp_path)
    verdicts = {page.line(claim, empty).verdict for claim in CLAIMS.values()}
    assert {verdict.partition(":")[0] for verdict in verdicts} == {LATER, NOT_YET, NOT_HERE}
    kept = json.loads((ROOT / "experiments" / "results" / "pointer_transports-nvidia-h200.json").read_text())
    (tmp_path / "pointer_transports-cpu.json").write_text(json.dumps(kept))
    assert page.Results(tmp_path).rows("pointer_transports.attempts") is None, "claims are about GPUs"
    dirty = {**kept, "machine": {**kept["machine"], "commit": "abc1234", "dirty": True}}
    (tmp_path / "pointer_transports-gpu.json").write_text(json.dumps(dirty))
    with pytest.raises(SystemExit):
        page.Results(tmp_path).rows("pointer_transports.attempts")


# --- what rows say


def turned(claim: Claim, rows: Rows) -> bool:
    """Whether another value in one cell that a claim compares makes the other verdict of it."""
    said = claim.said(rows)
    assert said
    for cell, _, other in claim.holds:
        name, _, column = cell.partition(".")
        where = {key: value for key, value in claim.rows[name].items() if key != "most"}
        known = said.values.get(other, other)
        beside = [known + 1, known - 1, known, 0] if isinstance(known, int | float) else ["else", known]
        for value in [*beside, True, False]:
            new = Rows({**row, column: value} if row in rows.where(**where) else row for row in rows)
            found = claim.said(new)
            if found is not None and found.holds is not said.holds:
                return True
    return False


@pytest.mark.parametrize("name", [claim.id for claim in CLAIMS.values() if claim.shown])
def test_a_verdict_can_turn(name: str) -> None:
    claim = CLAIMS[name]
    if claim.rows:
        results = page.Results()
        rows = results.rows(claim.shown)
        assert rows
        assert turned(claim, rows)
    else:
        *others, last = MADE[name][0]
        for row, holds in ((last, True), (last | MADE[name][1], False)):
            said = claim.said(Rows([*others, row]))
            assert said is not None
            assert said.holds is holds, said.words
    assert claim.said(Rows()) is None
