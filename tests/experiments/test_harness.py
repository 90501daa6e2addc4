"""A run of the harness from options to files: what it refuses, what it keeps, and what it joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import toy_question
from experiment_runs import experiment as named
from pictures import can_draw

from experiments.harness import main, note, question, revision, rows
from experiments.harness.run import Run

TOY = question.Experiment.of(toy_question)
NAME = "toy_question-cpu.json"
CLEAN = {"commit": "abc1234", "dirty": False}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that tests may write to, and a commit, whatever the state of the tree under test."""
    monkeypatch.chdir(tmp_path)
    for name in ("RUNS", "QUICK", "KEPT"):
        monkeypatch.setattr(main, name, tmp_path / name)
    monkeypatch.setattr(note, "NOTES", tmp_path)
    for module in ("machine", "run", "main"):
        monkeypatch.setattr(f"experiments.harness.{module}.this_revision", lambda: CLEAN)


def run(*arguments: str, experiment: question.Experiment = TOY) -> int:
    return main.main(experiment, ["--device", "cpu", *arguments])


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a run ends with."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


# --- where results go


def test_results_are_rows_with_their_circumstances(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    found = read(main.RUNS / NAME)
    part = found["parts"]["toy_question"]
    assert [(row["length"], row["way"]) for row in part["rows"]] == [
        (100, "cut"), (100, "torn"), (200, "cut"), (200, "torn")
    ]  # fmt: skip
    assert part["command"] == "python -m experiments toy_question"
    assert part["seconds"] > 0
    assert {**part, **CLEAN} == part
    assert found["machine"]["torch"] == torch.__version__
    assert [(v["work"], v["measured"], v["met"]) for v in found["verdicts"]] == [
        ("long enough", 200, True), ("slow", None, None)
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert all(words in said for words in ("- 4 pieces", "grid", "long enough", "not measured here", NAME))
    assert (main.RUNS / "toy_question-cpu-lengths.png").exists() is can_draw()


def test_toys_stay_away_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick") == 0, "a missed bar of a toy says nothing"
    assert {path.name for path in tmp_path.iterdir()} == {"QUICK"}
    found = read(main.QUICK / NAME)
    assert found["verdicts"][0]["met"] is False
    assert "**A `--quick` run" in note.machine_line(found, TOY)
    capsys.readouterr()
    for option in (["--keep"], ["--out", str(main.KEPT)]):
        assert "do not belong into experiments/results" in refused(capsys, "--quick", *option)
    assert not main.KEPT.exists()


def test_results_are_kept_where_they_are_committed_only_if_asked() -> None:
    assert run("--keep") == 0
    assert (main.KEPT / NAME).exists()
    assert not main.RUNS.exists()


def test_results_that_are_not_joined_are_set_aside() -> None:
    run()
    first = read(main.RUNS / NAME)
    run()
    (aside,) = main.RUNS.glob("earlier-*.json")
    assert read(aside) == first
    assert rows.newest(main.RUNS, "toy_question") == main.RUNS / NAME, "--note must not take it for the results"


# --- refused before anything is measured


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_folder_that_cannot_be_written_to(below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capsys, "--out", str(tmp_path / "file" / below))
    assert "results cannot be written there" in said
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("name", ["banana", "cuda:x", "meta", "", "cuda:99", "cuda"])
def test_a_device_that_is_not_here(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    assert f"--device is {name!r}" in refused(capsys, "--device", name)
    assert not main.RUNS.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "cannot be read as results"),
        ("[1]", "holds no results, not of toy_question"),
        ('{"experiment": "fused_step", "machine": {}, "device": "cpu"}', "holds results of fused_step"),
    ],
)
@pytest.mark.parametrize("option", ["--note", "--merge"])
def test_a_file_of_something_else(
    option: str, content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert words in refused(capsys, option, str(path))
    assert (path.read_text() if path.exists() else None) == content


def test_options_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --fast" in refused(capsys, "--fast")
    assert "unrecognized arguments: --qick; did you mean --quick?" in refused(capsys, "--qick")
    assert "not allowed with argument" in refused(capsys, "--keep", "--out", "x")


# --- what goes wrong while it measures


def test_ctrl_c_keeps_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--wrong", "interrupt") == 130
    found = read(main.RUNS / NAME)
    assert [row["length"] for row in found["parts"]["toy_question"]["rows"]] == [100, 100]
    assert found["left_out"] == ["interrupted; 2 rows are in the file, and nothing is made of them"]
    assert found["verdicts"][0]["measured"] is None, "the worst row may be missing"
    assert "left out: interrupted; 2 rows are in the file" in capsys.readouterr().out


def test_ctrl_c_does_not_replace_what_was_measured_before() -> None:
    run()
    whole = read(main.RUNS / NAME)["parts"]
    assert run("--merge", "--wrong", "interrupt") == 130
    assert read(main.RUNS / NAME)["parts"] == whole


def test_a_question_that_fails_keeps_its_rows_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--wrong", "raise") == 1
    found = read(main.RUNS / NAME)
    assert found["left_out"][0].startswith("failed with ZeroDivisionError: no string; 2 rows are in the file")
    assert found["verdicts"][0]["met"] is None
    assert len(found["parts"]["toy_question"]["rows"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_contender_that_fails_is_left_out_and_the_others_go_on() -> None:
    assert run("--wrong", "refuse") == 0
    found = read(main.RUNS / NAME)
    assert found["left_out"] == ["glue: MemoryError: no room"] * 2
    assert len(found["parts"]["toy_question"]["rows"]) == 4


def test_a_missed_bar_is_an_exit_status_but_of_a_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_question, "BARS", [toy_question.Bar("long", "double", at_least=1e9)])
    assert run() == 1
    assert run("--quick") == 0


class two:
    """Another question, of a line."""

    __name__ = "two"
    NEEDS_GPU = False

    @staticmethod
    def measure(run: Run) -> Any:
        """One row."""
        yield {"double": 1.0}


def several() -> question.Experiment:
    return question.Experiment("toy_question", "?", (*TOY.questions, question.Question(two)))  # type: ignore[arg-type]


# --- several questions in one file


def test_parts_are_joined_and_newer_ones_win(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "two", experiment=several()) == 0
    assert read(main.RUNS / NAME)["left_out"] == ["toy_question: not measured"]
    assert run("--merge", "--only", "toy-question", "--wrong", "refuse", experiment=several()) == 0
    found = read(main.RUNS / NAME)
    assert found["left_out"] == ["toy_question, glue: MemoryError: no room"] * 2
    assert {name: len(part["rows"]) for name, part in found["parts"].items()} == {"two": 1, "toy_question": 4}
    capsys.readouterr()
    unknown = "no question 'speed'; there are toy_question, two"
    for names, words in (("two,speed", unknown), (",", "no question is named")):
        with pytest.raises(SystemExit):
            run("--only", names, experiment=several())
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


class slow:
    """A question that goes on: a row of each number that is asked for and not known."""

    __name__ = "slow"
    GOES_ON = True
    asked: ClassVar[list[float]] = []

    @classmethod
    def measure(cls, run: Run) -> Any:
        """Says what is in the file meanwhile; a negative number ends it."""
        yield from run.known
        for number in cls.asked:
            if number < 0:
                raise KeyboardInterrupt
            if not run.known.where(number=number):
                yield {
                    "number": number,
                    "before": len(read(main.RUNS / NAME)["parts"]["slow"]["rows"]) if number else 0,
                }


def test_a_question_that_goes_on_loses_no_row_and_measures_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = question.Experiment("toy_question", "?", (question.Question(slow),))  # type: ignore[arg-type]

    def found(*numbers: float) -> tuple[list[dict[str, Any]], bool]:
        slow.asked = list(numbers)
        run("--merge", experiment=experiment)
        part = read(main.RUNS / NAME)["parts"]["slow"]
        return part["rows"], part["complete"]

    rows = [{"number": 0, "before": 0}, {"number": 1, "before": 1}, {"number": 2, "before": 2}]
    assert found(0, 1, -1, 3) == (rows[:2], False), "what was measured is in the file while others are measured"
    assert found(1, 2) == (rows, True)
    monkeypatch.setattr("experiments.harness.run.this_revision", lambda: {**CLEAN, "commit": "def5678"})
    assert found(0) == (rows[:1], True), "of another commit none stays"


def result(**changes: Any) -> dict[str, Any]:
    versions = {"numba": "0.68", "torch": "2.11"}
    machine = {"gpu": "H200", "driver": "580", "torch": "2.11", "when": "2026-11-21", "versions": versions, **CLEAN}
    machine.update(changes.pop("machine", {}))
    return {"machine": machine, "device": "cuda", "quick": False, "parts": {}, **changes}


def test_parts_of_one_machine_are_put_together() -> None:
    old = result(parts={"link": 1, "sweep": 1}, machine={"versions": {"numba": "0.68", "torchao": "0.18"}})
    new = result(parts={"sweep": 2}, machine={"when": "later", "commit": "b"})
    both = rows.merged(old, new, TOY)
    assert both["parts"] == {"link": 1, "sweep": 2}
    assert both["machine"]["when"] == "later"
    assert both["machine"]["versions"] == {"numba": "0.68", "torch": "2.11", "torchao": "0.18"}


@pytest.mark.parametrize(
    "changes",
    [{"machine": {"driver": "581"}}, {"machine": {"versions": {"numba": "0.69"}}}, {"quick": True}, {"device": "cpu"}],
)
def test_parts_of_different_machines_are_kept_apart(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(rows.differences(result(), result(**changes))) == 1
    with pytest.raises(SystemExit):
        rows.merged(result(), result(**changes), TOY)
    assert "not measured on one machine" in capsys.readouterr().err


def test_what_no_gpu_changes_joins_results_of_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_question, "CPU_ONLY", True, raising=False)
    old = result(device="cpu", parts={"toy_question": 1, "two": 1}, machine={"driver": None})
    both = rows.merged(old, result(), TOY)
    assert both == {**result(), "parts": {"toy_question": 1}}
    with pytest.raises(SystemExit):
        rows.merged({**old, "quick": True}, result(), TOY)


def test_what_measures_no_time_joins_results_of_other_cores() -> None:
    counts, times = {"rows": [{"kernels": 3}]}, {"rows": [{"kernels": 3}, {"clock": "wall"}]}
    old = result(parts={"toy_question": counts}, machine={"cores": 8})
    new = result(parts={"two": times}, machine={"cores": 16})
    both = {**new, "parts": {"toy_question": counts, "two": times}}
    assert rows.merged(old, new, several()) == both
    for change in (
        {"parts": {"toy_question": times}, "machine": {"cores": 8}},
        {"machine": {"cores": 8, "driver": "581"}},
    ):
        with pytest.raises(SystemExit):
            rows.merged({**old, **result(**{"parts": old["parts"], **change})}, new, several())


def test_parts_of_several_gpus_join_results_of_other_cores_and_name_their_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(two, "GPUS", 2, raising=False)
    times = {"rows": [{"clock": "wall"}]}
    old, new = result(parts={"toy_question": times}, machine={"cores": 16}), result(machine={"cores": 32})
    kept = rows.merged(old, new, several(), gpus=2)
    assert kept == old
    assert kept["parts"] is not old["parts"]
    assert rows.merged(old, result(machine={"cores": 32, "gpu": "another"}), several(), gpus=2) == old
    there = {**new["machine"], "gpu": "GPU X"}
    kept["parts"]["two"] = {**times, "commit": "def5678", "dirty": False, "machine": there}
    assert old["parts"] == {"toy_question": times}
    assert rows.merged(kept, new, several())["parts"] == {"two": kept["parts"]["two"]}
    with pytest.raises(SystemExit):
        rows.merged(old, result(machine={"cores": 32, "driver": "581"}), several(), gpus=2)
    machine = {"torch_cuda": "13.0", "processor": "x", "cores": 16, "python": "3.12"}
    line = note.machine_line({**kept, "machine": {**kept["machine"], **machine}}, several())
    assert " Of commit def5678 on GPU Xs of one host, 32 cores: two." in line
    assert line.endswith(" Changed since: unknown (toy_question, two).")


# --- notes and files


def test_a_note_is_filled_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "toy_question.md"
    assert "no results toy_question-*.json" in refused(capsys, "--note")
    run("--keep")
    capsys.readouterr()
    assert "there is no such note" in refused(capsys, "--note")
    names = ("machine", "bars", "answer", "toy_question", "left out")
    text = "".join(f"<!-- begin {name} -->\nolder\n<!-- end {name} -->\nkept\n" for name in names)
    path.write_text(text.replace("begin answer", "begin question"))
    assert "has no place for 'answer'" in refused(capsys, "--note")
    assert "older" in path.read_text(), "nothing is half filled"
    path.write_text(text)
    assert run("--note") == 0
    filled = path.read_text()
    assert "older" not in filled
    assert filled.count("kept") == len(names)
    assert "- 4 pieces" in filled
    assert "at commit abc1234: CPU only" in filled
    assert "| long enough | ≥ 100 m | 200 m | met |" in filled
    assert "**cut**\n\n| length | µs | double |\n|---|---:|---:|\n| 100 | " in filled
    assert "| pieces | 100 | 200 |" in filled
    assert run("--note", str(main.KEPT / NAME)) == 0
    assert path.read_text() == filled


def test_a_file_of_another_layout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    path = main.RUNS / NAME
    path.write_text(json.dumps(read(path) | {"layout": 2}))
    capsys.readouterr()
    assert "has layout 2, and 3 is read today: measure again" in refused(capsys, "--merge")


def test_a_run_that_is_not_of_a_commit_says_that_no_note_takes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("machine", "run", "main"):
        monkeypatch.setattr(f"experiments.harness.{module}.this_revision", lambda: {**CLEAN, "dirty": True})
    run("--keep")
    assert "measured at commit abc1234, files changed: a note is not filled from that" in capsys.readouterr().out
    assert "files changed; a note is filled from a clean tree only" in refused(capsys, "--note")


# --- progress


def test_the_source_is_looked_at_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        revision.refuse("no such commit")

    monkeypatch.setattr("experiments.harness.machine.this_revision", refuse)
    assert refused(capsys) == "no such commit\n"
    assert not main.RUNS.exists()


def test_what_a_question_lacks_is_said_before_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", "/no/folder")
    paged = named("state_file")
    with pytest.raises(SystemExit) as ended:
        run("--quick", experiment=paged)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "state_file: PAGEDOPT_STATE_DIR is '/no/folder', which is no folder; name a folder on a disk\n",
    )
    assert run("--quick", "--only", "link", experiment=paged) == 0, "what needs no such folder"
