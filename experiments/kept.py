"""Experiments by name, their files of results, of which commit and machine these are, and the notes made of them."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import importlib
import importlib.metadata
import json
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import experiments
from experiments.device import refuse
from experiments.json_text import as_json
from experiments.lab import Page, Rows, Table
from pagedopt.system import machine

ROOT = Path(__file__).resolve().parents[1]
NOTES, KEPT = ROOT / "notes", ROOT / "experiments" / "results"
#: Of the files that are written here.
LAYOUT = 3
#: What must be alike for numbers to stand in one file; packages that only one part uses are not among it.
MACHINE = ("processor", "cores", "gpu", "python", "torch", "torch_cuda", "numpy", "driver")
VERSIONS = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "numba")
PACKAGES = ("torch", "numpy", *VERSIONS[:3], "numba", "bitsandbytes", "torchao", "torch-optimi")
#: Those that a note names; files of results have all.
COMPARED = ("torch", "bitsandbytes", "torchao", "torch-optimi")
UNMEASURED = "not measured in this run"
#: Where questions are.
FOLDERS = [found for found in pkgutil.iter_modules(experiments.__path__) if found.name not in ("works", "lecture")]

# --- experiments


@dataclass(frozen=True)
class Experiment:
    """Questions that are answered together, in this order: modules by the name of the part that they store."""

    name: str
    title: str
    questions: Mapping[str, ModuleType]

    @property
    def note(self) -> str:
        """The name of its note: its own, if its first question's ``NOTE`` names no other."""
        named = getattr(next(iter(self.questions.values())), "NOTE", self.name)
        return str(named.get(self.name, self.name) if isinstance(named, Mapping) else named)

    @property
    def whose(self) -> str:
        """What tells its machine from another's on a page that has another name: " in_8_bits"."""
        return "" if self.note == self.name else f" {self.name}"

    def on(self, device: str) -> dict[str, ModuleType]:
        """Those that a device can answer: some need a GPU, all of a file or the parts that it names."""
        gpu = {name: getattr(module, "NEEDS_GPU", ()) for name, module in self.questions.items()}
        return {n: m for n, m in self.questions.items() if device != "cpu" or not (gpu[n] is True or n in gpu[n])}


@functools.cache
def every() -> tuple[Experiment, ...]:
    """All experiments, in the order of their names: folders that list ``PARTS``, and other files with a report.

    A file that answers several questions names the experiment of each in ``ANSWERS``.
    """
    folders = [importlib.import_module(f"experiments.{found.name}") for found in FOLDERS if found.ispkg]
    titles, parts = dict[str, str](), dict[str, dict[str, ModuleType]]()
    for folder in folders:
        known, inside = getattr(folder, "PARTS", ()), [found.name for found in pkgutil.iter_modules(folder.__path__)]
        for name in (*known, *(name for name in inside if name not in known)):
            module = importlib.import_module(f"{folder.__name__}.{name}")
            if getattr(getattr(module, "report", None), "__module__", "") == module.__name__:
                own = {name: folder.NAME if name in known else name}
                for part, experiment in getattr(module, "ANSWERS", own).items():
                    parts.setdefault(experiment, {})[part] = module
                    mine = folder if experiment == getattr(folder, "NAME", "") else module
                    titles.setdefault(experiment, title_of(mine))
    return tuple(Experiment(name, titles[name], parts[name]) for name in sorted(parts))


def title_of(module: ModuleType) -> str:
    """The first line of its docstring."""
    return (module.__doc__ or "").strip().partition("\n")[0]


def find(name: str) -> tuple[Experiment, str | None] | None:
    """The experiment of this name; or the one that has a part of this name, and the part; or None."""
    there: dict[str, tuple[Experiment, str | None]] = {part: (e, part) for e in every() for part in e.questions}
    return (there | {experiment.name: (experiment, None) for experiment in every()}).get(name)


def near(name: str) -> list[str]:
    """Names of experiments and questions that somebody may mean who gives one that there is not."""
    if within := [e.name for e in every() if f".{name}." in next(iter(e.questions.values())).__name__]:
        return within
    return difflib.get_close_matches(name, sorted({n for e in every() for n in (e.name, *e.questions)}))


# --- the commit, and the machine


def label(device: torch.device) -> str:
    """The device in a file name: "nvidia-h200", "cpu"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def revision(root: Path = ROOT) -> dict[str, Any]:
    """``commit`` and ``dirty`` (of what is not written by runs) of the source in ``root``; None where not known.

    Raises:
        SystemExit: there is no ``.git``, and the variable that names the commit holds something else.
    """
    if (root / ".git").exists() and (commit := git(root, "rev-parse", "--short", "HEAD")):
        changes = git(root, "status", "--porcelain", "--", ".", ":(exclude)experiments/results", ":(exclude)notes")
        return {"commit": commit, "dirty": None if changes is None else bool(changes)}
    if not (named := os.environ.get("PAGEDOPT_COMMIT")):
        return {"commit": None, "dirty": None}
    if not (found := re.fullmatch(r"([0-9a-f]{7,64})(-dirty)?", named)):
        refuse(
            f"PAGEDOPT_COMMIT is {named!r}; give 7 hexadecimal digits or more, and -dirty behind them if files differ"
        )
    return {"commit": found[1], "dirty": found[2] is not None}


#: The revision as it was when first asked for: files may be edited while a run measures.
this_revision = functools.cache(revision)


def git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None if it is not here or fails; takes no lock that another git would wait for."""
    if shutil.which("git") is None:
        return None
    command = ("git", "--no-optional-locks", "-C", str(root), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def changed(commit: str, module: ModuleType, without: Iterable[str] = ()) -> list[str] | None:
    """Files of what a question measures that are not what they were at a commit; None where that is not known.

    Args:
        without: files of the package that are left out.
    """
    paths = [f"pagedopt/{path}" for path in getattr(module, "MEASURES", ())]
    paths += [f":(exclude)pagedopt/{path}" for path in without]
    found = git(ROOT, "diff", "--name-only", commit, "--", str(module.__file__), *paths)
    return None if found is None else found.split()


def conditions() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "platform": platform.platform(),
        "processor": machine.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "numpy": np.__version__,
        "when": now(),
        "versions": versions,
        "driver": machine.driver_version(),
        **this_revision(),
    }


def now() -> str:
    """The time of day, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def words(source: Mapping[str, Any]) -> str:
    """The commit and its state, as "commit abc1234, files changed"."""
    state = {False: "", True: ", files changed", None: ", state unknown"}[source.get("dirty", False)]
    return f"commit {source['commit']}{state}" if source["commit"] else "commit unknown"


# --- files of results


def read(path: Path, experiment: Experiment) -> dict[str, Any]:
    """Results of an experiment.

    Raises:
        SystemExit: there is no such file, or it holds no results of this experiment, or in another layout.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse(f"{path}: cannot be read as results: {error}")
    named = found.get("experiment") if isinstance(found, dict) else None
    if named != experiment.name or found.get("layout") != LAYOUT:
        said = f"results of {named} in layout {found.get('layout')}" if named else "no results"
        refuse(f"{path}: holds {said}; read are those of {experiment.name} in layout {LAYOUT}")
    return dict(found)


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write results, in place of the file at once."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(as_json(result))
    os.replace(new, path)


def newest(folder: Path, name: str) -> Path:
    """The results of an experiment in a folder: the newest of a GPU, or else of the CPU.

    Raises:
        SystemExit: there are none.
    """
    there = folder.glob(f"{name}-*.json")

    def rank(path: Path) -> tuple[bool, str]:
        return not path.stem.endswith("-cpu"), json.loads(path.read_text())["machine"]["when"]

    found = max(there, key=rank, default=None)
    if found is None:
        refuse(f"no results {name}-*.json in {folder}: run the experiment first, or name a file")
    return found


def begun(
    path: Path, new: dict[str, Any], experiment: Experiment, asked: Mapping[str, ModuleType], merge: bool
) -> dict[str, Any]:
    """Results without a question measured yet, or those of a file that new ones are to join, or else set aside.

    Raises:
        SystemExit: results cannot be joined, or nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        refuse(f"--out {path.parent}: results cannot be written there: {error.strerror}")
    if path.exists() and merge:
        gpus = min((getattr(module, "GPUS", 1) for module in asked.values()), default=1)
        return merged(read(path, experiment), new, gpus)
    if path.exists() and not new["quick"]:
        when = str(read(path, experiment)["machine"]["when"]).replace(":", "")
        print(f"set aside: {path.rename(path.with_name(f'earlier-{path.stem}-{when}.json'))} (--merge joins it)")
    return new


def signature(result: Mapping[str, Any]) -> dict[str, Any]:
    """What must be alike in results that are put together."""
    about, versions = result["machine"], result["machine"].get("versions", {})
    alike = {name: about.get(name) for name in MACHINE} | {name: versions.get(name) for name in VERSIONS}
    return {**alike, "device": result["device"], "quick": bool(result["quick"])}


def merged(old: Mapping[str, Any], new: Mapping[str, Any], gpus: int = 1) -> dict[str, Any]:
    """The parts of both, those of ``new`` in place of older ones.

    Parts that need several GPUs (``gpus``) name their machine, and join results of one with another number of cores
    or another GPU.

    Raises:
        SystemExit: the results are of two machines, of two sets of versions, or one of them is of toys.
    """
    one, other = signature(old), signature(new)
    wrong = [name for name in one if one[name] != other[name]]
    if gpus > 1 and wrong and set(wrong) <= {"cores", "gpu"}:
        return {**old, "parts": dict(old["parts"])}
    if wrong:
        said = "; ".join(f"{name}: {one[name]!r}, now {other[name]!r}" for name in wrong)
        refuse(f"not measured on one machine with one set of versions: {said}")
    versions = {**old["machine"]["versions"], **new["machine"]["versions"]}
    parts = {**old["parts"], **new["parts"]}
    return {**new, "machine": {**new["machine"], "versions": versions}, "parts": parts}


def left_out(result: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """What is missing from results: questions that were not measured, and what those that were had to leave out."""
    missing = [name for name in experiment.questions if name not in result["parts"]]
    on_gpu = [name for name in missing if name not in experiment.on(result["device"])]
    lines = [f"{', '.join(on_gpu)}: need{'s' * (len(on_gpu) == 1)} a GPU"] if on_gpu else []
    lines += [f"{name}: not measured" for name in missing if name not in on_gpu]
    for name, part in result["parts"].items():
        before = f"{name}, " if len(experiment.questions) > 1 else ""
        lines += [before + line for line in part.get("left_out", ())]
    return lines


def rows_of(part: Mapping[str, Any], module: ModuleType) -> Rows:
    """Rows of a part, with what is derived from them."""
    rows = Rows(part["rows"])
    return module.derive(rows) if hasattr(module, "derive") else rows


def of_questions(result: Mapping[str, Any], experiment: Experiment) -> dict[str, Rows]:
    """Rows by question; questions that were not measured to their end are not there."""
    parts = {name: part for name, part in result["parts"].items() if part.get("complete", True)}
    return {name: rows_of(parts[name], module) for name, module in experiment.questions.items() if name in parts}


def page(name: str, module: ModuleType, part: Mapping[str, Any]) -> Page:
    """What a question says of its rows."""
    found = Page(name)
    module.report(found, rows_of(part, module))
    return found


def pages(result: Mapping[str, Any], experiment: Experiment) -> dict[str, Page]:
    """What is said of every question that was measured, by its name."""
    parts = {name: part for name, part in result["parts"].items() if part.get("complete", True)}
    return {name: page(name, module, parts[name]) for name, module in experiment.questions.items() if name in parts}


# --- notes


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, without columns that are empty in every line.

    >>> print(markdown(["step", "µs", "GPU µs"], [["ours", "7", "-"], ["torch", "9", "-"]]))
    | step | µs |
    |---|---:|
    | ours | 7 |
    | torch | 9 |
    """
    table = Table("", headings, lines).full()
    cells = [
        [cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in (table.headings, *table.lines)
    ]
    top, *rest = ("| " + " | ".join(line) + " |" for line in cells)
    return "\n".join([top, f"|---{'|---:' * (len(table.headings) - 1)}|", *rest])


def machine_line(result: Mapping[str, Any]) -> str:
    """A sentence about the machine, and which questions are of another source than the last."""
    m = result["machine"]
    on_a_cpu = result["device"] == "cpu"
    versions = ", ".join(f"{name} {m['versions'][name]}" for name in COMPARED if name in m["versions"])
    chip = f"{m['processor']}, {m['cores']} cores" if on_a_cpu else f"{m['gpu']}, driver {m['driver']}"
    quick = " **A `--quick` run: the numbers mean nothing.**" if result.get("quick") else ""
    return f"Measured {m['when'][:10]} at {words(m)}: {chip}, {versions}.{earlier(result)}{quick}"


def earlier(result: Mapping[str, Any]) -> str:
    """Which questions are of another source than the last: " Of commit abc1234: leaks, price."."""
    m = result["machine"]
    others: dict[str, list[str]] = {}
    for name, part in result.get("parts", {}).items():
        on = part.get("machine", m)
        there = f" on {on['gpu']}s of one host, {on['cores']} cores" if on is not m else ""
        if "commit" in part and (there or words(part) != words(m)):
            others.setdefault(words(part) + there, []).append(name)
    return "".join(f" Of {source}: {', '.join(names)}." for source, names in others.items())


def sections(result: Mapping[str, Any], experiment: Experiment) -> dict[str, str]:
    """Name → content of a note: ``machine``, with bars and what is left out, and what the questions say."""
    known = pages(result, experiment)
    about = [f"{machine_line(result)} All rows: `python -m experiments {experiment.name} --show`."]
    if bars := [bar for page in known.values() for bar in page.bars]:
        missed = [bar.words()[:3] for bar in bars if bar.met is False]
        about[0] += f" Of {len(bars)} numbers to reach {len(bars) - len(missed)} are reached."
        about += [markdown(("not reached", "bar", "measured"), missed)] if missed else []
    if missing := dict.fromkeys(left_out(result, experiment)):
        about.append("\n".join(["Left out:", "", *(f"- {line}" for line in missing)]))
    found = {f"machine{experiment.whose}": "\n\n".join(about)}
    for name, page in known.items():
        for section, blocks in page.blocks.items():
            texts = [f"**{b.title}**\n\n{markdown(b.headings, b.lines)}" if isinstance(b, Table) else b for b in blocks]
            before = [found[section]] if section in found else []
            found[section] = ("\n\n" if section == name else "\n").join([*before, *texts])
    return found


def fill(path: Path, content: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a note.

    Raises:
        SystemExit: there is no such note, or it has no such place.
    """
    try:
        text = path.read_text()
    except OSError as error:
        refuse(f"{path}: there is no such note to fill: {error.strerror}")
    for name, inner in content.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            refuse(f"{path} has no place for {name!r}: add the lines '{begin}' and '{end}'")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{inner}\n{end}{rest.partition(end)[2]}"
    path.write_text(text)


def fill_from(path: Path, experiment: Experiment) -> Path:
    """Fill an experiment's note from a file of results; returns the note.

    Raises:
        SystemExit: they are not of a commit (see :func:`check_source`), or there is no note.
    """
    result = read(path, experiment)
    check_source(result, path.name)
    note, content = NOTES / f"{experiment.note}.md", sections(result, experiment)
    content[f"machine{experiment.whose}"] += "".join(beside(path, experiment))
    if note.exists():  # what was not measured has its places, too
        for name in re.findall(r"<!-- begin (.*) -->", note.read_text()):
            if name in experiment.questions:
                content.setdefault(name, UNMEASURED)
    fill(note, content)
    return note


def check_source(result: Mapping[str, Any], name: str) -> None:
    """Refuse results that nobody could measure again.  Those from before the state was recorded pass.

    Raises:
        SystemExit: results, or a part of them, are of a dirty tree or of an unknown commit.
    """
    sources = {"": result["machine"], **{f", part {key}": part for key, part in result.get("parts", {}).items()}}
    for part, source in sources.items():
        if "dirty" in source and (source["dirty"] is not False or not source["commit"]):
            refuse(
                f"{name}{part}: measured at {words(source)}; a note is filled from a clean tree only. Commit and "
                "measure again (without a .git set PAGEDOPT_COMMIT)"
            )


def beside(path: Path, experiment: Experiment) -> Iterator[str]:
    """A link to each other file of committed results: a note may speak of them, though its tables do not."""
    if path.parent == KEPT:
        for other in sorted(path.parent.glob(f"{experiment.name}-*.json")):
            if other != path:
                link = f"[{other.name}](../experiments/results/{other.name})"
                yield f"\n\nAlso stored: {link}."
