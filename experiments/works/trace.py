"""What ran, counted in a trace of ``torch.profiler``: launches, kernels, operators, and when the GPU had nothing to do.

    counts = counted(optimizer.step)
    counts.kernels, counts.launches, counts.operators, counts.busy_us, counts.gaps

The profiler hears of every launch in the process, CuPy's and Triton's too.  No time is taken from a profiled run but
how long kernels took and how far they were apart: the host is slower while it is listened to.

A trace that lacks an event must not become a number: every kernel is to have its launch and every launch its kernel,
and two traces of the same call have to agree (:class:`Incomplete`).
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.harness.panels import BLUE, GRAY, ORANGE

KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
#: Calls of the host, of the runtime and of the driver; the latter are Triton's and CuPy's.
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch")
OPERATOR = "cpu_op"
WARMUP, MOST_TRACES = 3, 4
#: Keys that Perfetto needs.
KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "bp")


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

    def as_dict(self) -> dict[str, Any]:
        """Columns of a row; ``gap_us`` is the sum of all gaps."""
        columns = ("launches", "kernels", "copies", "operators", "busy_us", "span_us")
        return {name: getattr(self, name) for name in columns} | {"gap_us": sum(gap.length for gap in self.gaps)}

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What two traces of the same call must have alike."""
        return self.launches, self.kernels, self.copies, self.operators


@dataclass(frozen=True)
class Trace:
    """Events in the order in which they began, and the trace as it was written."""

    events: Sequence[Event]
    raw: Sequence[dict[str, Any]] = field(default=(), repr=False)

    @classmethod
    def of(cls, raw: Iterable[dict[str, Any]]) -> Trace:
        """From the events of a Chrome trace."""
        known = list(raw)
        events = [
            Event(
                str(e.get("name", "")),
                str(e.get("cat", "")).lower(),
                float(e["ts"]),
                float(e.get("dur", 0)),
                (e.get("pid"), e.get("tid")),
                (e.get("args") or {}).get("correlation"),
            )
            for e in known
            if e.get("ph") == "X"
        ]
        return cls(sorted(events, key=lambda event: event.start), known)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """From a file, ``.json`` or ``.json.gz``."""
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return cls.of(json.loads(data)["traceEvents"])

    @property
    def kernels(self) -> list[Event]:
        """Kernels, in the order in which they began."""
        return [event for event in self.events if event.kind == KERNEL]

    @property
    def copies(self) -> list[Event]:
        """Copies and fills on the GPU."""
        return [event for event in self.events if event.kind in COPIES]

    @property
    def on_gpu(self) -> list[Event]:
        """Kernels, copies and fills."""
        return [event for event in self.events if event.kind in (KERNEL, *COPIES)]

    @property
    def launches(self) -> list[Event]:
        """Calls that start kernels; a call of the runtime that the driver's call inside it repeats is one."""
        found: dict[Any, Event] = {}
        for i, event in enumerate(self.events):
            if event.kind in CALLS and LAUNCH.search(event.name):
                found.setdefault((i, None) if event.correlation is None else event.correlation, event)
        return list(found.values())

    @property
    def operators(self) -> list[Event]:
        """Operators of torch that no other operator called."""
        found: list[Event] = []
        ends: dict[Any, float] = {}
        longest_first = sorted(self.events, key=lambda event: (event.start, -event.length))
        for event in longest_first:
            if event.kind != OPERATOR or "::" not in event.name or event.name.startswith("profiler::"):
                continue
            if event.start >= ends.get(event.lane, float("-inf")):
                ends[event.lane] = event.end
                found.append(event)
        return found

    def check(self) -> None:
        """Hold every kernel to its launch and every launch to what it started.

        Raises:
            Incomplete: an event is missing.
        """
        launched = {event.correlation for event in self.launches}
        ran = {event.correlation for event in self.on_gpu}
        orphans = [event.name for event in self.kernels if event.correlation not in launched]
        unseen = [event.name for event in self.launches if event.correlation not in ran]
        for what, names in (("kernels without a launch", orphans), ("launches without a kernel", unseen)):
            if names:
                raise Incomplete(f"the trace lacks events: {len(names)} {what}, the first {names[0][:100]!r}")

    def counts(self) -> Counts:
        """Everything counted.

        Raises:
            Incomplete: an event is missing.
        """
        self.check()
        operators = self.operators
        busy, span, gaps = idle(self.on_gpu or operators)
        numbers = len(self.launches), len(self.kernels), len(self.copies), len(operators)
        return Counts(*numbers, busy, span, gaps, self)

    def keep(self, path: Path, most: int = 300_000) -> Path | None:
        """Write what is counted to a ``.json.gz`` for ui.perfetto.dev; None if that takes more than ``most`` bytes."""
        kinds = (KERNEL, *COPIES, *CALLS, OPERATOR, "ac2g", "user_annotation")
        kept = [{key: e[key] for key in KEPT if key in e} for e in self.raw if str(e.get("cat", "")).lower() in kinds]
        names = [e for e in self.raw if e.get("ph") == "M"]
        data = gzip.compress(json.dumps({"traceEvents": names + kept}).encode(), mtime=0)
        if len(data) > most:
            return None
        path.write_bytes(data)
        return path


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


def traced(run: Callable[[], object]) -> Trace:
    """The trace of one call, until the GPU is done.  ``run`` should have run before: what is lazy is in it."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    wait()
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        wait()
    return Trace.of(chrome_events(profiler))


def chrome_events(profiler: Any) -> list[dict[str, Any]]:
    """The events of ``torch.profiler.profile``, as its Chrome trace has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def counted(run: Callable[[], object], warmup: int = WARMUP) -> Counts:
    """What one call does, once it has run ``warmup`` times: what two traces agree on.

    Raises:
        Incomplete: of four traces no two are whole and alike.
    """
    for _ in range(warmup):
        run()
    seen: dict[tuple[int, ...], Counts] = {}
    said: list[str] = []
    for _ in range(MOST_TRACES):
        try:
            counts = traced(run).counts()
        except Incomplete as error:
            said.append(str(error))
            continue
        if counts.numbers in seen:
            return counts
        seen[counts.numbers] = counts
        said.append("launches {}, kernels {}, copies {}, operators {}".format(*counts.numbers))
    raise Incomplete(f"no two of {MOST_TRACES} traces are whole and alike: {'; '.join(said)}")


#: Lanes of a picture from top to bottom, with colours that the colour-blind can tell apart.
LANES = (("operators", GRAY), ("launches", ORANGE), ("GPU", BLUE))


def picture(axes: Any, trace: Trace, start: float | None = None) -> None:
    """Draw what the host called, what it launched and what ran, in three lanes; each launch is joined to its kernel.

    Args:
        axes: of matplotlib.
        trace: what to draw.
        start: where the axis of time begins (µs of the trace); by default at the first event.
    """
    lanes = dict(zip((name for name, _ in LANES), (trace.operators, trace.launches, trace.on_gpu), strict=True))
    drawn = [event for events in lanes.values() for event in events]
    if not drawn:
        return
    zero = min(event.start for event in drawn) if start is None else start
    for at, (name, color) in enumerate(LANES):
        bars = [(event.start - zero, max(event.length, 0.2)) for event in lanes[name]]
        edge = "white" if name == "operators" else color  # what is launched must be seen, however short it is
        axes.broken_barh(bars, (-at - 0.3, 0.6), color=color, edgecolor=edge, linewidth=0.4)
    started = {event.correlation: event for event in lanes["launches"]}
    for event in lanes["GPU"]:
        if (launch := started.get(event.correlation)) is not None:
            axes.plot((launch.start - zero, event.start - zero), (-1.3, -1.7), color="black", linewidth=0.4)
    axes.set_yticks([-at for at in range(len(LANES))], [name for name, _ in LANES])
    axes.set_ylim(-len(LANES) + 0.5, 0.5)
    axes.set_xlabel("µs")
