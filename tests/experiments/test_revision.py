"""What results say about the source they were measured with, and which of them a note may be filled from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from experiment_runs import experiment

from experiments.harness import note, revision
from experiments.harness.rows import LAYOUT


@pytest.fixture(autouse=True)
def _outside_of_any_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of git sets variables that would send every git here to the hook's repository."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(revision.VARIABLE, raising=False)


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A project of one commit, with results, a note and a folder that git ignores."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "project"
    for name in ("pagedopt/table.py", "experiments/results/a.json", "experiments/bench.py", "notes/a.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one\n")
    (root / ".gitignore").write_text("runs/\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


def state(root: Path) -> tuple[str | None, bool | None]:
    found = revision.revision(root)
    return found["commit"], found["dirty"]


def test_a_clean_tree_is_its_commit(repository: Path) -> None:
    commit = git(repository, "rev-parse", "--short", "HEAD")
    assert state(repository) == (commit, False)
    (repository / "runs").mkdir()
    (repository / "runs" / "log").write_text("ignored by git")
    for name in ("experiments/results/a.json", "experiments/results/b.json", "notes/a.md", "notes/raw.txt"):
        (repository / name).write_text("two\n")
    assert state(repository) == (commit, False), "what a run writes does not change what it measures"


@pytest.mark.parametrize("name", ["pagedopt/table.py", "pagedopt/new.py", "experiments/bench.py", "results", "note"])
def test_a_change_of_the_source_shows(repository: Path, name: str) -> None:
    (repository / name).write_text("two\n")
    assert state(repository)[1] is True
    git(repository, "add", ".")
    assert state(repository)[1] is True, "staged is not committed"
    git(repository, "commit", "-qm", "two")
    assert state(repository) == (git(repository, "rev-parse", "--short", "HEAD"), False)


@pytest.mark.parametrize(
    ("named", "found"),
    [("abc1234", ("abc1234", False)), ("abc1234-dirty", ("abc1234", True)), ("", (None, None)), (None, (None, None))],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in another repository"])
def test_without_git_the_environment_says_it(
    named: str | None, found: Any, inside: bool, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named is not None:
        monkeypatch.setenv(revision.VARIABLE, named)
    assert state(repository / "pagedopt" if inside else tmp_path) == found
    assert state(repository)[0] == git(repository, "rev-parse", "--short", "HEAD"), "git knows better"


@pytest.mark.parametrize("named", ["main", "abc123", "abc1234+", "abc1234-dirty-dirty", "ABC1234"])
def test_an_unusable_name_ends_the_run_before_it_measures(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(revision.VARIABLE, named)
    with pytest.raises(SystemExit) as ended:
        revision.revision(tmp_path)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def result(**source: Any) -> dict[str, Any]:
    """Results of nothing."""
    machine = {"when": "2026-11-21T08:00:00+00:00", "processor": "P", "cores": 2, "python": "3.12", "versions": {}}
    found = {"experiment": "paged_state", "layout": LAYOUT, "device": "cpu", "machine": {**machine, **source}}
    return {**found, "parts": {}, "left_out": [], "verdicts": []}


def filled(folder: Path, option: Path | None) -> str:
    """A note's line about the machine, made of results in a folder or of those that are named."""
    return note.fill_from(option, folder, experiment("paged_state")).read_text()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results, with the note that would take them."""
    monkeypatch.setattr(note, "NOTES", tmp_path)
    (tmp_path / "paged_state.md").write_text((revision.ROOT / "notes" / "paged_state.md").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"commit": "abc1234", "dirty": False}, "at commit abc1234: CPU only"),
        ({"commit": "abc1234"}, "at commit abc1234: CPU only"),  # from before the state was recorded
        ({"commit": None}, "at commit unknown: CPU only"),
    ],
)
def test_a_note_takes_results_of_a_commit_and_old_ones(source: dict[str, Any], words: str, notes: Path) -> None:
    path = notes / "paged_state-cpu.json"
    path.write_text(json.dumps(result(**source)))
    for option in (path, None):
        assert words in filled(notes, option)


WRONG = [
    {"commit": "abc1234", "dirty": True},
    {"commit": "abc1234", "dirty": None},
    {"commit": None, "dirty": None},
]


@pytest.mark.parametrize("source", WRONG, ids=["changed", "state unknown", "unknown"])
@pytest.mark.parametrize("of", ["all", "part"])
def test_a_note_refuses_results_that_nobody_could_measure_again(
    of: str, source: dict[str, Any], notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (notes / "paged_state.md").read_text()
    content = result(**source) if of == "all" else result(commit="abc1234", dirty=False)
    content["parts"] = {"driver": {"rows": [], **(source if of == "part" else {"when": "earlier"})}}
    (notes / "paged_state-cpu.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as ended:
        filled(notes, None)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"paged_state-cpu.json{', part driver' if of == 'part' else ''}: measured at commit ")
    assert error.count("\n") == 1
    assert (notes / "paged_state.md").read_text() == before
