"""Is a step as fast as in another checkout of the project?  Both in turn, each time in a process of its own.

Answer: a row per work and clock, this tree's time over the other's; notes and reviews quote it.

Without another one it is this one against itself: ratios are then as far from 1 as chance takes them.

Of GPU times the medians are compared, of host times the least: what else the host does only adds to them.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from experiments.child import ROOT, Child
from experiments.lab import Page, Row, Rows, Run, formatted, series
from experiments.works.other_tree import steps

MEASURES = ("kernels", "launch", "tables", "optim")
TREES = ("other", "this")
LIMIT = 1800.0


def checkout(text: str) -> Path:
    """A folder with the package in it.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    folder = Path(text)
    if not (folder / "pagedopt" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no pagedopt in it")
    return folder.resolve()


def options(parser: argparse.ArgumentParser) -> None:
    """The other tree, and how often."""
    parser.add_argument(
        "--other", type=checkout, metavar="FOLDER",
        help="a checkout to compare with (default: this one, which says how far two of the same are apart)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of both trees (default: 3)")


def measure(run: Run) -> Iterator[Row]:
    """A row per work and clock: the times of both trees (µs), and this tree's over the other's.

    Raises:
        RuntimeError: a process failed; with its last words.
    """
    trees = {"other": run.options.other or ROOT, "this": ROOT}
    if run.options.other is None:
        run.leave_out("another tree: --other names none, so this one is compared with itself")
    found = Rows()
    for number in run.each(range(run.size(run.options.rounds, 1))):
        for name in TREES if number % 2 else TREES[::-1]:
            with tempfile.TemporaryDirectory() as cache:  # two versions need not understand each other's kernels
                environment = {"PAGEDOPT_CACHE_DIR": cache}
                child = Child(steps, str(run.device), run.quick, limit=LIMIT, environment=environment, tree=trees[name])
                found += [{"tree": name, **row} for row in child]
            if child.ended:
                raise RuntimeError(f"{trees[name]}: its process {child.ended}")
    yield from compared(found)


def compared(rows: Rows) -> Iterator[Row]:
    """A row per work and clock, of rows of samples by tree and round."""
    for group in rows.groups("work"):
        for clock, kind in (("GPU", "median"), ("host", "min")):
            samples = {tree: [t for row in group.where(tree=tree) for t in row[clock.lower()]] for tree in TREES}
            if all(samples.values()):
                times = {tree: series(samples[tree], clock) for tree in TREES}
                ratio = times["this"][kind] / times["other"][kind]
                yield {"work": group[0]["work"], "clock": clock, "of": kind, **times, "ratio": ratio}


def least_and_median(tree: str, row: Row) -> str:
    """Both."""
    return f"{row[tree]['min']:,.1f} / {row[tree]['median']:,.1f}"


def report(page: Page, rows: Rows) -> None:
    """A table."""
    page.table("µs a step of PagedAdamW", rows, {"work": "work", "clock": "clock",
        "other: min / median": functools.partial(least_and_median, "other"),
        "this: min / median": functools.partial(least_and_median, "this"),
        "this / other": formatted("ratio", "{:.3f}"), "of": "of"})  # fmt: skip
