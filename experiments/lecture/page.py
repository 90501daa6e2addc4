"""``notes/claims.md``, a table of all claims, and what ``notes/lecture.md`` quotes of it, made of stored results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.kept import KEPT, NOTES, check_source, fill, find, markdown, newest, of_questions, read
from experiments.lab import Rows
from experiments.lecture.claims import CHANGED, NOT_HERE, NOT_SEEN, NOT_YET, SLIP, TRUE, VERDICTS, Claim, claims

#: Lists the notes.
INDEX = NOTES / "README.md"
#: All claims; a reading of them, whose blocks name the claims that they quote: ``<!-- begin A5 A6 -->``.
TABLE, STORY = NOTES / "claims.md", NOTES / "lecture.md"
PARTS = {
    "A": 'GPU MODE lecture 6, "Optimizing Optimizers"',
    "C": '"CUDA performance, PyTorch flexibility"',
    "D": "The puzzlers' answers on fusion",
}
#: Verdicts behind a number.
SEVERAL = {
    TRUE: "are true", CHANGED: "have changed since", SLIP: "were slips", NOT_SEEN: "not seen here",
    NOT_YET: "not measured yet", NOT_HERE: "not shown here",
}  # fmt: skip
HEAD = """\
# Claims of the lectures, and what was measured

Made by `python -m experiments lecture` of `experiments/claims.toml` and `experiments/results/`; do not edit.
[lecture.md](lecture.md) says the same in prose, with fewer numbers.

Sources: notes on GPU MODE lecture 6, "Optimizing Optimizers", in English (000) and in Chinese (001); the talk "CUDA
performance, PyTorch flexibility"; the puzzlers' post on fusion, and "its trace" published with it. Words in quotation
marks are the source's, with its hedges; `claims.toml` says which notes have a claim.

*True*: it is so today; a claim that something may or can happen is true if it happened once, and where only its number
differs. *Changed since*: it is no longer so. *Was a slip*: it was not so then either. *Not seen here*: what may happen
did not happen in what was tried; that refutes nothing.

Numbers under "ours" are a GPU's; the note that is linked names the machine. Each verdict follows from measured numbers,
named by `holds` in `claims.toml` or by `experiments/lecture/readings.py`.
"""


@dataclass(frozen=True)
class Line:
    """A claim, and what was found: the numbers, the verdict, and who says so."""

    claim: Claim
    ours: str
    verdict: str

    def cells(self) -> list[str]:
        """Of the table; the last links to the note."""
        claim = self.claim
        verdict = f"{self.verdict}; {claim.today}" if claim.today else self.verdict
        found = find(claim.experiment) if claim.shown else None
        shown = f"[{claim.shown}]({found[0].note}.md)" if found else "-"
        said = f"{claim.claim} ({claim.number})" if claim.number else claim.claim
        return [claim.id, said, self.ours or "-", verdict, shown]

    def quoted(self) -> str:
        """An item of a list: the claim, the numbers and the verdict."""
        measured = f"Measured: {self.ours}. " if self.ours else ""
        return f"* **{self.claim.id}**: {self.claim.claim}. {measured}*{self.verdict.capitalize()}.*"


class Results:
    """Kept results of a GPU, by experiment.

    Attributes:
        asked: every ``experiment.question`` whose rows were asked for and are there.
    """

    def __init__(self, folder: Path = KEPT) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self._known: dict[str, dict[str, Any] | None] = {}

    def of(self, name: str) -> dict[str, Any] | None:
        """The newest file of an experiment; None if there is none, or no such experiment yet.

        Raises:
            SystemExit: it was measured in a tree that nobody has.
        """
        if name not in self._known:
            self._known[name], found = None, find(name)
            if found and any(not path.stem.endswith("-cpu") for path in self.folder.glob(f"{name}-*.json")):
                path = newest(self.folder, name)
                self._known[name] = read(path, found[0])
                check_source(self._known[name] or {}, path.name)
        return self._known[name]

    def rows(self, shown: str) -> Rows | None:
        """Rows of ``experiment.question``, with what is derived from them."""
        name, _, part = shown.partition(".")
        result, found = self.of(name), find(name)
        rows = of_questions(result, found[0]).get(part) if result and found else None
        if rows is not None:
            self.asked.append(shown)
        return rows

    def part(self, shown: str) -> tuple[Mapping[str, Any], ModuleType]:
        """What a file has of ``experiment.question``, which has to be kept, and the question.

        Raises:
            LookupError: it is not kept.
        """
        name, _, part = shown.partition(".")
        result, found = self.of(name), find(name)
        if not result or not found or part not in result["parts"]:
            raise LookupError(f"no results of {shown} are kept in {self.folder}")
        return result["parts"][part], found[0].questions[part]


def line(claim: Claim, results: Results) -> Line:
    """What is said of a claim."""
    if claim.not_here:
        return Line(claim, "", f"{NOT_HERE}: {claim.not_here}")
    rows = results.rows(claim.shown)
    said = claim.said(rows) if rows else None
    if said is None:
        return Line(claim, "", NOT_YET)
    return Line(claim, said.words, claim.verdicts[0 if said.holds else 1])


def page(known: Sequence[Claim] | None = None, results: Results | None = None) -> str:
    """The whole table."""
    results = results or Results()
    lines = [line(claim, results) for claim in known or claims()]
    blocks = [HEAD, f"{summary(lines)}\n"]
    headings = ("id", "claim (its number)", "ours", "verdict", "shown by")
    for letter, title in PARTS.items():
        cells = [found.cells() for found in lines if found.claim.id.startswith(letter)]
        blocks.append(f"## {title}\n\n{markdown(headings, cells).replace('---:', '---')}\n")
    return "\n".join(blocks)


def quotes(results: Results | None = None) -> dict[str, str]:
    """What fills the blocks of the story."""
    results, known = results or Results(), {claim.id: claim for claim in claims()}
    blocks = re.findall(r"<!-- begin (.*) -->", STORY.read_text())
    return {block: "\n".join(line(known[name], results).quoted() for name in block.split()) for block in blocks}


def summary(lines: Sequence[Line]) -> str:
    """How many claims there are, and what was found of how many."""
    counts = Counter(found.verdict.partition(":")[0] for found in lines)
    return f"{len(lines)} claims: {', '.join(f'{counts[each]} {SEVERAL[each]}' for each in VERDICTS if counts[each])}."


def main() -> int:
    """Write the table, and fill the story and the list of notes."""
    results = Results()
    TABLE.write_text(page(results=results))
    fill(STORY, quotes(results))
    fill(INDEX, {"claims": summary([line(claim, results) for claim in claims()])})
    print(f"written: {TABLE}, {STORY}")
    return 0
