"""May this be released?  What README or a verdict quotes was measured with the files here, and pages are of today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments import kept, readme
from experiments.lecture import page
from experiments.lecture.page import Results


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    front, verdicts = Results(), Results()
    pages = {kept.ROOT / name: [*readme.blocks(front, name).values()] for name in readme.PAGES}
    pages |= {page.TABLE: [page.page(results=verdicts)], page.STORY: [*page.quotes(verdicts).values()]}
    verdicts.asked += front.asked
    commits = dict.fromkeys(str(verdicts.part(shown)[0]["commit"]) for shown in front.asked)
    several = f"{' and '.join(readme.PAGES)} quote {', '.join(commits)}: python -m experiments campaign"
    found = [*[several] * (len(commits) > 1), *stale(verdicts), *old_pages(pages)]
    print("\n".join(found) or f"{len(set(verdicts.asked))} parts are quoted, and none has changed since")
    return int(bool(found))


def stale(results: Results) -> Iterator[str]:
    """What was asked for and has changed since it was measured, or of which that is not known."""
    for shown in dict.fromkeys(results.asked):
        part, module = results.part(shown)
        files = kept.changed(str(part["commit"]), module)
        if files or files is None:
            since = "not known" if files is None else ", ".join(files[:3])
            since += f" and {len(files) - 3} more" if files and len(files) > 3 else ""
            yield f"{shown}, measured at {part['commit']}, is quoted; changed since: {since}"


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
