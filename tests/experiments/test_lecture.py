"""The page of claims: every id, every number from a JSON, the same page again; verdicts that can turn."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiment_runs import emptied, undated
from paths import ROOT

from experiments.lab import Rows
from experiments.lecture import page
from experiments.lecture.claims import NOT_HERE, NOT_YET, VERDICTS, Claim, claims
from experiments.lecture.readings import READINGS

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
    assert bool(claim.shown) != bool(claim.not_here)
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
    assert {verdict.partition(":")[0] for verdict in verdicts} == {NOT_YET, NOT_HERE}
    kept = json.loads((ROOT / "experiments" / "results" / "pointer_transports-nvidia-h200.json").read_text())
    (tmp_path / "pointer_transports-cpu.json").write_text(json.dumps(kept))
    assert page.Results(tmp_path).rows("pointer_transports.attempts") is None, "claims are about GPUs"
    dirty = {**kept, "machine": {**kept["machine"], "commit": "abc1234", "dirty": True}}
    (tmp_path / "pointer_transports-gpu.json").write_text(json.dumps(dirty))
    with pytest.raises(SystemExit):
        page.Results(tmp_path).rows("pointer_transports.attempts")


# --- what rows say


def others(cell: Any) -> list[Any]:
    """What else may stand in a cell."""
    if isinstance(cell, bool):
        return [not cell]
    if isinstance(cell, int | float):
        return [1000 * cell + 1, cell / 1000, -1 - cell]
    if isinstance(cell, dict):
        times = [{**cell, "median": cell["median"] * factor} for factor in (1e3, 1e-3)] if "median" in cell else []
        return times or [dict.fromkeys(cell, 0)]
    return []


def changed(rows: Rows) -> Iterator[Rows]:
    """Rows with another value in a column: in all that a text tells from others, then in one of them."""
    kinds = {(name, text) for row in rows for name, text in row.items() if isinstance(text, str)}
    some = [[row for row in rows if row.get(name) == text] for name, text in sorted(kinds)] + [[row] for row in rows]
    for group in some:
        for column in group[0]:
            texts = [text for name, text in kinds if name == column]
            for value in [*others(group[0][column]), *texts, *["else"] * bool(texts)]:
                yield Rows({**row, column: value} if row in group else row for row in rows)


def verdict(claim: Claim, rows: Rows) -> bool | None:
    """What rows say; None: nothing, or the changed row is another than those that have the columns."""
    with contextlib.suppress(KeyError):
        if said := claim.said(rows):
            return said.holds
    return None


@pytest.mark.parametrize("name", [claim.id for claim in CLAIMS.values() if claim.shown])
def test_a_verdict_can_turn(name: str) -> None:
    claim = CLAIMS[name]
    rows = page.Results().rows(claim.shown)
    assert rows
    now = verdict(claim, rows)
    assert now is not None
    assert any(verdict(claim, other) is (not now) for other in changed(rows))
    assert claim.said(Rows()) is None
