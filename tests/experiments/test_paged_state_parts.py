"""A dry run of the GPU's parts of the experiment on paged state: on a CPU, with a file in the place of the host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from experiment_runs import shown

from experiments.harness import run as harness_run
from experiments.harness import show
from experiments.harness import time as clock
from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.paging import bytes, driver, graph, hidden, link, memory, rivals, spike, sweep
from experiments.works import counters, paged, small_card
from experiments.works import link as works_link
from experiments.works.models import Work
from pagedopt.system.cuda import driver as calls

CPU = torch.device("cpu")
#: Placements of a GPU say that a file stands in for them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Host:
    """Ordinary memory in place of page-locked or managed memory."""

    def __init__(self, nbytes: int, device: int | None) -> None:
        self.host = np.zeros(nbytes, np.uint8)
        self.address, self.nbytes, self.device = self.host.ctypes.data, nbytes, device


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run on a CPU in which what needs a GPU does nothing; placements of a GPU are stood in for by a file."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100 << 30, 140 << 30))
    for name in ("memory_reserved", "max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(calls, "allocate_mapped", Host)
    monkeypatch.setattr(calls, "allocate_managed", Host)
    monkeypatch.setattr(calls, "as_tensor", lambda buffer: torch.from_numpy(buffer.host))
    monkeypatch.setattr(calls, "copy", lambda target, source, n, stream: ctypes.memmove(target, source, n))
    monkeypatch.setattr(calls, "prefetch", lambda *_: None)
    for module in (works_link, driver):
        monkeypatch.setattr(module, "touch", lambda *_: None)
        monkeypatch.setattr(module, "QUICK_SIZE", 1 << 20)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a tenth of a second each time, with all of torch to look at
    once = functools.partial(clock.measure, warmup=0)
    monkeypatch.setattr(clock, "MIN_ROUNDS", 1)
    monkeypatch.setattr(
        harness_run, "measure", lambda cases, device, rounds=1, seconds=0, warmup=0: once(cases, device, rounds=1)
    )
    for module in (sweep, bytes, memory, graph):  # RAM is what a device is to parameters on it
        monkeypatch.setattr(module, "away_bytes", lambda report: report.by_place.get("file", 0))
    monkeypatch.setattr(paged, "QUICK", Work("tiny", [(128, 128)] * 16, torch.float32, 28, 5e-5))
    return Run(CPU, True, show.console())


def measured(module: Any, run: Run) -> Rows:
    """A question's rows, with what it derives, as a file of results gives them back."""
    return shown(module.__name__.rpartition(".")[2], json.loads(json.dumps(list(module.measure(run)))))


def test_dry_link(dry: Run) -> None:
    found = measured(link, dry)
    assert found.where(kind=link.CEILING).values("what") == [*works_link.MOVES, link.HBM]
    assert found.where(kind=link.GRID).values("blocks") == list(works_link.BLOCKS)
    assert found.number("blocks", kind=link.CEILING, what=works_link.IN_PLACE) in works_link.BLOCKS


def test_dry_sweep(dry: Run) -> None:
    found = measured(sweep, dry)
    assert dry.left_out == []
    bits, times = found.where(kind=sweep.BITS), found.where(kind=sweep.TIME, case=sweep.STEP)
    assert bits.values("same") == [True]
    assert len(bits) == 1 + len(paged.PAGED) + len(sweep.ON_HOST) + 1
    assert {len(digests.split()) for digests in bits.values("digests")} == {len(sweep.SHARES) + 1}
    assert len(times) == len(sweep.SHARES) * (len(paged.PAGED) + 1) + len(sweep.ON_HOST)
    away = [row["away"] for row in times.where(way="mapped, staged")]
    assert away == pytest.approx([0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0], abs=0.07)
    for way in paged.PAGED:
        says = found.first(kind=sweep.SAYS, way=way)
        assert says is not None
        assert None not in (says["worst"], says["near"], says["rate"], says["of_ceiling"])


def test_dry_graph(dry: Run) -> None:
    """On a CPU both ways are the same."""
    found = measured(graph, dry)
    assert dry.left_out == []
    assert len(found) == 2 * len(graph.works(dry))
    assert {row["way"] for row in found} == {graph.GRAPH, graph.CALLS}
    assert all(row["bytes"] > 0 and row["of_floor"] > 0 for row in found)
    (arenas,) = found.where(work=graph.ARENAS, way=graph.GRAPH)
    assert arenas["pages"] >= 16


class Counters:
    """More with every count."""

    def __init__(self, device: torch.device) -> None:
        self.counted = 0.0

    def count(self, run: Any, times: int = 4) -> counters.Bytes:
        run()
        self.counted += 1000
        return np.array([self.counted, 2 * self.counted])


def test_dry_bytes(dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes, "LinkCounters", Counters)
    monkeypatch.setattr(
        bytes, "_profiled", lambda problem: [{"cat": "gpu_memcpy", "name": "HtoD", "args": {"bytes": 3}}]
    )
    found = measured(bytes, dry)
    assert dry.left_out == []
    assert len(found.where(kind=bytes.STEP)) == len(bytes.SHARES) * len(paged.PAGED)
    assert not found.where(kind=bytes.STEP, share=1.0).values("of_must")
    # Known traffic was counted as 3,000 for a copy both ways and as 4,000 for twice that in place, the first steps as
    # 5,000 and 10,000, all of them twice that down.
    nbytes = works_link.QUICK_SIZE
    staged, in_place = (found.first(kind=bytes.STEP, way=way) for way in ("mapped, staged", "mapped, in place"))
    assert staged is not None
    assert in_place is not None
    assert staged["up"] == pytest.approx(nbytes * 5 / 3)
    assert staged["down"] == pytest.approx(nbytes * 5 / 3)
    assert in_place["up"] == pytest.approx(2 * nbytes * 10 / 4)


def test_dry_rivals(dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "PACKAGES", {"no_such_package": rivals.torchao})
    found = measured(rivals, dry)
    assert found.values("name") == [rivals.OURS, rivals.OURS_IN_PLACE, rivals.FUSED]
    assert dry.left_out == ["no_such_package: not installed"]


def test_dry_driver_and_memory(dry: Run) -> None:
    found, weighed = measured(driver, dry), measured(memory, dry)
    assert dry.left_out == []
    moved = {row["name"]: row["moved"] / driver.QUICK_SIZE for row in found.where(kind=driver.PAGES)}
    assert len(moved) == 8
    assert {name: times for name, times in moved.items() if times != 1} == {driver.AT_ONCE: 2}, "up and down"
    assert len(weighed) == len(memory.SHARES) * len(paged.PAGED)


def test_dry_hidden(dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "QUICK_WIDTH", 16)
    found = measured(hidden, dry)
    assert dry.left_out == []
    assert [row["blocks"] for row in found] == [8, 4, 16, 32, 8, None]


class Manager:
    """bitsandbytes' list of paged tensors."""

    only: Any = None

    def __init__(self) -> None:
        self.paged_tensors: list[torch.Tensor] = []

    @classmethod
    def get_instance(cls) -> Manager:
        cls.only = cls.only or cls()
        return cls.only


class Paged(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first = not self.state
        super().step()
        if first:
            Manager.get_instance().paged_tensors += [s["exp_avg"] for s in self.state.values()]


class Offload(torch.optim.AdamW):
    def __init__(self, params: Any, kind: Any, **options: Any) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize(("package", "rows"), [("bitsandbytes", 8), ("torchao", 1)])
def test_dry_child(package: str, rows: int, dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = SimpleNamespace(GlobalPageManager=Manager)
    optim = SimpleNamespace(PagedAdamW32bit=Paged, PagedAdamW8bit=Paged, CPUOffloadOptimizer=Offload)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(functional=functional, optim=optim))
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(optim=optim))
    monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)
    found = shown("rivals", list(rivals.PACKAGES[package]("cpu", True)))
    assert len(found) == rows
    assert all(row["error"] < 1e-4 for row in found)
    if package == "bitsandbytes":
        assert {row["what"] for row in found} == {rivals.SAME, rivals.ALONE, rivals.BACK, rivals.WARM}
        assert found[0]["paged_bytes"] == paged.Problem(dry).state_bytes // 2


class Cap:
    """torch's allocator: large batches need more than an ordinary cap has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, training: type[spike.Training], needed: int) -> None:
        self.fraction, self.needed = 1.0, needed
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set)
        batch = training.batch

        def checked(this: spike.Training, step: int) -> torch.Tensor:
            if step % spike.EVERY == 0 and self.fraction * (140 << 30) < self.needed:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return batch(this, step)

        monkeypatch.setattr(training, "batch", checked)

    def set(self, fraction: float) -> None:
        self.fraction = fraction


def test_dry_spike(dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spike, "WIDTH", 64)
    monkeypatch.setattr(spike, "ROWS", 4)
    monkeypatch.setattr(spike, "STEPS", 42)
    state = 8 * spike.QUICK_DEPTH * 64**2
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: 4 * state)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 6 * state)
    limit = small_card.OnCard.cap  # on a CPU the file stands in: what is "on the device" is in RAM

    def cap_ram(self: small_card.OnCard, state: int) -> None:
        limit(self, state or self.memory_report().by_place.get("host", 0))

    monkeypatch.setattr(small_card.OnCard, "cap", cap_ram)
    cap = Cap(monkeypatch, spike.Training, 6 * state)
    found = measured(spike, dry)
    assert dry.left_out == []
    loops = found.where(kind=spike.LOOP)
    assert loops.first(loop=spike.UNPAGED)["same"]  # type: ignore[index]
    assert loops[-1]["loop"].startswith("without spilling: out of memory")
    assert [row["loop"] for row in loops if "slowdown" in row] == [spike.SPILL_ALL, spike.SPILL_SOME]
    assert loops[-1]["finished"] == 2
    assert cap.fraction == 1.0, "the cap goes with the experiment"
    steps = found.where(kind=spike.TIME, loop=spike.UNPAGED)
    assert steps.values("step") == list(range(spike.WARM + 1, spike.STEPS + 1))
    assert found.first(loop=spike.SPILL_ALL)[small_card.SPILLING] > 0  # type: ignore[index]
