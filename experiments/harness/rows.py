"""Rows of results: plain dicts in a list, in one JSON file per experiment and machine, merged part by part.

A cell is a number, a text, or a series: a measured number with its clock and its spread ({"clock": "wall", "median": …,
"p10": …}, see :func:`experiments.harness.time.series`).  A time or a ratio of times that is a plain number belongs to
the clock that its row names ("clock").
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.harness.question import Experiment
from experiments.harness.revision import refuse
from pagedopt.commands.results import as_json

Row = dict[str, Any]
Series = Mapping[str, Any]
CLOCKS = ("host", "wall", "GPU")
#: A column's name, or a function of a row.
Column = str | Callable[[Row], Any]
#: Of the files that this module writes.
LAYOUT = 3
#: What must be alike for numbers to stand in one file; packages that only one part uses are not among it.
MACHINE = ("processor", "cores", "gpu", "python", "torch", "torch_cuda", "numpy", "driver")
VERSIONS = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "numba")


class Rows(list[Row]):
    """Rows of one question, with the few things that tables, plots and bars ask of them."""

    def where(self, **wanted: Any) -> Rows:
        """Those whose columns have these values."""
        return Rows(row for row in self if all(row.get(name) == value for name, value in wanted.items()))

    def first(self, **wanted: Any) -> Row | None:
        """The first with these values, or None."""
        return next(iter(self.where(**wanted)), None)

    def number(self, column: Column, **wanted: Any) -> float | None:
        """A cell of the first row with these values, or None if there is no such row or no number in it."""
        row = self.first(**wanted)
        return None if row is None else number_in(row, column)

    def values(self, column: str) -> list[Any]:
        """The different values of a column, in the order in which they first stand there."""
        return list(dict.fromkeys(row[column] for row in self if column in row))

    def groups(self, *columns: str) -> Iterator[Rows]:
        """Rows that are alike in some columns, in the order in which they first stand there."""
        found: dict[tuple[Any, ...], Rows] = {}
        for row in self:
            found.setdefault(tuple(row.get(name) for name in columns), Rows()).append(row)
        yield from found.values()


def cell(row: Row, column: Column) -> Any:
    """A row's cell; None where the row has no such column."""
    return row.get(column) if isinstance(column, str) else column(row)


def number_in(row: Row, column: Column) -> float | None:
    """A cell as a number: of a measured one, the median."""
    found = cell(row, column)
    if isinstance(found, Mapping):
        found = found["median"]
    return None if found is None else float(found)


def best(row: Row) -> Series:
    """The GPU's series if there is one, else the wall's."""
    return row["gpu"] or row["wall"]


def over(one: Series | None, other: Series | None) -> float | None:
    """How many times as long one series takes as another, by their medians; None where one is missing.

    Raises:
        ValueError: they are of two clocks.
    """
    if not one or not other:
        return None
    if one["clock"] != other["clock"]:
        raise ValueError(f"a time of the clock {one['clock']} over one of {other['clock']} says nothing")
    return float(one["median"] / other["median"])


def on_one_clock(rows: Rows) -> Rows:
    """Rows that are compared, with the series ``time`` by one ``clock``.

    The GPU's where all that were timed have one, else the wall's of all; None where a row was not timed.
    """
    timed = [row for row in rows if row.get("wall")]
    clock = "GPU" if timed and all(row.get("gpu") for row in timed) else "wall"
    return Rows({**row, "clock": clock, "time": row.get(clock.lower())} for row in rows)


def on_own_clock(rows: Rows) -> Rows:
    """Rows with the series ``time`` and its ``clock``: the GPU's where a row has one, else the wall's."""
    return Rows({**row, "time": best(row), "clock": best(row)["clock"]} for row in rows)


def by_clock_of(row: Row, other: Row | None) -> Series | None:
    """The series of another row by the clock that a row names; None if there is none."""
    return other and other[row["clock"].lower()]


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write results, in place of the file at once."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(as_json(result))
    os.replace(new, path)


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
    if named != experiment.name or not {"machine", "device"} <= found.keys():
        refuse(f"{path}: holds {f'results of {named}' if named else 'no results'}, not of {experiment.name}")
    if found.get("layout") != LAYOUT:
        refuse(f"{path}: has layout {found.get('layout')}, and {LAYOUT} is read today: measure again")
    return dict(found)


def _signature(result: Mapping[str, Any]) -> dict[str, Any]:
    """What must be alike in results that are put together."""
    machine = result["machine"]
    versions = machine.get("versions", {})
    alike = {name: machine.get(name) for name in MACHINE} | {name: versions.get(name) for name in VERSIONS}
    return {**alike, "device": result["device"], "quick": bool(result["quick"])}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what two results cannot be put together."""
    one, other = _signature(old), _signature(new)
    return [f"{name}: {one[name]!r}, now {other[name]!r}" for name in one if one[name] != other[name]]


def _untimed(part: Mapping[str, Any]) -> bool:
    """Whether it only counts: no row names a clock."""
    return not any("clock" in row for row in part["rows"])


def merged(old: Mapping[str, Any], new: Mapping[str, Any], experiment: Experiment, gpus: int = 1) -> dict[str, Any]:
    """The parts of both, those of ``new`` in place of older ones.

    Of another machine's parts are taken those that need no GPU, and, if it only has another number of cores, those that
    measure no time or name their own machine.  Parts that need several GPUs (``gpus``) name theirs, and join results of
    a machine with another number of cores or another GPU.

    Raises:
        SystemExit: the results are of two machines, of two sets of versions, or one of them is of toys.
    """
    if wrong := differences(old, new):
        only_cores = all(line.startswith("cores: ") for line in wrong)
        if gpus > 1 and all(line.startswith(("cores: ", "gpu: ")) for line in wrong):
            return {**old, "parts": dict(old["parts"])}
        anywhere = {
            q.name: part
            for q in experiment.questions
            if (part := old["parts"].get(q.name))
            and (q.cpu_only or (only_cores and ("machine" in part or _untimed(part))))
        }
        if anywhere and bool(old["quick"]) == bool(new["quick"]):
            return {**new, "parts": {**anywhere, **new["parts"]}}
        refuse(f"not measured on one machine with one set of versions: {'; '.join(wrong)}")
    machine = {**new["machine"], "versions": {**old["machine"]["versions"], **new["machine"]["versions"]}}
    return {**old, **new, "machine": machine, "parts": {**old["parts"], **new["parts"]}}


def left_out(result: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """What is missing from results: questions that were not measured, and what those that were had to leave out."""
    missing = [q for q in experiment.questions if q.name not in result["parts"]]
    gpu = [q.name for q in missing if q.needs_gpu and result["device"] == "cpu"]
    several = len(experiment.questions) > 1
    lines = [f"{', '.join(gpu)}: need{'s' * (len(gpu) == 1)} a GPU"] if gpu else []
    lines += [f"{q.name}: not measured" for q in missing if q.name not in gpu]
    for name, part in result["parts"].items():
        lines += [f"{name}, {line}" if several else line for line in part.get("left_out", ())]
    return lines


def of_questions(result: Mapping[str, Any], experiment: Experiment) -> dict[str, Rows]:
    """Rows by question, with what is derived from them; questions that were not measured to their end are not there."""
    parts = {name: part for name, part in result["parts"].items() if part.get("complete", True)}
    return {q.name: q.derive(Rows(parts[q.name]["rows"])) for q in experiment.questions if q.name in parts}


def seconds(path: Path) -> dict[str, float]:
    """How long each question took when a file of results was measured, as far as it is there and says so."""
    try:
        return {name: float(part["seconds"]) for name, part in json.loads(path.read_text())["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def set_aside(path: Path) -> Path:
    """Rename a file of results that new ones do not join, so that nothing measured is lost; returns where it is now."""
    try:
        when = str(json.loads(path.read_text())["machine"]["when"])
    except (ValueError, KeyError, TypeError):
        when = "unknown"
    target = path.with_name(f"earlier-{path.stem}-{when.replace(':', '')}.json")
    path.rename(target)
    return target


def newest(folder: Path, name: str) -> Path:
    """The results of an experiment in a folder: the newest of a GPU, or else of the CPU.

    Raises:
        SystemExit: there are none.
    """
    there = folder.glob(f"{name}-*.json")
    found = min(there, key=lambda path: (path.stem.endswith("-cpu"), -path.stat().st_mtime), default=None)
    if found is None:
        refuse(f"no results {name}-*.json in {folder}: run the experiment first, or name a file")
    return found
