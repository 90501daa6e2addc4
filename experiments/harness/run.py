"""A run: what a question is given to measure with, and what keeps its rows if it fails or is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.harness.machine import now
from experiments.harness.question import Question
from experiments.harness.revision import this_revision
from experiments.harness.rows import Rows
from experiments.harness.time import Case, measure, sampled, series

Item = TypeVar("Item")
#: What may go wrong with one contender without ending the question: a refusal, no room, a rival that is not there.
REFUSALS = (RuntimeError, MemoryError, ValueError, OSError, ImportError, NotImplementedError)


@dataclass(eq=False)
class Run:
    """What a question measures with.

    Attributes:
        quick: toys in place of sizes: a smoke test whose numbers mean nothing.
        options: values of the options that the question added.
        progress: what is told how far it is.
        left_out: what was not measured, and why.
        known: rows that a question which goes on has measured before; it yields those that stay.
        rounds, seconds, warmup: what :meth:`measure` takes if not told otherwise; a question may set them.
    """

    device: torch.device
    quick: bool
    console: Console
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    progress: Advance | None = None
    left_out: list[str] = field(default_factory=list)
    known: Rows = field(default_factory=Rows)
    warmup: int = 3

    def __post_init__(self) -> None:
        self.rounds, self.seconds = (3, 0.1) if self.quick else (40, 3.0)

    def size(self, full: Item, toy: Item) -> Item:
        """A size, or what ``--quick`` has in its place."""
        return toy if self.quick else full

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items to measure one after the other; the bar of progress goes on with each, loops within loops too."""
        known = list(items)
        for i, item in enumerate(known):
            with self.progress.share(1 / len(known)) if self.progress else contextlib.nullcontext():
                yield item
            if i + 1 < len(known):
                self.free()

    def measure(
        self,
        cases: Sequence[Case],
        rounds: int | None = None,
        seconds: float | None = None,
        warmup: int | None = None,
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """The series ``host``, ``wall`` and ``gpu`` by name of case; a CPU's clock is for what is the host's alone."""
        rounds, seconds = rounds or self.rounds, seconds or self.seconds
        warmup = self.warmup if warmup is None else warmup
        return measure(cases, device or self.device, rounds=rounds, seconds=seconds, warmup=warmup)

    def wall(self, cases: Sequence[Case], rounds: int | None = None, seconds: float | None = None) -> dict[str, Any]:
        """Wall times of what blocks the host or moves pages: each is waited for, and so is what comes before it."""
        waited = [
            Case(case.name, _waited(case.run), _waited(case.before) if case.before else torch.cuda.synchronize)
            for case in cases
        ]
        found = self.measure(waited, rounds, seconds, 1, torch.device("cpu"))
        return {name: timing["wall"] for name, timing in found.items()}

    def host(self, cases: Sequence[Case], rounds: int | None = None, warmup: int | None = None) -> dict[str, Any]:
        """Times until a call returns, whatever it queued."""
        found = self.measure(cases, rounds, warmup=warmup, device=torch.device("cpu"))
        return {name: timing["host"] for name, timing in found.items()}

    def pairs(self, one: Case, other: Case) -> dict[str, Any]:
        """Two cases that take turns on a CPU: the ``time`` of one, of the ``other``, and their ``ratio`` pair by pair:
        how much faster the one is."""
        found = sampled((one, other), torch.device("cpu"), self.rounds, self.seconds, self.warmup)
        mine, others = ([wall for _, wall, _ in samples] for samples in found)
        ratio = [b / a for a, b in zip(mine, others, strict=True)]
        return {"time": series(mine, "wall"), "other": series(others, "wall"), "ratio": series(ratio, "wall")}

    def time(self, cases: Sequence[Case], **columns: Any) -> Iterator[dict[str, Any]]:
        """A row per case: ``columns``, ``case``, and its times (:meth:`measure`)."""
        for name, timing in self.measure(cases).items():
            yield {**columns, "case": name, **timing}

    def say(self, text: str) -> None:
        """Print what was found so far."""
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    def leave_out(self, text: str) -> None:
        """Say what is not measured, and why, here and in the results."""
        self.left_out.append(text)
        self.say(f"left out: {text}")

    @contextlib.contextmanager
    def attempt(self, name: str, errors: tuple[type[Exception], ...] = REFUSALS) -> Iterator[None]:
        """A contender that may fail: what it says is kept, its memory is given back, the others go on.

        ``errors`` are what may go wrong: of code that is not ours, as a compiler's, anything.
        """
        try:
            yield
        except errors as error:
            self.left_out.append(f"{name}: {type(error).__name__}: {str(error).strip()[:600]}")
            self.say(f"{name}: FAILED: {error}")
        finally:
            self.free()

    def free(self) -> None:
        """Give GPU memory back to the driver: managed memory is refused beyond a quarter of what is free."""
        if self.quick and self.device.type == "cpu":
            return  # toys need no room, and looking for garbage takes 0.3 s once torch.compile is loaded
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _waited(run: Callable[[], object]) -> Callable[[], None]:
    def waited() -> None:
        run()
        torch.cuda.synchronize()

    return waited


class Advance:
    """How much of a run is done, and about when it ends.  Drawn between measurements only: no thread is beside them.

    Questions weigh what they took before, in seconds; if one is not known, all the same.  Only a terminal shows it.
    """

    def __init__(self, console: Console, names: Sequence[str], seconds: Mapping[str, float]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        hidden = not console.is_terminal
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=hidden)
        known = seconds if all(seconds.get(name) for name in names) else dict.fromkeys(names, 1.0)
        total = sum(known[name] for name in names)
        self.weights = {name: known[name] / total for name in names}
        self._task = self._bar.add_task("", total=1.0)
        self.done, self._share = 0.0, 1.0

    def __enter__(self) -> Advance:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """What happens inside belongs to one of those that have a weight."""
        self._bar.update(self._task, description=name, refresh=True)
        with self.share(self.weights[name]):
            yield

    @contextlib.contextmanager
    def share(self, part: float) -> Iterator[None]:
        """What happens inside is this part of what happens around it."""
        outer, begun = self._share, self.done
        self._share = outer * part
        try:
            yield
        finally:
            self.done, self._share = begun + self._share, outer
            self._bar.update(self._task, completed=self.done, refresh=True)


def answered(
    question: Question, run: Run, command: str, before: Mapping[str, Any] | None, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], bool]:
    """One question's rows with their circumstances, and whether Ctrl-C ended it; a failure is printed.

    Of a question that goes on, ``keep`` is given each row's part at once, and ``before`` is what it goes on with.
    """
    rows: list[dict[str, Any]] = []
    measured = None if run.quick else question.fingerprints()  # toys are of no tree; files may be edited from now on
    source = {**this_revision(), "fingerprint": measured}
    if question.goes_on and before and source.items() <= before.items():
        run.known = Rows(before["rows"])
    begin = time.perf_counter()

    def part(complete: bool) -> dict[str, Any]:
        return {"rows": rows, "left_out": run.left_out, "complete": complete, "seconds": time.perf_counter() - begin,
                "command": command, "when": now(), **source}  # fmt: skip

    gc.collect()
    gc.freeze()  # what was imported so far lives on: the many collections to come need not look at it
    ended, stopped = "", False
    try:
        with run.progress.of(question.name) if run.progress else contextlib.nullcontext():
            for row in question.measure(run):
                rows.append(row)
                if question.goes_on:
                    keep(part(False))
    except KeyboardInterrupt:
        ended, stopped = "interrupted", True
    except Exception as error:  # the other questions go on
        traceback.print_exc()
        ended = f"failed with {type(error).__name__}: {str(error).strip()[:600]}"
    run.free()
    if ended:
        run.left_out.append(f"{ended}; {len(rows)} rows are in the file, and nothing is made of them")
    return part(not ended), stopped
