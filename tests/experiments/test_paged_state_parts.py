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
from paged_state_results import result

from experiments import bench, report
from experiments.paging import (
    bars,
    crossing,
    driver_mode,
    extra_memory,
    hidden,
    link,
    problem,
    rival_child,
    rivals,
    spike,
    sweep,
    tables,
)
from experiments.paging.counters import Traffic
from pagedopt.system import driver

CPU = torch.device("cpu")
#: Placements of a GPU say that a file stands in for them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Host:
    """Ordinary memory in place of page-locked or managed memory."""

    def __init__(self, nbytes: int, device: int | None) -> None:
        self.host = np.zeros(nbytes, np.uint8)
        self.address, self.nbytes = self.host.ctypes.data, nbytes


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> problem.Run:
    """A run on a CPU in which what needs a GPU does nothing; placements of a GPU are stood in for by a file."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100 << 30, 140 << 30))
    for name in ("memory_reserved", "max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(driver, "allocate_mapped", Host)
    monkeypatch.setattr(driver, "allocate_managed", Host)
    monkeypatch.setattr(driver, "as_tensor", lambda buffer: torch.from_numpy(buffer.host))
    monkeypatch.setattr(driver, "copy", lambda target, source, n, stream: ctypes.memmove(target, source, n))
    monkeypatch.setattr(driver, "prefetch", lambda *_: None)
    for module in (link, driver_mode):
        monkeypatch.setattr(module, "touch", lambda *_: None)
        monkeypatch.setattr(module, "QUICK_SIZE", 1 << 20)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a tenth of a second each time, with all of torch to look at
    once = functools.partial(bench.measure, warmup=0)
    monkeypatch.setattr(bench, "MIN_ROUNDS", 1)
    monkeypatch.setattr(
        problem, "measure", lambda cases, device, rounds=1, seconds=0, warmup=0: once(cases, device, rounds=1)
    )
    for module in (sweep, crossing, extra_memory):  # RAM is what a device is to parameters on it
        monkeypatch.setattr(module, "away_bytes", lambda report: report.by_place.get("file", 0))
    monkeypatch.setattr(problem, "QUICK", problem.Work("tiny", [(128, 128)] * 16, torch.float32, 28, 5e-5))
    return problem.Run(CPU, True, report.console())


def shown(name: str, found: dict[str, Any]) -> None:
    """The tables of a part can be made from what it found, and that is JSON."""
    found = json.loads(json.dumps(found))
    for headings, rows in tables.of_part(name, found).values():
        assert rows
        assert all(len(row) == len(headings) for row in rows)
    assert bars.bars(result(parts={name: found}))


def test_dry_link(dry: problem.Run) -> None:
    found = link.part(dry)
    assert set(found["rates"]) == {link.UP, link.DOWN, link.BOTH, link.IN_PLACE, link.HBM}
    shown("link", found)


def test_dry_sweep(dry: problem.Run) -> None:
    found = sweep.part(dry)
    assert dry.left_out == []
    assert found["different"] == []
    assert {len(digests) for digests in found["digests"].values()} == {len(sweep.SHARES) + 1}
    assert len(found["rows"]) == len(sweep.SHARES) * (len(sweep.PAGED) + 1) + len(sweep.ON_HOST)
    away = [row["away"] for row in found["rows"] if row["way"] == "mapped, staged"]
    assert away == pytest.approx([0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0], abs=0.07)
    assert bars.worst_of_line(found["rows"], "mapped, staged") is not None
    assert bars.all_near(found["rows"], "managed, in place") is not None
    shown("sweep", found)


class Counters:
    def __init__(self, device: torch.device) -> None: ...

    def count(self, run: Any, times: int = 4) -> Traffic:
        run()
        return Traffic(11.0, 12.0)


def test_dry_bytes(dry: problem.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "LinkCounters", Counters)
    monkeypatch.setattr(crossing.Calibration, "of", classmethod(lambda cls, c, m: cls(Traffic(1.0, 1.0))))
    monkeypatch.setattr(crossing, "_profiled", lambda run: {"HtoD": 3})
    found = crossing.part(dry)
    assert dry.left_out == []
    assert {row["ratio"] is None for row in found["rows"] if row["share"] == 1.0} == {True}
    shown("bytes", found)


def test_dry_rivals(dry: problem.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "PACKAGES", ("no_such_package",))
    found = rivals.part(dry)
    assert [row["name"] for row in found["rows"]] == [rivals.OURS, rivals.OURS_IN_PLACE, rivals.FUSED]
    assert dry.left_out == ["no_such_package: not installed"]
    shown("rivals", found)


def test_dry_driver(dry: problem.Run) -> None:
    found = driver_mode.part(dry)
    assert dry.left_out == []
    assert len(found["rows"]) == 8
    shown("driver", found)


def test_dry_hidden(dry: problem.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "QUICK_WIDTH", 16)
    found = hidden.part(dry)
    assert dry.left_out == []
    assert [row["blocks"] for row in found["rows"]] == [8, 4, 16, 32, 8, None]
    shown("hidden", found)


def test_dry_memory(dry: problem.Run) -> None:
    found = extra_memory.part(dry)
    assert dry.left_out == []
    assert len(found["rows"]) == len(extra_memory.SHARES) * len(sweep.PAGED)
    shown("memory", found)


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
def test_dry_child(
    package: str, rows: int, dry: problem.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    functional = SimpleNamespace(GlobalPageManager=Manager)
    optim = SimpleNamespace(PagedAdamW32bit=Paged, PagedAdamW8bit=Paged, CPUOffloadOptimizer=Offload)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(functional=functional, optim=optim))
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(optim=optim))
    monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert rival_child.main([package, "cpu", "1"]) == 0
    found = rivals.results(capsys.readouterr().out)
    assert len(found) == rows
    assert all(row["error"] < 1e-4 for row in found)
    shown("rivals", {"numel": 1, "rows": found})
    if package == "bitsandbytes":
        assert {row["what"] for row in found} == {rivals.SAME, rivals.ALONE, rivals.BACK, rivals.WARM}
        assert found[0]["paged_bytes"] == dry.state_bytes // 2


def test_the_lowest_reading_is_found() -> None:
    readings = iter([5, 3, 9, 4] + [9] * 10**6)
    with extra_memory.Lowest(lambda: next(readings)) as lowest:
        while lowest.looks < 4:
            pass
    assert lowest.value == 3


class Cap:
    """torch's allocator: large batches need more than an ordinary cap has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, training: type[spike.Training], needed: int) -> None:
        self.fraction, self.needed = 1.0, needed
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set)
        batch = training.batch

        def checked(this: spike.Training, step: int) -> torch.Tensor:
            if spike.large(step) and self.fraction * (140 << 30) < self.needed:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return batch(this, step)

        monkeypatch.setattr(training, "batch", checked)

    def set(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction


def test_dry_spike(dry: problem.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spike, "WIDTH", 64)
    monkeypatch.setattr(spike, "ROWS", 4)
    monkeypatch.setattr(spike, "STEPS", 42)
    state = 8 * spike.QUICK_DEPTH * 64**2
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: 4 * state)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 6 * state)
    # On a CPU the file stands in: what is "on the device" is in RAM.
    fit = spike.SmallCard.fit

    def fit_ram(self: spike.SmallCard, optimizer: Any) -> None:
        text = optimizer.memory_report()
        near = {"device": text.by_place.get("host", 0)}
        fit(self, SimpleNamespace(memory_report=lambda: SimpleNamespace(by_place=near)))  # type: ignore[arg-type]

    monkeypatch.setattr(spike.SmallCard, "fit", fit_ram)
    cap = Cap(monkeypatch, spike.Training, 6 * state)
    found = spike.part(dry)
    assert dry.left_out == []
    assert found["same"]
    assert found["helpless"].startswith("out of memory")
    assert set(found["slowdown"]) == {spike.SPILL_ALL, spike.SPILL_SOME}
    assert cap.fraction == 1.0, "the cap goes with the experiment"
    assert len(found["timeline"][spike.UNPAGED]) == spike.STEPS
    shown("spike", found)
