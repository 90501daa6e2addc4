"""Is a step as fast as in another checkout of the project?  Both in turn, each time in a process of its own.

Answer: a row per work and clock, this tree's time over the other's; notes and reviews quote it.

Without another one it is this one against itself: ratios are then as far from 1 as chance takes them.

Of GPU times the medians are compared, of host times the least: what else the host does only adds to them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.harness.child import ROOT, Child
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Table
from experiments.works.other_tree import steps

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
    """A row per round, tree and work: host and GPU times of every step (µs).

    Raises:
        RuntimeError: a process failed; with its last words.
    """
    trees = {"other": run.options.other or ROOT, "this": ROOT}
    if run.options.other is None:
        run.leave_out("another tree: --other names none, so this one is compared with itself")
    for number in run.each(range(run.size(run.options.rounds, 1))):
        for name in TREES if number % 2 else TREES[::-1]:
            with tempfile.TemporaryDirectory() as cache:  # two versions need not understand each other's kernels
                environment = {"PAGEDOPT_CACHE_DIR": cache}
                child = Child(steps, str(run.device), run.quick, limit=LIMIT, environment=environment, tree=trees[name])
                for row in child:
                    yield {"round": number, "tree": name, **row}
            if child.ended:
                raise RuntimeError(f"{trees[name]}: its process {child.ended}")


def derive(rows: Rows) -> Rows:
    """A row per work and clock: the least and the median of each tree, and this tree's over the other's."""
    if rows and "ratio" in rows[0]:  # older files have no more than this
        return rows
    found = Rows()
    for group in rows.groups("work"):
        for clock, kind in (("gpu", "median"), ("host", "min")):
            times = {tree: [t for row in group.where(tree=tree) for t in row[clock]] for tree in TREES}
            if not all(times.values()):
                continue
            row: dict[str, Any] = {"work": group[0]["work"], "clock": clock, "of": kind}
            row |= {tree: {"min": min(t), "median": statistics.median(t)} for tree, t in times.items()}
            found.append({**row, "ratio": row["this"][kind] / row["other"][kind]})
    return found


def old(result: dict[str, Any]) -> list[Row]:
    """Rows of a file that has them at its top."""
    return list(result["rows"])


def least_and_median(tree: str, row: Row) -> str:
    """Both."""
    return f"{row[tree]['min']:,.1f} / {row[tree]['median']:,.1f}"


TABLES = [
    Table("µs a step of PagedAdamW", {
        "work": "work", "clock": "clock",
        "other: min / median": lambda row: least_and_median("other", row),
        "this: min / median": lambda row: least_and_median("this", row),
        "this / other": lambda row: f"{row['ratio']:.3f}", "of": "of",
    })
]  # fmt: skip
