"""What ran, counted in a trace of ``torch.profiler``: launches, kernels, operators, and when the GPU had nothing to do.

    counts = counted(optimizer.step)
    counts.kernels, counts.launches, counts.operators, counts.busy_us, counts.gaps

The profiler hears of every launch in the process, CuPy's and Triton's too.  No time is taken from a profiled run but
how long kernels took and how far they were apart: the host is slower while it is listened to.  And behind it: Kineto
lets go of CUPTI at the end of the process (pytorch#144455).  So trace in a process of its own (:func:`counted_apart`).

A trace that lacks an event must not become a number: every kernel is to have its launch and every launch its kernel,
and two traces of the same call have to agree (:class:`Incomplete`).
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.child import Child
from experiments.lab import Row, Run, series

KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
#: Calls of the host, of the runtime and of the driver; the latter are Triton's and CuPy's.
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch")
MOST_TRACES = 4
#: What the profiler shall call the call that counts.
SECOND = "the second call"


class Incomplete(RuntimeError):
    """A trace lacks events: nothing is to be counted in it."""


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        kind: the category: "kernel", "gpu_memcpy", "cuda_runtime", "cpu_op" …
        start, length: in µs.
        lane: the thread or the stream it ran on.
        correlation: what a launch and its kernels have in common; None: nothing.
    """

    name: str
    kind: str
    start: float
    length: float
    lane: tuple[Any, Any] = (0, 0)
    correlation: int | None = None

    @property
    def end(self) -> float:
        """When it was over, in µs."""
        return self.start + self.length


@dataclass(frozen=True)
class Gap:
    """A time in which the GPU had nothing to do: how long, and how long what ran before had taken (µs)."""

    length: float
    before: float


@dataclass(frozen=True)
class Counts:
    """What one call did.

    Attributes:
        launches: calls of the host that started kernels; the replay of a graph is one.
        kernels: that ran on the GPU.
        copies: copies and fills by the copy engine or the driver.
        operators: of torch, called by the host and not by another operator.
        busy_us: how long anything ran, on the GPU or, where nothing did, in operators.
        span_us: from the first beginning to the last end.
        gaps: between what ran, in order, those of no length too.
        trace: where all this was counted.
    """

    launches: int
    kernels: int
    copies: int
    operators: int
    busy_us: float
    span_us: float
    gaps: tuple[Gap, ...]
    trace: Trace = field(repr=False, compare=False)

    @property
    def numbers(self) -> dict[str, int]:
        """What two traces of the same call must have alike."""
        return {name: getattr(self, name) for name in ("launches", "kernels", "copies", "operators")}

    def as_dict(self) -> dict[str, Any]:
        """Columns of a row: the numbers, and times by the GPU's clock, or the host's where nothing ran on a GPU."""
        clock = "GPU" if self.trace.on_gpu else "host"
        gaps = [gap.length for gap in self.gaps]
        times = {"busy_us": series([self.busy_us], clock), "span_us": series([self.span_us], clock)}
        return {**self.numbers, **times, "gap_each": series(gaps, clock) if gaps else None}


@dataclass(frozen=True)
class Trace:
    """Events in the order in which they began."""

    events: Sequence[Event]

    @classmethod
    def of(cls, raw: Iterable[dict[str, Any]]) -> Trace:
        """From the events of a Chrome trace."""
        events = [
            Event(
                str(e.get("name", "")),
                str(e.get("cat", "")).lower(),
                float(e["ts"]),
                float(e.get("dur", 0)),
                (e.get("pid"), e.get("tid")),
                (e.get("args") or {}).get("correlation"),
            )
            for e in raw
            if e.get("ph") == "X"
        ]
        return cls(sorted(events, key=lambda event: event.start))

    def of_kind(self, *kinds: str) -> list[Event]:
        """Those of some categories."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def on_gpu(self) -> list[Event]:
        """Kernels, copies and fills."""
        return self.of_kind(KERNEL, *COPIES)

    @property
    def launches(self) -> list[Event]:
        """Calls that start kernels; a call of the runtime that the driver's call inside it repeats is one."""
        found: dict[Any, Event] = {}
        for i, event in enumerate(self.of_kind(*CALLS)):
            if LAUNCH.search(event.name):
                found.setdefault((i, None) if event.correlation is None else event.correlation, event)
        return list(found.values())

    @property
    def operators(self) -> list[Event]:
        """Operators of torch that no other operator called."""
        found: list[Event] = []
        ends: dict[Any, float] = {}
        for event in sorted(self.of_kind("cpu_op"), key=lambda event: (event.start, -event.length)):
            if "::" not in event.name or event.name.startswith("profiler::"):
                continue
            if event.start >= ends.get(event.lane, float("-inf")):
                ends[event.lane] = event.end
                found.append(event)
        return found

    def counts(self) -> Counts:
        """Everything counted, once every kernel is held to its launch and every launch to what it started.

        Raises:
            Incomplete: an event is missing.
        """
        launches, kernels, operators = self.launches, self.of_kind(KERNEL), self.operators
        launched, ran = ({event.correlation for event in events} for events in (launches, self.on_gpu))
        orphans = [event.name for event in kernels if event.correlation not in launched]
        unseen = [event.name for event in launches if event.correlation not in ran]
        for what, names in (("kernels without a launch", orphans), ("launches without a kernel", unseen)):
            if names:
                raise Incomplete(f"the trace lacks events: {len(names)} {what}, the first {names[0][:100]!r}")
        copies = len(self.of_kind(*COPIES))
        return Counts(len(launches), len(kernels), copies, len(operators), *idle(self.on_gpu or operators), self)


def idle(events: Sequence[Event]) -> tuple[float, float, tuple[Gap, ...]]:
    """(busy, span, gaps) in µs; what runs at the same time is busy once."""
    if not events:
        return 0.0, 0.0, ()
    busy, end, gaps = events[0].length, events[0].end, []
    for before, event in itertools.pairwise(events):
        gaps.append(Gap(max(0.0, event.start - end), before.length))
        busy += max(0.0, event.end - max(end, event.start))
        end = max(end, event.end)
    return busy, end - events[0].start, tuple(gaps)


def has_gpu() -> bool:
    """Whether this process uses one."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def wait() -> None:
    """Until the GPU is done."""
    if has_gpu():
        torch.cuda.synchronize()


def trace_events(run: Callable[[], object], **options: Any) -> list[dict[str, Any]]:
    """The events of one call in torch's Chrome trace, until the GPU is done.

    What is lazy in a first call is in the trace, too.  ``options`` are those of ``torch.profiler.profile``.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu() else [])]
    wait()
    with profile(activities=activities, acc_events=True, **options) as profiler:
        run()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def traced(run: Callable[[], object]) -> Trace:
    """The trace of the second of two calls: the profiler's own start makes the first launch of the first one slow."""

    def twice() -> None:
        run()
        wait()
        with torch.profiler.record_function(SECOND):
            run()

    events = Trace.of(trace_events(twice)).events
    start = next(event.start for event in events if event.name == SECOND)
    return Trace([event for event in events if event.start >= start])


def counted(run: Callable[[], object], warmup: int = 3) -> Counts:
    """What one call does, once it has run ``warmup`` times: what two traces agree on.

    Raises:
        Incomplete: of four traces no two are whole and alike.
    """
    for _ in range(warmup):
        run()
    seen: list[dict[str, int]] = []
    said: list[str] = []
    for _ in range(MOST_TRACES):
        try:
            counts = traced(run).counts()
        except Incomplete as error:
            said.append(str(error))
            continue
        if counts.numbers in seen:
            return counts
        seen.append(counts.numbers)
        said.append(", ".join(f"{name} {count}" for name, count in counts.numbers.items()))
    raise Incomplete(f"no two of {MOST_TRACES} traces are whole and alike: {'; '.join(said)}")


def counted_apart(
    run: Run, function: Callable[..., Iterator[Row]], *arguments: Any, by: Sequence[str], limit: float = 600.0
) -> dict[tuple[Any, ...], Row]:
    """What a function counts in a process of its own, so that nothing is timed behind a profiler: rows by some columns.

    Where no profiler is used, on a CPU, it is called here.
    """
    rows: Iterable[Row] = function(*arguments)
    if run.device.type == "cuda":
        rows = child = Child(function, *arguments, limit=limit)
    found = {tuple(row[name] for name in by): row for row in rows}
    if run.device.type == "cuda" and child.ended:
        run.leave_out(f"launches behind {len(found)} of them: the process {child.ended}")
    return found
