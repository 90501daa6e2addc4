"""The only clock: the host's time, the wall's and the GPU's of several cases in turn.

Every round runs each case once, so that a drifting clock or a busy neighbour meets all alike.
Each case begins one round; from then on their order is drawn, the same in every run: in a cycle a case always comes
behind the same one, and pays for what that has driven out of caches (16,384 pointers behind ``torch.tensor`` of as many
numbers: 611 µs for 303).  Three times are taken of a case:

* host: until the call returns, on an idle GPU;
* wall: until the GPU is idle again (what a step costs that waits for its result);
* gpu: between two events, per run.  Launches shorter than the host's own work would otherwise be timed at the host's
  pace.  So a kernel that spins holds the stream until all of them are queued.  A sample whose gate opened too early is
  taken again with a longer spin, and given up if that never helps (a stream queues about a thousand launches).
"""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: A measured number with its clock ("host", "wall" or "GPU"), its unit that of the samples, and its spread.
Series = Mapping[str, Any]
#: A longer gate would take longer than what it protects (µs).
MIN_ROUNDS, LONGEST_SPIN = 5, 100_000.0
#: The percentiles of a series that results keep.
PERCENTILES = {"min": 0, "p5": 5, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p95": 95, "max": 100}
#: (host, wall, gpu) in µs.
Sample = tuple[float, float, float | None]


def series(samples: Sequence[float], clock: str) -> dict[str, Any]:
    """One sample or more, or ratios of samples, as results keep them."""
    found = np.percentile(samples, list(PERCENTILES.values())).tolist()
    return {"clock": clock, **dict(zip(PERCENTILES, found, strict=True)), "n": len(samples)}


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        run: queues the work, on the current stream, and does not wait for it.
        before: called before every run and not timed on the host; it may not queue GPU work.
        repeats: runs per GPU sample; more for launches of a few microseconds, events resolve half a microsecond.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    repeats: int = 1

    def prepare(self) -> None:
        """Do what comes before a run."""
        if self.before is not None:
            self.before()


def measure(
    cases: Sequence[Case], device: torch.device, *, rounds: int = 30, seconds: float = 3.0, warmup: int = 3
) -> dict[str, dict[str, Any]]:
    """The series ``host``, ``wall`` and ``gpu`` by name of case; ``gpu`` is None on a CPU or where no gate held."""
    found = {}
    for case, samples in zip(cases, sampled(cases, device, rounds, seconds, warmup), strict=True):
        host, wall, gpu = zip(*samples, strict=True)
        held = [g for g in gpu if g is not None]
        gated = series(held, "GPU") if len(held) > len(samples) // 2 else None
        found[case.name] = {"host": series(host, "host"), "wall": series(wall, "wall"), "gpu": gated}
    return found


def sampled(
    cases: Sequence[Case], device: torch.device, rounds: int, seconds: float, warmup: int
) -> list[list[Sample]]:
    """Samples of every case: one of each a round, after ``warmup`` that are thrown away.

    At most ``rounds``, and no new one after ``seconds`` (but never fewer than 5, or ``rounds`` if that is less).

    Raises:
        ValueError: two cases have one name.
    """
    if len({case.name for case in cases}) < len(cases):
        raise ValueError(f"cases have the same name: {', '.join(case.name for case in cases)}")
    cuda = device.type == "cuda"
    sample = [CudaClock(case).sample if cuda else functools.partial(host_sample, case) for case in cases]
    order, drawn = list(range(len(cases))), random.Random(0)
    kept: list[list[Sample]] = [[] for _ in cases]
    gc.collect()
    gc.disable()
    try:
        for once in sample:
            for _ in range(warmup):
                once()
        begin = time.perf_counter()
        for turn in range(rounds):
            if turn >= MIN_ROUNDS and time.perf_counter() - begin > seconds:
                break
            order = [*order[1:], order[0]] if 0 < turn < len(cases) else order
            if turn >= len(cases):
                drawn.shuffle(order)
            for which in order:
                kept[which].append(sample[which]())
    finally:
        gc.enable()
    return kept


def host_sample(case: Case) -> Sample:
    """A CPU has the host's time only."""
    case.prepare()
    begin = time.perf_counter()
    case.run()
    taken = (time.perf_counter() - begin) * 1e6
    return taken, taken, None


class CudaClock:
    """Host, wall and gated GPU times of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.start, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.spin, self.given_up = 100.0, False

    def sample(self) -> Sample:
        """(host, wall, gpu) in µs."""
        self.case.prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.case.run()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        host, wall = ((at - begin) * 1e6 for at in (queued, time.perf_counter()))
        return host, wall, self._gated(100 + 2 * host * self.case.repeats)

    def _gated(self, need: float) -> float | None:
        """The GPU's time per run, behind a spin of ``need`` µs or of what it took before; None if that is too long.

        A call that takes seconds, such as one that compiles, is that one sample's, not the end of all.
        """
        spin = max(need, self.spin)
        while not self.given_up:
            if spin > LONGEST_SPIN:
                self.given_up = need <= LONGEST_SPIN
                break
            torch.cuda._sleep(int(spin * cycles_per_us(torch.cuda.current_device())))
            self.start.record()
            for _ in range(self.case.repeats):
                self.case.prepare()
                self.case.run()
            self.end.record()
            held = not self.start.query()
            torch.cuda.synchronize()
            if held:
                return self.start.elapsed_time(self.end) * 1e3 / self.case.repeats
            spin = self.spin = 2 * spin
        return None


@functools.cache
def cycles_per_us(device: int) -> float:
    """Clock cycles of ``torch.cuda._sleep`` per µs, on a GPU that is awake."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    for _ in range(3):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / (start.elapsed_time(end) * 1e3)
