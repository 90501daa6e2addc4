"""Results that are kept: the verdict of each bar comes out of the rows again, and each page out of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from experiment_runs import emptied, experiment, undated

from experiments.harness import note, question
from experiments.harness.main import KEPT, main
from experiments.harness.revision import check_source
from experiments.harness.rows import of_questions, read

PAGES = sorted({each.note for each in question.every() if (note.NOTES / f"{each.note}.md").exists()})


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_verdicts_come_out_again(path: Path) -> None:
    """Of every bar, number for number."""
    of = experiment(path.name.partition("-")[0])
    result = read(path, of)
    check_source(result, path.name)
    known = of_questions(result, of)
    assert known.keys() == result["parts"].keys()
    verdicts = [bar.verdict(known.get(q.name)) for q in of.questions for bar in q.listed("BARS")]
    assert {verdict["work"]: verdict for verdict in result["verdicts"]} == {v.work: v.as_dict() for v in verdicts}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_comes_out_again(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its markers, but for what has changed since; no block is empty."""
    committed = (note.NOTES / f"{page}.md").read_text()
    assert not re.search(r"<!-- begin (.*) -->\s*<!-- end \1 -->", committed)
    (tmp_path / f"{page}.md").write_text(emptied(committed))
    monkeypatch.setattr(note, "NOTES", tmp_path)
    for each in (each for each in question.every() if each.note == page):
        assert main(each, ["--note"]) == 0
    assert undated((tmp_path / f"{page}.md").read_text()) == undated(committed)
