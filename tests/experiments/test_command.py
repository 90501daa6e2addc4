"""The command line: where results go, what is refused before anything is measured, what is kept if something fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import toy_question
from experiment_runs import can_draw

from experiments import __main__ as command
from experiments import campaign, kept, readme
from experiments.lab import Run
from experiments.lecture.page import Results

TOY = kept.Experiment("toy_question", "How long?", {"toy_question": toy_question})
NAME = "toy_question-cpu.json"
CLEAN = {"commit": "abc1234", "dirty": False}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that tests may write to, and a commit, whatever the state of the tree under test."""
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(kept, "NOTES", tmp_path)
    monkeypatch.setattr(kept, "this_revision", lambda: CLEAN)


def run(*arguments: str, of: kept.Experiment = TOY) -> int:
    return command.run(of, None, ["--device", "cpu", *arguments])


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a run ends with."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    return said.err


def test_results_are_rows_with_their_circumstances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    found = read(tmp_path / "runs" / NAME)
    part = found["parts"]["toy_question"]
    assert [(row["length"], row["way"]) for row in part["rows"]] == [
        (length, way) for length in (100, 200) for way in ("cut", "torn")
    ]
    assert {**part, **CLEAN} == part
    assert found["machine"].items() >= CLEAN.items()
    said = capsys.readouterr().out
    shown = ("- 4 pieces", "grid", "long enough | ≥ 100 m | 200 m | met", "not measured here", NAME)
    assert all(words in said for words in shown)
    assert (tmp_path / "runs" / "toy_question-cpu-lengths.png").exists() is can_draw()
    run()
    (aside,) = (tmp_path / "runs").glob("earlier-*.json")
    assert read(aside) == found, "set aside, not lost"
    assert kept.newest(tmp_path / "runs", "toy_question").name == NAME


def test_toys_stay_away_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick") == 0, "a missed bar of a toy says nothing"
    assert {path.name for path in tmp_path.rglob("*.json")} == {NAME}
    assert "**A `--quick` run" in kept.machine_line(read(tmp_path / "runs" / "quick" / NAME))
    capsys.readouterr()
    for option in (["--keep"], ["--out", str(kept.KEPT)]):
        assert "do not belong into experiments/results" in refused(capsys, "--quick", *option)
    assert not kept.KEPT.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "banana"], "--device is 'banana'"),
        (["--device", "cuda:99"], "--device is 'cuda:99'"),
        (["--qick"], "unrecognized arguments: --qick; did you mean --quick?"),
        (["--keep", "--out", "x"], "not allowed with argument"),
        (["--out", "/dev/null/below"], "results cannot be written there"),
        (["--note"], "no results toy_question-*.json"),
        (["--show", "/dev/null"], "cannot be read as results"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("wrong", "code", "rows", "said"),
    [
        ("interrupt", 130, 2, "interrupted; 2 rows are in the file, and nothing is made of them"),
        (
            "raise",
            1,
            2,
            "failed with ZeroDivisionError: no string; 2 rows are in the file, and nothing is made of them",
        ),
        ("refuse", 0, 4, "glue: MemoryError: no room"),
    ],
)
def test_what_was_measured_is_kept(wrong: str, code: int, rows: int, said: str, tmp_path: Path) -> None:
    assert run("--wrong", wrong) == code
    path = tmp_path / "runs" / NAME
    part = read(path)["parts"]["toy_question"]
    assert (len(part["rows"]), part["left_out"][-1], part["complete"]) == (rows, said, code == 0)
    assert run("--merge") == 0
    whole = read(path)["parts"]
    run("--merge", "--wrong", "interrupt")
    assert read(path)["parts"] == whole, "rows of before stay"


class slow:
    """A question that goes on: a row of each number that is asked for and not known; a negative one ends it."""

    GOES_ON = True
    asked: ClassVar[list[float]] = []

    @classmethod
    def measure(cls, run: Run) -> Any:
        """Rows with how many are in the file meanwhile."""
        yield from run.known
        for number in cls.asked:
            if number < 0:
                raise KeyboardInterrupt
            if not run.known.where(number=number):
                there = read(kept.ROOT / "runs" / NAME)["parts"]["slow"]["rows"] if number else []
                yield {"number": number, "before": len(there)}

    @staticmethod
    def report(page: Any, rows: Any) -> None:
        """Nothing."""


def test_a_question_that_goes_on_loses_no_row_and_measures_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = kept.Experiment("toy_question", "?", {"slow": slow})  # type: ignore[dict-item]

    def found(*numbers: float) -> tuple[list[dict[str, Any]], bool]:
        slow.asked = list(numbers)
        run("--merge", of=of)
        part = read(tmp_path / "runs" / NAME)["parts"]["slow"]
        return part["rows"], part["complete"]

    rows = [{"number": n, "before": n} for n in range(3)]
    assert found(0, 1, -1, 3) == (rows[:2], False), "what was measured is in the file while others are measured"
    assert found(1, 2) == (rows, True)
    monkeypatch.setattr(kept, "this_revision", lambda: {**CLEAN, "commit": "def5678"})
    assert found(0) == (rows[:1], True), "of another commit none stays"


def result(**changes: Any) -> dict[str, Any]:
    versions = {"numba": "0.68", **changes.pop("versions", {})}
    machine = {"gpu": "H200", "driver": "580", "cores": 16, "when": "2026", "versions": versions, **CLEAN}
    machine |= changes.pop("machine", {})
    return {"machine": machine, "device": "cuda", "quick": False, "parts": {}, **changes}


TIMES = {"rows": [{"clock": "wall"}]}


@pytest.mark.parametrize(
    ("old", "new", "gpus", "joined"),
    [
        ({"parts": {"a": TIMES}, "versions": {"torchao": "1"}}, {}, 1, True),
        ({"parts": {"a": TIMES}}, {"machine": {"driver": "581"}}, 1, False),
        ({"parts": {"a": TIMES}}, {"versions": {"numba": "0.69"}}, 1, False),
        ({"parts": {"a": TIMES}}, {"quick": True}, 1, False),
        ({"parts": {"a": TIMES}}, {"machine": {"cores": 8}}, 1, False),
        ({"parts": {"a": TIMES}}, {"machine": {"cores": 8, "gpu": "H100"}}, 2, True),
    ],
)
def test_parts_of_one_machine_are_put_together(
    old: Any, new: Any, gpus: int, joined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if joined:
        assert kept.merged(result(**old), result(**new), gpus)["parts"] == old["parts"]
        return
    with pytest.raises(SystemExit):
        kept.merged(result(**old), result(**new), gpus)
    assert "not measured on one machine" in capsys.readouterr().err


def test_a_note_is_filled_from_results_of_a_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy_question.md"
    run("--keep")
    capsys.readouterr()
    assert "there is no such note" in refused(capsys, "--note")
    names = ("machine", "answer", "toy_question")
    text = "".join(f"<!-- begin {name} -->\nolder\n<!-- end {name} -->\nstays\n" for name in names)
    path.write_text(text.replace("begin answer", "begin question"))
    assert "has no place for 'answer'" in refused(capsys, "--note")
    assert "older" in path.read_text(), "nothing is half filled"
    path.write_text(text)
    assert run("--note") == 0
    filled = path.read_text()
    assert (filled.count("older"), filled.count("stays")) == (0, len(names))
    for words in ("- 4 pieces", "at commit abc1234: ", "| pieces | 100 | 200 |"):
        assert words in filled
    assert "**cut**\n\n| length | µs | double |\n|---|---:|---:|\n| 100 | " in filled
    monkeypatch.setattr(kept, "this_revision", lambda: {**CLEAN, "dirty": True})
    run("--keep")
    assert "files changed: a note is not filled from that" in capsys.readouterr().out
    assert "files changed; a note is filled from a clean tree only" in refused(capsys, "--note")


def test_the_commit_is_gits_or_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for named, found in (("", (None, None)), ("abc1234", ("abc1234", False)), ("abc1234-dirty", ("abc1234", True))):
        monkeypatch.setenv("PAGEDOPT_COMMIT", named)
        assert tuple(kept.revision(tmp_path).values()) == found
    monkeypatch.setenv("PAGEDOPT_COMMIT", "main")
    with pytest.raises(SystemExit):
        kept.revision(tmp_path)
    assert kept.changed("abc1234", toy_question) is None, "without git it is not known"


def test_a_campaign_measures_what_is_quoted_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(Path(campaign.__file__).parent / "results")
    readme.blocks(results)
    assert {shown.partition(".")[2] for shown in results.asked} == {question for question, _ in campaign.QUOTED}
    parts = {"link": {"complete": True, **CLEAN}, "sweep": {"complete": False, **CLEAN}, "rivals": {"complete": True}}
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "paged_state-cpu.json").write_text(json.dumps({"parts": parts}))
    begun = list[str]()

    def process(line: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        begun.append(line[3])
        return subprocess.CompletedProcess(line, 130 if line[3] == "rivals" else 1)

    monkeypatch.setattr(subprocess, "run", process)
    assert command.main(["campaign", "--device", "cpu"]) == 130
    assert begun[:2] == ["seven_billion"] * 2
    assert begun[-2:] == ["sweep", "rivals"]  # not link, which is there, nor what comes behind an interrupt


def test_names_are_found_and_slips_explained(capsys: pytest.CaptureFixture[str]) -> None:
    names = [experiment.name for experiment in kept.every()]
    parts = [part for experiment in kept.every() for part in experiment.questions]
    assert len(set(names)) == len(names)
    assert len(set(parts)) == len(parts), "a question is run by its name"
    assert command.main([]) == 0
    assert all(name in capsys.readouterr().out for name in names[:1])
    assert command.main(["pointer-transportss"]) == 2
    assert "did you mean pointer_transports" in capsys.readouterr().err
