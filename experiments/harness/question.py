"""A question is a module; an experiment is one of them, or several in a folder that share a file and a note."""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import experiments

#: The list of experiments, a table with so many columns: the last two are minutes and gigabytes on an H200.
README, COLUMNS = Path(experiments.__path__[0]) / "README.md", 6
#: Folders without questions of their own.
SHARED = ("harness", "lab", "works", "results", "lecture")


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

    def listed(self, what: str) -> Sequence[Any]:
        """``TABLES``, ``PLOTS``, ``BARS`` or ``TEXTS``."""
        return tuple(getattr(self.module, what, ()))

    def measure(self, run: Any) -> Iterable[dict[str, Any]]:
        """Its rows, each as soon as it is measured."""
        found: Iterable[dict[str, Any]] = self.module.measure(run)
        return found

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
    """Questions that are answered together.

    Attributes:
        title: the first line of its docstring.
        questions: in the order in which they are measured.
    """

    name: str
    title: str
    questions: tuple[Question, ...]

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
        return cls(module.NAME, (module.__doc__ or "").strip().partition("\n")[0], parts)


def modules() -> Iterator[tuple[str, bool]]:
    """What may be an experiment, and whether it is a folder: files here, folders, files in them."""
    for found in pkgutil.iter_modules(experiments.__path__, "experiments."):
        short = found.name.rpartition(".")[2]
        if short in SHARED or short.startswith("__"):
            continue
        yield found.name, found.ispkg
        if found.ispkg:
            folder = importlib.import_module(found.name)
            for inner in pkgutil.iter_modules(folder.__path__, f"{found.name}."):
                if inner.name.rpartition(".")[2] not in getattr(folder, "PARTS", ()):
                    yield inner.name, False


def find(name: str) -> tuple[Experiment, str | None] | None:
    """The experiment of this name; or the one that has a part of this name, and the part; or None."""
    for path, folder in modules():
        if not folder and path.rpartition(".")[2] != name:
            continue
        module = importlib.import_module(path)
        if name == getattr(module, "NAME", None) or (not folder and _asks(module)):
            return Experiment.of(module), None
        if name in getattr(module, "PARTS", ()):
            return Experiment.of(module), name
    return None


def near(name: str) -> list[str]:
    """Names of experiments and questions that somebody may mean who gives one that there is not.

    Those of the folder of this name; else those that are spelled much like it.
    """
    within = {path: importlib.import_module(path) for path, _ in modules() if name in path.split(".")[1:]}
    if found := [Experiment.of(module).name for module in within.values() if _asks(module)]:
        return sorted(found)
    there = every()
    names = {each.name for each in there} | {part.name for each in there for part in each.questions}
    return difflib.get_close_matches(name, sorted(names))


def _asks(module: ModuleType) -> bool:
    """Whether a module is a question, or a folder of some."""
    own = getattr(getattr(module, "measure", None), "__module__", None) == module.__name__
    return own or (hasattr(module, "__path__") and hasattr(module, "PARTS"))


def every() -> list[Experiment]:
    """All experiments, in the order of their names."""
    loaded = [importlib.import_module(path) for path, _ in modules()]
    found = [Experiment.of(module) for module in loaded if _asks(module)]
    return sorted(found, key=lambda experiment: experiment.name)
