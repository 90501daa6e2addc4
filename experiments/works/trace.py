"""What ran, counted in a trace of ``torch.profiler``: launches, kernels, operators, and how long the GPU was busy.

    counts = counted(optimizer.step)
    counts.kernels, counts.launches, counts.operators, counts.busy_us

The profiler hears of every launch in the process, CuPy's and Triton's too.  No time is taken from a profiled run but
how long kernels took: the host is slower while it is listened to.  And behind it: Kineto lets go of CUPTI at the end
of the process (pytorch#144455).  So trace in a process of its own (:func:`experiments.works.apart.counted_apart`).

A trace that lacks an event must not become a number: every kernel is to have its launch and every launch its kernel,
and two traces of the same call have to agree (:class:`Incomplete`).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.clock import series

KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
#: Calls of the host, of the runtime and of the driver; the latter are Triton's and CuPy's.
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch")
MOST_TRACES = 4
#: What the profiler shall call the call that counts.
SECOND = "the second call"
#: Of torch's Chrome trace: name, cat(egory), ts (its begin) and dur(ation) in µs, args.
Event = dict[str, Any]


class Incomplete(RuntimeError):
    """A trace lacks events: nothing is to be counted in it."""


@dataclass(frozen=True)
class Counts:
    """What one call did.

    Attributes:
        launches: calls of the host that started kernels; the replay of a graph is one.
        kernels: that ran on the GPU.
        copies: copies and fills by the copy engine or the driver.
        operators: of torch, called by the host and not by another operator.
        busy_us: how long anything ran, on the GPU or, where nothing did, in operators.
    """

    launches: int
    kernels: int
    copies: int
    operators: int
    busy_us: float

    def as_dict(self) -> dict[str, Any]:
        """Columns of a row; the time is by the GPU's clock, or the host's where nothing ran on a GPU."""
        clock = "GPU" if self.kernels or self.copies else "host"
        return {**asdict(self), "busy_us": series([self.busy_us], clock)}


def counts_of(events: Sequence[Event]) -> Counts:
    """Everything counted, once every kernel is held to its launch and every launch to what it started.

    Raises:
        Incomplete: an event is missing.
    """

    def of(*kinds: str) -> list[Event]:
        return [event for event in events if event.get("cat", "").lower() in kinds]

    def correlation(event: Event) -> Any:
        return (event.get("args") or {}).get("correlation")

    kernels, copies = of(KERNEL), of(*COPIES)
    # A call of the runtime and the driver's call inside it are one launch.
    launches = {correlation(event): event for event in of(*CALLS) if LAUNCH.search(event["name"])}
    ran = {correlation(event) for event in (*kernels, *copies)}
    orphans = [event["name"] for event in kernels if correlation(event) not in launches]
    unseen = [event["name"] for at, event in launches.items() if at not in ran]
    for what, names in (("kernels without a launch", orphans), ("launches without a kernel", unseen)):
        if names:
            raise Incomplete(f"the trace lacks events: {len(names)} {what}, the first {names[0][:100]!r}")
    operators = outermost(of("cpu_op"))
    return Counts(len(launches), len(kernels), len(copies), len(operators), busy([*kernels, *copies] or operators))


def outermost(events: Iterable[Event]) -> list[Event]:
    """Operators of torch that no other operator called."""
    found: list[Event] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        torchs = "::" in event["name"] and not event["name"].startswith("profiler::")
        if torchs and event["ts"] >= ends.get(event["tid"], float("-inf")):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


def busy(events: Iterable[Event]) -> float:
    """How long anything ran (µs); what runs at the same time is busy once."""
    taken, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        over = event["ts"] + event["dur"]
        taken += max(0.0, over - max(end, event["ts"]))
        end = max(end, over)
    return taken


def has_gpu() -> bool:
    """Whether this process uses one."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def wait() -> None:
    """Until the GPU is done."""
    if has_gpu():
        torch.cuda.synchronize()


def trace_events(run: Callable[[], object], **options: Any) -> list[Event]:
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


def traced(run: Callable[[], object]) -> list[Event]:
    """Of two calls the events of the second: the profiler's own start makes the first launch of the first one slow."""

    def twice() -> None:
        run()
        wait()
        with torch.profiler.record_function(SECOND):
            run()

    events = [event for event in trace_events(twice) if event.get("ph") == "X"]
    start = next(event["ts"] for event in events if event["name"] == SECOND)
    return [event for event in events if event["ts"] >= start]


def counted(run: Callable[[], object], warmup: int = 3) -> Counts:
    """What one call does, once it has run ``warmup`` times: what two traces agree on.

    Raises:
        Incomplete: of four traces no two are whole and alike.
    """
    for _ in range(warmup):
        run()
    seen: list[str] = []
    for _ in range(MOST_TRACES):
        try:
            counts = counts_of(traced(run))
        except Incomplete as error:
            seen.append(str(error))
            continue
        numbers = ", ".join(f"{name} {count}" for name, count in asdict(counts).items() if name != "busy_us")
        if numbers in seen:
            return counts
        seen.append(numbers)
    raise Incomplete(f"no two of {MOST_TRACES} traces are whole and alike: {'; '.join(seen)}")
