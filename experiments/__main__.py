"""List the experiments, or run one by name: ``python -m experiments [NAME [OPTIONS]]``."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pagedopt.commands.parser import Parser as Explaining
from pagedopt.commands.process import end, process

if TYPE_CHECKING:
    from types import ModuleType

    from experiments.kept import Experiment
    from experiments.lab import Page, Row, Run, Table

#: What is no question: its module, and what it does.
PAGES = {
    "readme": ("readme", "fill README.md with what is kept, and draw its picture"),
    "lecture": ("lecture.page", "write notes/claims.md and the quotes in notes/lecture.md from stored results"),
    "campaign": ("campaign", "measure what README.md and usage.md quote, as far as this commit has not"),
    "release_check": ("release_check", "fail unless README and usage quote one commit, and files of today"),
}
INTERRUPTED = 130
#: Columns of a table, where the output goes into a file.
WIDTH = 110
HELP = (
    "Results name the commit and whether the tree differs from it outside of results and notes; --note takes them from "
    "a clean tree only. Where there is no .git, give both: PAGEDOPT_COMMIT=abc1234 or PAGEDOPT_COMMIT=abc1234-dirty."
)


class Parser(Explaining):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit status 2."""

        from experiments.device import refuse

        refuse(f"{self.prog}: {self.told(message)}")


def main(arguments: Sequence[str]) -> int:
    """``python -m experiments [NAME [OPTIONS]]``"""
    from experiments import kept

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr when it begins and ends
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m experiments NAME [--help]\n")
        for title in dict.fromkeys(experiment.title for experiment in kept.every()):
            names = ", ".join(each.name for each in kept.every() if each.title == title)
            print(f"  {names:20} {title}" if len(names) <= 20 else f"  {names}\n{title:>{len(title) + 23}}")
        print("", *(f"  {page:20} {what}" for page, (_, what) in PAGES.items()), sep="\n")
        return 0
    name, *rest = arguments[0].replace("-", "_"), *arguments[1:]
    if name in PAGES:
        module, what = PAGES[name]
        parser, page = (
            Parser(prog=f"python -m experiments {name}", description=what),
            importlib.import_module(f"experiments.{module}"),
        )
        getattr(page, "options", lambda _: None)(parser)
        return int(page.main(**vars(parser.parse_args(rest))))
    found = kept.find(name)
    if found is None:
        names = ", ".join(experiment.name for experiment in kept.every())
        meant = f" (did you mean {' or '.join(near)}?)" if (near := kept.near(name)) else ""
        print(f"there is no experiment {arguments[0]!r}{meant}; there are {names}", file=sys.stderr)
        return 2
    return run(*found, rest)


def parse(experiment: Experiment, part: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked as far as that goes without measuring.

    Raises:
        SystemExit: they cannot be followed.
    """
    import torch

    from experiments.kept import KEPT, ROOT

    parser = Parser(prog=f"python -m experiments {experiment.name}", description=experiment.title, epilog=HELP)
    parser.add_argument("--quick", action="store_true", help="toys: a smoke test whose numbers mean nothing")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda, cuda:N or cpu (default: %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="FOLDER", help="for results (default: runs; of --quick runs/quick)")
    where.add_argument("--keep", action="store_true", help="write results to experiments/results, to be committed")
    parser.add_argument("--merge", action="store_true", help="join results measured on this machine before")
    json: dict[str, Any] = {"nargs": "?", "type": Path, "const": Path(), "metavar": "JSON"}
    of_kept = "of these results (default: a GPU's in --out, or in experiments/results); measure nothing"
    parser.add_argument("--show", **json, help=f"all tables {of_kept}")
    parser.add_argument("--note", **json, help=f"fill notes/{experiment.note}.md and draw the pictures {of_kept}")
    if len(experiment.questions) > 1:
        parser.add_argument("--only", metavar="QUESTIONS", help=f"some of {','.join(experiment.questions)}")
    for module in dict.fromkeys(experiment.questions.values()):
        getattr(module, "options", lambda _: None)(parser)
    options = parser.parse_args(arguments)
    asked = getattr(options, "only", None) if part is None else part
    options.only = [name.strip().replace("-", "_") for name in asked.split(",")] if asked else [*experiment.questions]
    if unknown := [name for name in options.only if name not in experiment.questions]:
        parser.error(
            f"--only: no question {', '.join(map(repr, unknown))}; there are {', '.join(experiment.questions)}"
        )
    if options.quick and (options.keep or (options.out and options.out.resolve() == KEPT)):
        parser.error("--quick measures toys, which do not belong into experiments/results")
    options.kept = options.note if options.note is not None else options.show
    if options.out is None and options.kept is None:
        options.out = KEPT if options.keep else ROOT / "runs" / "quick" if options.quick else ROOT / "runs"
    return options


def run(experiment: Experiment, part: str | None, arguments: Sequence[str]) -> int:
    """Measure, print, write JSON and pictures; or show results, or fill a note from them.

    Returns:
        0; 1 if a question failed or, in a real run, a bar is missed; 130 if it was interrupted.

    Raises:
        SystemExit: with status 2 and one line, if the options cannot be followed.
    """
    from experiments import kept, pictures
    from experiments.device import chosen_device
    from experiments.lab import Page, Run

    options = parse(experiment, part, arguments)
    if options.kept is not None:
        return of_kept(experiment, options)
    if options.device != "cpu" and len(options.only) > 1:
        return one_by_one(experiment, options, arguments)
    device, conditions = chosen_device(options.device), kept.conditions()
    asked = {name: module for name, module in experiment.on(device.type).items() if name in options.only}
    path = options.out / f"{experiment.name}-{kept.label(device)}.json"
    about = {"experiment": experiment.name, "layout": kept.LAYOUT, "device": device.type, "quick": options.quick}
    result = kept.begun(path, {**about, "machine": conditions, "parts": {}}, experiment, asked, options.merge)
    code, pages = 0, list[Page]()
    for name, module in asked.items():
        print(name)
        code = max(code, answered(module, Run(device, options.quick, options, name), result, path))
        if result["parts"][name]["complete"]:
            pages.append(kept.page(name, module, result["parts"][name]))
            show(pages[-1])
        if code == INTERRUPTED:
            break
    drawn = [file for page in pages for file in pictures.save_all(page, path)]
    for line in kept.left_out(result, experiment):
        print(f"left out: {line}")
    bars = [bar for page in pages for bar in page.bars]
    for bar in bars:
        print(" | ".join(bar.words()[: 3 if options.quick else 4]))
    if kept.this_revision()["dirty"] is not False:
        print(f"measured at {kept.words(kept.this_revision())}: a note is not filled from that")
    if options.quick:
        print("--quick: the sizes are toys, the bars say nothing")
    print("written:", path, *drawn)
    return max(code, int(any(bar.met is False for bar in bars) and not options.quick))


def one_by_one(experiment: Experiment, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Each question in a process of its own: on a GPU what one leaves behind, as a profiler, slows the next."""
    code, merge = 0, options.merge
    for name in options.only:
        command = [sys.executable, "-m", "experiments", experiment.name, *arguments, "--only", name]
        code = max(code, subprocess.run([*command, *["--merge"] * merge], check=False).returncode)
        merge = True
        if code == INTERRUPTED:
            break
    return code


def of_kept(experiment: Experiment, options: argparse.Namespace) -> int:
    """Show results that are there, or make a note's sections and pictures of them."""
    from experiments import kept, pictures

    path = kept.newest(options.out or kept.KEPT, experiment.name) if options.kept == Path() else options.kept
    result = kept.read(path, experiment)
    pages = kept.pages(result, experiment)
    if options.show is not None:
        for name, rows in kept.of_questions(result, experiment).items():
            show(pages[name])
            print(f"\nall rows of {name}", *map(as_lines, rows), sep="\n")
    if options.note is not None:
        print("filled:", kept.fill_from(path, experiment))
        print("drawn:", *(file for page in pages.values() for file in pictures.save_all(page, path)))
    return 0


def answered(module: ModuleType, run: Run, result: dict[str, Any], path: Path) -> int:
    """Measure one question and write its rows, of one that goes on each at once; rows of before stay if it fails.

    Returns:
        0; 1 if it failed, 130 if it was interrupted.
    """
    from experiments import kept
    from experiments.lab import Rows

    rows, name, begin = Rows(), run.part, time.perf_counter()
    before = result["parts"].get(name, {})
    source, goes_on = {**kept.this_revision()}, getattr(module, "GOES_ON", False)
    if goes_on and before and source.items() <= before.items():
        run.known = Rows(before["rows"])
    more = {"machine": result["machine"]} if getattr(module, "GPUS", 1) > 1 else {}

    def write(complete: bool) -> None:
        if complete or goes_on or not before:
            taken = time.perf_counter() - begin
            part = {"rows": rows, "left_out": run.left_out, "complete": complete, "seconds": taken, "when": kept.now()}
            result["parts"][name] = {**part, **source, **more}
        kept.write(path, result)

    ended, status = "", 0
    gc.collect()
    gc.freeze()  # what was imported so far lives on: the many collections to come need not look at it
    try:
        for row in module.measure(run):
            rows.append(row)
            if goes_on:
                write(False)
    except KeyboardInterrupt:
        ended, status = "interrupted", INTERRUPTED
    except Exception as error:  # the other questions go on
        traceback.print_exc()
        ended, status = f"failed with {type(error).__name__}: {str(error).strip()[:600]}", 1
    gc.unfreeze()
    run.free()
    if ended:
        run.leave_out(f"{ended}; {len(rows)} rows are in the file, and nothing is made of them")
    write(not ended)
    return status


def show(page: Page) -> None:
    """Print all that a page says."""
    from experiments.lab import Table

    for block in (block for blocks in page.blocks.values() for block in blocks):
        print()
        print_table(block.full()) if isinstance(block, Table) else print(block)


def as_lines(row: Row) -> str:
    """A row with all of its cells, of long texts their beginning."""
    from experiments.lab import number

    def shown(cell: Any) -> str:
        cell = cell["median"] if isinstance(cell, dict) and "median" in cell else cell
        return number(cell) if type(cell) in (int, float) else str(cell)[:60]

    cells = (f"{name} {shown(cell)}" for name, cell in row.items() if cell not in (None, ""))
    return textwrap.fill(" · ".join(cells), WIDTH, initial_indent="- ", subsequent_indent="  ")


def print_table(found: Table) -> None:
    """As wide as the terminal, or else so wide that a page of text holds it; the first column is text."""
    from rich.table import Column

    from pagedopt.commands import tables

    out = tables.console(WIDTH, markup=False)
    print(found.title)
    table = tables.FittingTable(*(Column(h, justify="right" if i else "left", overflow="fold")
                                  for i, h in enumerate(found.headings)))  # fmt: skip
    for line in found.lines:
        table.add_row(*line)
    out.print(table)


def load() -> Sequence[str]:
    """Import what takes long; returns the arguments."""
    import experiments.kept  # noqa: F401

    return sys.argv[1:]


if __name__ == "__main__":
    end(process("experiments", load, main))
