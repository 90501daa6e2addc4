"""May this be released?  README and usage quote numbers of one commit and of the files here, and pages are of today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments import kept, readme
from experiments.lecture import page
from experiments.lecture.page import Results
from pagedopt.commands.tables import console, results_table
from pagedopt.optim.registry import OPTIMIZERS

#: Files whose code does not run in what README and usage quote, AdamW on a GPU: CPU kernels and other optimizers.
NOT_RUN = (
    *(f"kernels/{name}.py" for name in ("cpu", "cpu_text", "numba_numbers")),
    *(f"optim/{entry.module}.py" for entry in OPTIMIZERS if entry.name != "PagedAdamW"),
    "optim/own.py",
)


def main() -> int:
    """Print what is quoted with its commit, and what is wrong; 1 if anything is."""
    front, verdicts = Results(), Results()
    pages = {kept.ROOT / name: [*readme.blocks(front, name).values()] for name in readme.PAGES}
    pages |= {page.TABLE: [page.page(results=verdicts)], page.STORY: [*page.quotes(verdicts).values()]}
    quoted = [*sources(front, "README, usage", NOT_RUN), *sources(verdicts, "claims, lecture")]
    console(110).print(results_table(quoted))
    found = [*wrong(quoted[: len(set(front.asked))]), *old_pages(pages)]
    print("\n".join(found) or "README and usage quote one commit, and no file that they measured has changed since")
    return int(bool(found))


def sources(results: Results, pages: str, not_run: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """The commit of each part that was asked for, and how many of the files that it measures have changed since."""
    for shown in sorted(set(results.asked)):
        part, module = results.part(shown)
        files = kept.changed(str(part["commit"]), module, not_run)
        changed = "not known" if files is None else str(len(files))
        yield {"part": shown, "quoted by": pages, "commit": str(part["commit"]), "files changed since": changed}


def wrong(quoted: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """What keeps README and usage from a release: two commits, or files that have changed since.

    >>> row = {"part": "a.b", "commit": "abc1234", "files changed since": "0"}
    >>> list(wrong([row]))
    []
    >>> list(wrong([row, {**row, "commit": "def5678"}]))
    ['README and usage quote 2 commits: abc1234, def5678; python -m experiments campaign']
    >>> list(wrong([{**row, "files changed since": "2"}]))
    ['files have changed since these were measured, or that is not known: a.b']
    """
    if len(commits := sorted({row["commit"] for row in quoted})) > 1:
        yield f"README and usage quote {len(commits)} commits: {', '.join(commits)}; python -m experiments campaign"
    if old := [row["part"] for row in quoted if row["files changed since"] != "0"]:
        yield f"files have changed since these were measured, or that is not known: {', '.join(old)}"


def old_pages(pages: Mapping[Path, list[str]]) -> Iterator[str]:
    """Pages that do not say what is so today, those of notes among them."""
    for path, blocks in pages.items():
        if any(block not in path.read_text() for block in blocks):
            yield f"{path.relative_to(kept.ROOT)}: fill it anew"
    for experiment in kept.every():
        path = kept.NOTES / f"{experiment.note}.md"
        if path.exists() and any(kept.KEPT.glob(f"{experiment.name}-*.json")):
            newest = kept.newest(kept.KEPT, experiment.name)
            if kept.machine_line(kept.read(newest, experiment)) not in path.read_text():
                yield f"{path.relative_to(kept.ROOT)}: python -m experiments {experiment.name} --note"
