"""All timing is here: interleaved rounds, medians with their spread, a gate that keeps the host out of GPU times.

Every round runs each case once, so a drifting clock or a busy neighbour meets all cases alike.  Each begins one round;
from then on their order is drawn, the same in every run: in a cycle a case always comes behind the same one, and pays
for what that has driven out of caches (16,384 pointers behind ``torch.tensor`` of as many numbers: 611 µs for 303).
Three times are taken of a case:

* host: until the call returns, on an idle GPU;
* wall: until the GPU is idle again (what a step costs that waits for its result);
* gpu:  between two events, per run.  Launches shorter than the host's own work would otherwise be timed at the host's
  pace, so a spinning kernel holds the stream until all of them are queued; a sample whose gate opened too early is
  taken again with a longer spin, and given up if that never helps (a stream queues about a thousand launches).

Working sets: what is measured for bandwidth is far larger than a GPU's L2 (60 MB on an H200), so nothing is rotated.
"""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MIN_ROUNDS = 5
#: A longer gate would take longer than what it protects (µs).
LONGEST_SPIN = 100_000.0
#: The percentiles of a series that results keep.
PERCENTILES = {"min": 0, "p5": 5, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p95": 95, "max": 100}
#: The times of a case: by host, wall and gpu a series, or None on a CPU or where the gate could not hold.
Timing = dict[str, Any]
#: (host, wall, gpu) in µs.
Sample = tuple[float, float, float | None]


def series(samples: Sequence[float], clock: str) -> dict[str, Any]:
    """One sample or more, or ratios of samples, as results keep them.

    That is ``clock`` ("host", "wall" or "GPU"), ``n``, and ``min``, ``p5`` … ``median`` … ``max`` in their unit.
    """
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
) -> dict[str, Timing]:
    """Time every case in interleaved rounds; the cases have different names (see :func:`sampled`)."""
    found = sampled(cases, device, rounds, seconds, warmup)
    return {case.name: _timing(samples) for case, samples in zip(cases, found, strict=True)}


def sampled(
    cases: Sequence[Case], device: torch.device, rounds: int, seconds: float, warmup: int
) -> list[list[Sample]]:
    """Samples of every case, in interleaved rounds: one of each a round, after ``warmup`` that are thrown away.

    At most ``rounds``, and no new one after ``seconds`` (but never fewer than 5, or ``rounds`` if that is less).
    """
    on_cuda = device.type == "cuda"
    sample = [_CudaClock(case).sample if on_cuda else functools.partial(_host_sample, case) for case in cases]
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


def _timing(samples: Sequence[Sample]) -> Timing:
    host, wall, gpu = zip(*samples, strict=True)
    held = [g for g in gpu if g is not None]
    gated = series(held, "GPU") if len(held) > len(samples) // 2 else None
    return {"host": series(host, "host"), "wall": series(wall, "wall"), "gpu": gated}


def _host_sample(case: Case) -> Sample:
    """(host, wall, gpu) in µs; a CPU has the host's time only."""
    case.prepare()
    begin = time.perf_counter()
    case.run()
    taken = (time.perf_counter() - begin) * 1e6
    return taken, taken, None


class _CudaClock:
    """Host, wall and gated GPU times of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.start, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.spin = 100.0
        self.given_up = False

    def sample(self) -> Sample:
        """(host, wall, gpu) in µs."""
        self.case.prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.case.run()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        host = (queued - begin) * 1e6
        return host, (done - begin) * 1e6, self._gated(100 + 2 * host * self.case.repeats)

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
