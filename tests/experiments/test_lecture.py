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
from experiments.lecture.claims import LATER, NOT_HERE, NOT_YET, Claim, claims
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
        if rows is None and claim.on_a_cpu:
            rows = results.rows(claim.shown, on_a_cpu=True)
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


def test_a_text_has_no_number_of_its_own() -> None:
    about = {"claim": "c", "shown": "a.b", "rows": {"one": {}}, "holds": [["one.kernels", ">", 0]]}
    with pytest.raises(ValueError, match="has a number that comes from no row"):
        Claim("X1", **about, ours="{one.kernels} of 36")
    ours = "GPT-2: {one.us} µs, {one.us:ms} ms in {one.kernels} kernels: {one.text}"
    row = {"us": 1234.56, "kernels": 1234, "text": "a\nb"}
    said = Claim("X1", **about, ours=ours).said(Rows([row]))
    assert said is not None
    assert (said.words, said.holds) == ("GPT-2: 1,235 µs, 1.23 ms in 1,234 kernels: a", True)
    assert Claim("X1", **about, ours=ours).said(Rows([{**row, "us": None}])) is None, "not measured"


def test_a_claim_says_where_it_is_shown() -> None:
    about = {"claim": "c"}
    for wrong in (
        {},
        {"shown": "a.b", "later": "c"},
        {"not_here": "no time"},
        {"shown": "a.b", "verdicts": ["true", "?"]},
        {"shown": "a.b", "verdicts": ["true", "true"], "rows": {"one": {}}, "holds": [["one.a", "==", 1]]},
        {"shown": "a.b"},
        {"shown": "a.b", "rows": {"one": {}}},
    ):
        with pytest.raises(ValueError, match="X1: "):
            Claim("X1", **about, **wrong)
    assert page.line(Claim("X1", **about, not_here="the talk's logistics"), page.Results()).verdict.startswith(NOT_HERE)
    assert page.line(Claim("X1", **about, later="copies"), page.Results()).verdict == LATER


def test_a_claim_names_a_source_of_its_part() -> None:
    with pytest.raises(ValueError, match="D1: source '000' is none of 003"):
        Claim("D1", claim="c", later="a", source="000")
    assert Claim("A1", claim="c", later="a").sources == ("000", "001")
    assert CLAIMS["A20"].sources == ("001",)


def test_results_that_are_not_there_are_not_measured_yet(tmp_path: Path) -> None:
    empty = page.Results(tmp_path)
    verdicts = {page.line(claim, empty).verdict for claim in CLAIMS.values()}
    assert {verdict.partition(":")[0] for verdict in verdicts} == {LATER, NOT_YET, NOT_HERE}
    kept = json.loads((ROOT / "experiments" / "results" / "pointer_transports-nvidia-h200.json").read_text())
    (tmp_path / "pointer_transports-cpu.json").write_text(json.dumps(kept))
    assert page.Results(tmp_path).rows("pointer_transports.attempts") is None, "claims are about GPUs"
    assert page.Results(tmp_path).rows("pointer_transports.attempts", on_a_cpu=True)
    about = {
        "claim": "c",
        "shown": "pointer_transports.attempts",
        "rows": {"one": {}},
        "holds": [["one.name", "==", "one.name"]],
    }
    verdicts = [page.line(Claim("X1", **about, on_a_cpu=on), page.Results(tmp_path)).verdict for on in (False, True)]
    assert verdicts == [NOT_YET, f"true: {page.ON_A_CPU}"]
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
        rows = results.rows(claim.shown) or results.rows(claim.shown, on_a_cpu=True)
        assert rows
        assert turned(claim, rows)
    else:
        *others, last = MADE[name][0]
        for row, holds in ((last, True), (last | MADE[name][1], False)):
            said = claim.said(Rows([*others, row]))
            assert said is not None
            assert said.holds is holds, said.words
    assert claim.said(Rows()) is None
