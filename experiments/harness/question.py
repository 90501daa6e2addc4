"""A question is a module; an experiment is one of them, or several in a folder that share a file and a note."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import experiments
from experiments.harness import fingerprint
from experiments.harness.revision import ROOT

#: The list of experiments, a table with so many columns: the last two are minutes and gigabytes on an H200.
README, COLUMNS = Path(experiments.__path__[0]) / "README.md", 6
#: Folders without questions of their own.
SHARED = ("harness", "lab", "works", "lecture", "readme", "release_check", "__main__")


@dataclass(frozen=True)
class Question:
    """What a module says about itself, with nothing for what it does not say."""

    module: ModuleType

    @property
    def name(self) -> str:
        """The file's name."""
        return self.module.__name__.rpartition(".")[2]

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return (self.module.__doc__ or "").strip().partition("\n")[0]

    @property
    def needs_gpu(self) -> bool:
        """Whether it has nothing to measure on a CPU."""
        return bool(getattr(self.module, "NEEDS_GPU", False))

    @property
    def cpu_only(self) -> bool:
        """Whether no GPU changes its answer: none is measured, and it joins results of any machine."""
        return bool(getattr(self.module, "CPU_ONLY", False))

    @property
    def goes_on(self) -> bool:
        """Whether its rows are written one by one, and ``--merge`` goes on with those that the same code measured."""
        return bool(getattr(self.module, "GOES_ON", False))

    @property
    def gpus(self) -> int:
        """How many GPUs of one host it needs, if it needs one at all."""
        return int(getattr(self.module, "GPUS", 1))

    def fingerprints(self, root: Path = ROOT) -> Mapping[str, str]:
        """What it measures in the tree of ``root`` (see :mod:`experiments.harness.fingerprint`)."""
        return fingerprint.of(self.module.__name__, tuple(getattr(self.module, "MEASURES", ())), root)

    def changed(self, part: Mapping[str, Any]) -> list[str]:
        """Topics of what it measures that are not what they were for a part of results."""
        return fingerprint.changed(part.get("fingerprint"), self.fingerprints())

    def listed(self, what: str) -> Sequence[Any]:
        """``TABLES``, ``PLOTS``, ``BARS`` or ``TEXTS``."""
        return tuple(getattr(self.module, what, ()))

    def measure(self, run: Any) -> Iterable[dict[str, Any]]:
        """Its rows, each as soon as it is measured."""
        return self.module.measure(run)

    def derive(self, rows: Any) -> Any:
        """Rows with the columns that follow from others."""
        derive = getattr(self.module, "derive", None)
        return derive(rows) if derive else rows

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this question has."""
        if options := getattr(self.module, "options", None):
            options(parser)

    def needs(self) -> None:
        """Look for what it needs of this machine beside the device.

        Raises:
            ValueError: it is not there; the text says what to do.
        """
        if needs := getattr(self.module, "needs", None):
            needs()


@dataclass(frozen=True)
class Experiment:
    """Questions that are answered together, in this order."""

    name: str
    title: str
    questions: tuple[Question, ...]

    @property
    def note(self) -> str:
        """The name of its note: its own, if its first question's ``NOTE`` names no other."""
        return str(getattr(self.questions[0].module, "NOTE", self.name))

    @property
    def takes(self) -> str:
        """Minutes and memory of a run, as the list of experiments has them; "" if it has none."""
        for line in README.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == COLUMNS and cells[1] == f"`{self.name}`":
                where = "two cores" if cells[-1] == "0" else "an H200"
                return f"minutes on {where}: {cells[-2]}; GB of device memory: {cells[-1]}; --quick takes seconds"
        return ""

    @classmethod
    def of(cls, module: ModuleType) -> Experiment:
        """From a question's module, or from a folder that has ``NAME`` and ``PARTS``."""
        if not hasattr(module, "PARTS"):
            question = Question(module)
            return cls(question.name, question.title, (question,))
        parts = tuple(Question(importlib.import_module(f"{module.__name__}.{part}")) for part in module.PARTS)
        return cls(module.NAME, Question(module).title, parts)


def _asks(module: ModuleType) -> bool:
    """Whether a module is a question, or a folder of some."""
    own = getattr(getattr(module, "measure", None), "__module__", None) == module.__name__
    return own or (hasattr(module, "__path__") and hasattr(module, "PARTS"))


@functools.cache
def every() -> tuple[Experiment, ...]:
    """All experiments, in the order of their names: files here, folders with parts, and other files in folders."""
    paths = [found.name for found in pkgutil.walk_packages(experiments.__path__, "experiments.")]
    loaded = [importlib.import_module(path) for path in paths if path.split(".")[1] not in SHARED]
    parts = {f"{module.__name__}.{part}" for module in loaded for part in getattr(module, "PARTS", ())}
    found = [Experiment.of(module) for module in loaded if module.__name__ not in parts and _asks(module)]
    return tuple(sorted(found, key=lambda experiment: experiment.name))


def find(name: str) -> tuple[Experiment, str | None] | None:
    """The experiment of this name; or the one that has a part of this name, and the part; or None."""
    there = {experiment.name: (experiment, None) for experiment in every()}
    parts = {q.name: (e, q.name) for e in every() for q in e.questions if q.name != e.name}
    return there.get(name) or parts.get(name)


def near(name: str) -> list[str]:
    """Names of experiments and questions that somebody may mean who gives one that there is not.

    Those of the folder of this name; else those that are spelled much like it.
    """
    if within := [e.name for e in every() if name in e.questions[0].module.__name__.split(".")[1:-1]]:
        return within
    names = {n for e in every() for n in (e.name, *(q.name for q in e.questions))}
    return difflib.get_close_matches(name, sorted(names))
