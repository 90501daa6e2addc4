"""The options that every experiment takes, and the way from them to a file of results or a note."""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from experiments.harness import note, plot, rows, show
from experiments.harness.machine import chosen_device, conditions, label
from experiments.harness.question import Experiment, Question
from experiments.harness.revision import HELP, ROOT, refuse, this_revision, words
from experiments.harness.run import Advance, Run, answered
from pagedopt.commands import parser as parsers

#: Results of today, toys, and what is committed.
RUNS, QUICK, KEPT = ROOT / "runs", ROOT / "runs" / "quick", ROOT / "experiments" / "results"
INTERRUPTED = 130


class Parser(parsers.Parser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit status 2."""
        refuse(f"{self.prog}: {self.told(message)}")


def parse(experiment: Experiment, arguments: Sequence[str], part: str | None) -> argparse.Namespace:
    """The options, checked as far as that goes without measuring.

    Raises:
        SystemExit: they cannot be followed.
    """
    name, names = experiment.name, [question.name for question in experiment.questions]
    about = f"{experiment.title} ({experiment.takes})" if experiment.takes else experiment.title
    parser = Parser(prog=f"python -m experiments {name}", description=about, epilog=HELP)
    parser.add_argument("--quick", action="store_true", help="toys: a smoke test whose numbers mean nothing")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda, cuda:N or cpu (default: %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="FOLDER", help="for results (default: runs; of --quick runs/quick)")
    where.add_argument("--keep", action="store_true", help="write results to experiments/results, to be committed")
    add = functools.partial(parser.add_argument, nargs="?", type=Path, const=Path(), metavar="JSON")
    add("--merge", help="join results measured on this machine before (default: the file that is written to)")
    tables = "measure nothing: put the tables of these results (default: a GPU's in --out, or in experiments/results)"
    has_note = (note.NOTES / f"{experiment.note}.md").exists()
    add("--note", help=f"{tables} into notes/{experiment.note}.md" if has_note else argparse.SUPPRESS)
    add("--draw", help="measure nothing: draw the pictures of these results (default: as of --note) beside them")
    if len(names) > 1:
        parser.add_argument("--only", metavar="QUESTIONS", help=f"some of {','.join(names)}")
    for question in experiment.questions:
        question.options(parser)
    options = parser.parse_args(arguments)
    asked = getattr(options, "only", None) if part is None else part
    options.only = names if asked is None else chosen(parser, asked, names)
    if options.note is None and options.draw is None:
        if options.quick and (options.keep or (options.out and options.out.resolve() == KEPT)):
            parser.error("--quick measures toys, which do not belong into experiments/results")
        options.out = options.out or (KEPT if options.keep else QUICK if options.quick else RUNS)
    return options


def chosen(parser: argparse.ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    """The questions that ``--only`` names, in the order in which they are measured.

    Raises:
        SystemExit: there is no such question, or none is named.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"no question {', '.join(map(repr, unknown))}" if unknown else "no question is named"
        parser.error(f"--only: {wrong}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def check(folder: Path, questions: Sequence[Question]) -> None:
    """Make the folder of results, and let questions look for what they need, before hours are spent.

    Raises:
        SystemExit: the folder cannot be made or written to, or what a question needs is not there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        refuse(f"--out {folder}: results cannot be written there: {error.strerror}")
    for question in questions:
        try:
            question.needs()
        except ValueError as error:
            refuse(f"{question.name}: {error}")


def begun(
    options: argparse.Namespace, path: Path, experiment: Experiment, device: torch.device, gpus: int
) -> dict[str, Any]:
    """Results without a question measured yet, or those that new ones are to join.

    Raises:
        SystemExit: results cannot be joined.
    """
    new = {
        "experiment": experiment.name,
        "layout": rows.LAYOUT,
        "machine": conditions(),
        "device": device.type,
        "quick": options.quick,
        "parts": {},
    }
    if options.merge is None or (options.merge == Path() and not path.exists()):
        return new
    old = rows.read(path if options.merge == Path() else options.merge, experiment)
    return rows.merged(old, new, experiment, gpus)


def main(experiment: Experiment, arguments: Sequence[str], part: str | None = None) -> int:
    """Measure, print, write JSON and plots; or fill the note from results.

    Returns:
        0; 1 if a question failed or, in a real run, a bar is missed; 130 if it was interrupted.

    Raises:
        SystemExit: with status 2 and one line, if the options cannot be followed.
    """
    options = parse(experiment, arguments, part)
    if options.note is not None or options.draw is not None:
        return _of_kept(options, experiment)
    device = chosen_device(options.device)
    on_cpu = device.type == "cpu"
    questions = [
        q for q in experiment.questions if q.name in options.only and not (q.needs_gpu if on_cpu else q.cpu_only)
    ]
    check(options.out, questions)
    path = options.out / f"{experiment.name}-{label(device)}.json"
    result = begun(options, path, experiment, device, min((q.gpus for q in questions), default=1))
    if result["parts"] and result["machine"]["gpu"] != conditions()["gpu"]:
        path = options.merge  # what it joins stays of its own card
    out = show.console()
    known = {} if options.quick else rows.seconds(KEPT / path.name) | rows.seconds(path)
    progress = Advance(out, [q.name for q in questions], known)
    if path.exists() and options.merge is None and not options.quick:
        out.print(f"set aside: {rows.set_aside(path)} (--merge joins it)", highlight=False, soft_wrap=True)
    with progress:
        code = 0
        for question in questions:
            run = Run(device, options.quick, out, options, progress)
            code = max(code, _measure(experiment, question, run, result, path))
            if code == INTERRUPTED:
                break
    return max(code, _finish(experiment, result, path, out))


def _of_kept(options: argparse.Namespace, experiment: Experiment) -> int:
    """Make a note's tables, or pictures, of results that are there."""
    folder = options.out or KEPT
    for asked, make, said in ((options.note, note.fill_from, "filled"), (options.draw, plot.draw_from, "drawn")):
        if asked is not None:
            made = make(None if asked == Path() else asked, folder, experiment)
            print(f"{said}: {', '.join(map(str, made if isinstance(made, list) else [made]))}")
    return 0


def _measure(experiment: Experiment, question: Question, run: Run, result: dict[str, Any], path: Path) -> int:
    """Measure, write and print one question; 0, 1 if it failed, 130 if it was interrupted."""
    out, name = run.console, question.name
    out.print(name, style="bold")
    only = f" --only {name}" if len(experiment.questions) > 1 else ""
    command = f"python -m experiments {experiment.name}{only}{' --quick' if run.quick else ''}"

    def keep(part: dict[str, Any]) -> None:
        result["parts"][name] = part
        rows.write(path, result)

    part, stopped = answered(question, run, command, result["parts"].get(name), keep)
    if question.gpus > 1:
        part["machine"] = conditions()
    if part["complete"] or name not in result["parts"]:
        result["parts"][name] = part
    else:
        out.print(f"{name}: {run.left_out[-1]}; the rows measured before stay", highlight=False)
    rows.write(path, result)  # before anything is made of them
    _write(experiment, result, path)
    if part["complete"]:
        known = question.derive(rows.Rows(part["rows"]))
        for table in question.listed("TABLES"):
            for shown in table.shown(known):
                show.show(out, shown)
        for text in question.listed("TEXTS"):
            if said := text.say(known):
                out.print(said, highlight=False, markup=False, soft_wrap=True)
    return INTERRUPTED if stopped else int(not part["complete"])


def _write(experiment: Experiment, result: dict[str, Any], path: Path) -> list[show.Verdict]:
    """Write what there is, with what it says to the bars."""
    known = rows.of_questions(result, experiment)
    verdicts = [bar.verdict(known.get(q.name)) for q in experiment.questions for bar in q.listed("BARS")]
    result["left_out"] = rows.left_out(result, experiment)
    result["verdicts"] = [verdict.as_dict() for verdict in verdicts]
    rows.write(path, result)
    return verdicts


def _finish(experiment: Experiment, result: dict[str, Any], path: Path, out: Console) -> int:
    """Write plots, print what was left out and the verdicts; 1 if a bar is missed in a real run, else 0."""
    verdicts = _write(experiment, result, path)
    plots = plot.of_results(result, experiment)
    written = [path, *(file for each, found in plots if (file := each.save(path, found)))]
    lines = list(result["left_out"])
    if plots and len(written) == 1:
        lines.append("plots: there is nothing to draw, or no matplotlib (pip install matplotlib)")
    for line in lines:
        out.print(f"left out: {line}", highlight=False, markup=False, soft_wrap=True)
    if verdicts:
        show.show_verdicts(out, verdicts, result["quick"])
    if this_revision()["dirty"] is not False:
        out.print(f"measured at {words(this_revision())}: a note is not filled from that", highlight=False)
    if result["quick"]:
        out.print("--quick: the sizes are toys, the verdicts say nothing")
    out.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    return int(any(verdict.met is False for verdict in verdicts) and not result["quick"])
