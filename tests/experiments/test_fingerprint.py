"""What kept results say of the code that they measured: of which commit they are, on which page that stands, what has
changed since; and what counts as a change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiment_runs import asked as asked_of
from experiment_runs import experiment, undated
from paths import ROOT

from experiments import release_check
from experiments.harness import fingerprint, note, question
from experiments.harness.main import KEPT
from experiments.harness.revision import git

# --- what is kept


def test_a_kept_part_is_of_a_clean_commit() -> None:
    for path, _, part, asked in release_check.kept_parts():
        name = f"{path.name}, {asked.name}"
        assert re.fullmatch(r"[0-9a-f]{7,40}", part["commit"] or ""), f"{name}: of no commit"
        assert not part.get("dirty"), f"{name}: measured in a tree that nobody has"
        assert "fingerprint" in part, f"{name}: python -m experiments fingerprints"


def test_a_question_says_what_it_measures() -> None:
    for asked in (q for e in question.every() for q in e.questions):
        assert list(asked.fingerprints()) == [fingerprint.OWN, *asked.module.MEASURES], asked.name
        reached = fingerprint.reached(ROOT, asked.module.__name__, "measure")
        assert any(line.startswith(f"{asked.module.__name__}.measure: FunctionDef") for line in reached), asked.name


def test_the_page_of_what_is_kept_says_how_old_it_is() -> None:
    """Its note, or else the pages that link to it."""
    texts = {path.stem: path.read_text() for path in note.NOTES.glob("*.md")}
    for path, result, part, asked in release_check.kept_parts():
        own = experiment(result["experiment"]).note
        pages = [own] if own in texts else [name for name, text in texts.items() if path.name in text]
        assert pages, f"{path.name}: on no page"
        for name in pages:
            assert part["commit"] in texts[name], f"{name}.md: {part['commit']} of {path.name}, {asked.name}"


# --- what counts as a change


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project: a question that reaches a function of ``works`` and lists kernels and the launch."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


FILES = {
    "experiments/asks.py": '''"""Which?"""
from experiments.harness.time import Case
from experiments.lab import Row
from experiments.works import ways
from experiments.works.more import LIST, mark as marked
SIZE = 3
TITLE = "a table"
def measure(run):
    """Rows."""
    yield from ways.each(run, SIZE, LIST, Case)
TABLES = [TITLE for SIZE in (1, 2)]
''',
    "experiments/works/ways.py": "def each(run: int, *more):\n    yield other(run)\ndef other(run):\n    return 1\n",
    "experiments/works/more.py": """
LIST = []
MODULE = "experiments.works.named"
def mark(function):
    LIST.append(function)
    return function
@mark
def listed():
    return MODULE
def unused():
    return 7
""",
    "experiments/works/named.py": "def run():\n    return 1\n",
    "experiments/harness/time.py": "def measure():\n    return 1\n",
    "pagedopt/kernels/table.cuh": "int x;  // a table\n",
    "pagedopt/kernels/multi_tensor_apply.cu": "int y;\n",
    "pagedopt/launch/sweep.py": "from os import path\n\n\ndef launch(table: int) -> None:\n    return table\n",
    "pagedopt/__init__.py": "",
    "pagedopt/rules/__init__.py": "",
    "pagedopt/rules/adamw.py": """
class adamw:
    cuda_source = staticmethod(lambda: "float a;  // the first")
    numba_source = staticmethod(lambda: "a = 1  # the first")
""",
}
MEASURED = ("clock", "kernels", "CPU kernels", "launch")


def found(root: Path) -> dict[str, str]:
    """As a new process would find it."""
    for cached in (
        fingerprint.of, fingerprint._definition, fingerprint._definitions, fingerprint._imports, fingerprint._printed,
        fingerprint._registered, fingerprint._tree, fingerprint._of_topic,
    ):  # fmt: skip
        cached.cache_clear()
    return dict(fingerprint.of("experiments.asks", MEASURED, root))


@pytest.mark.parametrize(
    ("name", "old", "new", "topics"),
    [
        ("experiments/asks.py", "SIZE = 3", "SIZE = 4", ["experiment"]),
        ("experiments/asks.py", "a table", "another", []),
        ("experiments/asks.py", '"""Rows."""', '"""Rows, one by one."""', []),
        ("experiments/works/ways.py", "return 1", "return 2", ["experiment"]),
        ("experiments/works/ways.py", "run: int", "run: float", []),
        ("experiments/works/more.py", "return MODULE", "return 2", ["experiment"]),
        ("experiments/works/more.py", "return 7", "return 8", []),
        ("experiments/works/named.py", "return 1", "return 2", ["experiment"]),
        ("experiments/harness/time.py", "return 1", "return 2", ["clock"]),
        ("pagedopt/kernels/table.cuh", "int x", "long x", ["kernels"]),
        ("pagedopt/kernels/table.cuh", "a table", "the table", []),
        ("pagedopt/rules/adamw.py", "float a;", "double a;", ["kernels"]),
        ("pagedopt/rules/adamw.py", "a = 1 ", "a = 2 ", ["CPU kernels"]),
        ("pagedopt/rules/adamw.py", "the first", "the second", []),
        ("pagedopt/launch/sweep.py", "return table", "return 2", ["launch"]),
        ("pagedopt/launch/sweep.py", "from os import path", "from os.path import join", []),
    ],
)  # fmt: skip
def test_code_that_is_measured_counts_and_nothing_else(
    name: str, old: str, new: str, topics: list[str], tree: Path
) -> None:
    before = found(tree)
    path = tree / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert fingerprint.changed(before, found(tree)) == topics


def test_a_tree_that_prints_no_kernel_has_another_fingerprint(tree: Path) -> None:
    before = found(tree)
    (tree / "pagedopt" / "rules" / "adamw.py").write_text("raise ImportError")
    assert fingerprint.changed(before, found(tree)) == ["kernels", "CPU kernels"]


def test_a_topic_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="MEASURES names speed; there are clock, kernels"):
        fingerprint.of("experiments.asks", ("speed",))


def test_what_is_stale_is_said_and_nothing_else_is() -> None:
    now = {"experiment": "1", "kernels": "2", "launch": "3"}
    assert fingerprint.changed(now, now) == []
    assert fingerprint.changed({**now, "kernels": "0"}, now) == ["kernels"]
    assert fingerprint.changed({"experiment": "1"}, now) == ["kernels", "launch"], "the list of topics grew"
    assert fingerprint.changed(None, now) == [fingerprint.UNKNOWN]
    said = [fingerprint.age("abc1234", topics) for topics in ([], ["kernels", "launch"], [fingerprint.UNKNOWN])]
    assert said == [
        "measured at abc1234",
        "measured at abc1234; kernels, launch changed since",
        "measured at abc1234; what has changed since is unknown",
    ]
    assert {undated(text) for text in said} == {"measured at abc1234"}


def test_a_note_says_what_has_changed_of_which_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = experiment("fused_step")
    now = {q.name: {**q.fingerprints()} for q in asked.questions}
    parts: dict[str, Any] = {name: {"fingerprint": known} for name, known in now.items()}
    assert note.changes({"parts": parts}, asked) == ""
    for name in ("close_to_a_copy", "host_time"):
        parts[name] = {"fingerprint": {**now[name], "step": "other"}}
    parts["first_step"] = {"fingerprint": None}
    said = " Changed since: step (close_to_a_copy, host_time); unknown (first_step)."
    assert note.changes({"parts": parts}, asked) == said
    assert undated(said) == ""
    assert note.changes({"parts": parts, "quick": True}, asked) == ""


# --- before a release


class Quoted:
    """Results of which two parts are quoted, one of them stale."""

    asked = ("a.fresh", "a.stale", "a.stale")

    def part(self, shown: str) -> tuple[dict[str, str], list[str]]:
        return {"commit": "abc1234"}, ["kernels"] * shown.endswith("stale")


@pytest.mark.parametrize(
    ("exceptions", "said"),
    [
        ({}, ["a.stale, measured at abc1234, is quoted; changed since: kernels"]),
        ({"a.stale": "a rename"}, []),
        ({"a.stale": "a rename", "a.fresh": "?"}, ["a.fresh: nothing has changed since it was measured"]),
        ({"a.stale": "a rename", "a.other": "?"}, ["a.other is on the list of exceptions, and nobody quotes it"]),
    ],
)
def test_what_is_quoted_and_stale_fails_a_release(exceptions: dict[str, str], said: list[str]) -> None:
    lines = list(release_check.stale(Quoted(), exceptions))  # type: ignore[arg-type]
    assert len(lines) == len(said)
    assert all(line.startswith(words) for line, words in zip(lines, said, strict=True))


@pytest.mark.parametrize(
    ("commit", "stored", "said"),
    [
        ("abc1234", {"formats": "1"}, []),
        ("abc1234", {"formats": "2"}, ["codes-cpu.json, part codes: commit abc1234 has other fingerprints"]),
        ("0123456", {"formats": "1"}, ["codes-cpu.json, part codes: its commit 0123456 is not in this history"]),
    ],
)
def test_commits_are_held_against_history(
    commit: str, stored: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_part() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any], question.Question]]:
        yield KEPT / "codes-cpu.json", {}, {"commit": commit, "fingerprint": stored}, asked_of("codes")

    monkeypatch.setattr(release_check, "kept_parts", one_part)
    monkeypatch.setattr(release_check, "git", lambda _, *words: "" if "abc1234" in words else None)
    monkeypatch.setattr(release_check, "fingerprints_at", lambda _: {"codes": {"formats": "1"}})
    lines = list(release_check.of_history())
    assert [line.partition(": {")[0] for line in lines] == said


def test_the_tree_of_a_commit_is_what_it_had() -> None:
    if (head := git(ROOT, "rev-parse", "--short", "HEAD")) is None:
        pytest.skip("needs git, and a history")
    with release_check.tree(head) as root:
        assert root is not None
        assert {path.name for path in root.iterdir()} == set(release_check.FOLDERS)
        assert (root / "pagedopt" / "__init__.py").is_file()
    with release_check.tree("0123456") as root:
        assert root is None


@pytest.mark.long
def test_the_commit_of_a_clean_tree_has_its_fingerprints() -> None:
    if (head := git(ROOT, "rev-parse", "--short", "HEAD")) is None or git(ROOT, "status", "--porcelain"):
        pytest.skip("needs git, and a tree without changes")
    there = release_check.fingerprints_at(head)
    assert there == {q.name: q.fingerprints() for e in question.every() for q in e.questions}


def test_a_release_fails_on_what_readme_or_a_verdict_quotes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: set[str] = set()
    monkeypatch.setattr(release_check, "stale", lambda of, _: asked.update(of.asked) or ["kernels"])
    for name in ("of_history", "old_pages"):
        monkeypatch.setattr(release_check, name, lambda *_, said=name: [said])
    assert release_check.main() == 1
    assert {"paged_state.rivals", "launch_overhead.eager"} <= asked
    assert capsys.readouterr().out == "kernels\nof_history\nold_pages\n"


def test_a_page_that_says_less_than_is_so_fails_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_check, "KEPT", tmp_path)
    path = ROOT / "README.md"
    first = path.read_text().partition("\n")[0]
    assert list(release_check.old_pages({path: [first]})) == []
    assert list(release_check.old_pages({path: [first, "what nobody wrote"]})) == ["README.md: fill it anew"]
