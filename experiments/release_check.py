"""May this be released?  What README or a verdict quotes was measured with the code that is here, of a known commit."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments import readme
from experiments.harness import note, question
from experiments.harness.main import KEPT
from experiments.harness.revision import ROOT, git
from experiments.harness.rows import newest, read, write
from experiments.lecture import page
from experiments.lecture.page import Results

#: ``experiment.question`` → why it may be quoted although what it measures has changed since.
EXCEPTIONS: dict[str, str] = {}
#: What of a commit's tree fingerprints are made of.
FOLDERS = ("experiments", "pagedopt")


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    front, verdicts = Results(), Results()
    pages = {ROOT / name: [*readme.blocks(front, name).values()] for name in readme.PAGES}
    pages[page.NOTES / "lecture.md"] = [page.page(results=verdicts)]
    verdicts.asked += front.asked
    found = [*stale(verdicts, EXCEPTIONS), *of_history(), *old_pages(pages)]
    print("\n".join(found) or f"{len(set(verdicts.asked))} parts are quoted, and none has changed since")
    return int(bool(found))


def stale(results: Results, exceptions: Mapping[str, str]) -> Iterator[str]:
    """What was asked for and has changed since it was measured; and exceptions that are none."""
    quoted = dict.fromkeys(results.asked)
    for shown in quoted:
        part, topics = results.part(shown)
        if topics and shown not in exceptions:
            yield f"{shown}, measured at {part['commit']}, is quoted; changed since: {', '.join(topics)}"
        elif not topics and shown in exceptions:
            yield f"{shown}: nothing has changed since it was measured; take it off the list of exceptions"
    yield from (
        f"{shown} is on the list of exceptions, and nobody quotes it" for shown in exceptions if shown not in quoted
    )


def old_pages(pages: Mapping[Path, list[str]]) -> Iterator[str]:
    """Pages that do not say what is so today, those of notes among them."""
    for path, blocks in pages.items():
        if any(block not in path.read_text() for block in blocks):
            yield f"{path.relative_to(ROOT)}: fill it anew"
    for experiment in question.every():
        path = note.NOTES / f"{experiment.note}.md"
        if path.exists() and any(KEPT.glob(f"{experiment.name}-*.json")):
            kept = newest(KEPT, experiment.name)
            if note.machine_line(read(kept, experiment), experiment) not in path.read_text():
                yield f"{path.relative_to(ROOT)}: python -m experiments {experiment.name} --note"


def of_history() -> Iterator[str]:
    """Parts whose commit is not in this history, or whose tree there has other fingerprints than they store."""
    for path, _, part, asked in kept_parts():
        commit = str(part["commit"])
        if git(ROOT, "merge-base", "--is-ancestor", commit, "HEAD") is None:
            yield f"{path.name}, part {asked.name}: its commit {commit} is not in this history"
        elif (there := fingerprints_at(commit).get(asked.name)) != part.get("fingerprint"):
            yield f"{path.name}, part {asked.name}: commit {commit} has other fingerprints: {there}"


def store() -> int:
    """Store the fingerprints of each part's commit; none where the commit is not known."""
    for path, result, part, asked in kept_parts():
        commit = str(part["commit"])
        part["fingerprint"] = fingerprints_at(commit).get(asked.name)
        write(path, result)
    return 0


def kept_parts() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any], question.Question]]:
    """Every part of what is kept, with its file and its question."""
    for path in sorted(KEPT.glob("*.json")):
        found = question.find(json.loads(path.read_text())["experiment"])
        assert found is not None
        result = read(path, found[0])
        for asked in found[0].questions:
            if asked.name in result["parts"]:
                yield path, result, result["parts"][asked.name], asked


@functools.cache
def fingerprints_at(commit: str) -> dict[str, dict[str, str]]:
    """The fingerprints of every question in the tree of a commit, by its name; none if git does not know it."""
    with tree(commit) as root:
        every = [q for experiment in question.every() for q in experiment.questions]
        return {q.name: dict(q.fingerprints(root)) for q in every} if root else {}


@contextmanager
def tree(commit: str) -> Iterator[Path | None]:
    """A folder with what a commit has of :data:`FOLDERS`; None if git does not know it."""
    command = ["git", "-C", str(ROOT), "archive", commit, *FOLDERS]
    done = subprocess.run(command, capture_output=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        if done.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")
        yield Path(folder) if done.returncode == 0 else None
