"""Copies: a real run of toys, the kernel over a list played on the host, faults that are seen, bars that are missed."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick
from ladder_rows import CPU, clocks, quick_run
from paths import ROOT
from pictures import needs_matplotlib

from experiments.copies import addresses, direction, on_device, peer, size, small
from experiments.harness import note
from experiments.harness.rows import Rows
from experiments.works import list_copy
from experiments.works.memory_kinds import DEVICE, KINDS, MANAGED, PAGEABLE, PINNED, RANGE
from pagedopt.commands.results import new_figure


def verdicts(question: str, rows: Rows) -> list[bool | None]:
    (asked,) = (q for q in experiment("copies").questions if q.name == question)
    return [bar.verdict(asked.derive(rows)).met for bar in asked.listed("BARS")]


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("copies", tmp_path, plots=["pieces", "rates", "small"])
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["addresses", "size", "small", "on_device"]
    assert "direction, peer: need a GPU" in found["left_out"]
    assert all(row["right"] and row["guards"] for row in parts["size"])
    assert set(parts["on_device"].values("case")) == set(on_device.WAYS) - {on_device.BATCH}
    copied = tmp_path / "note.md"
    copied.write_text((ROOT / "notes" / "copies.md").read_text())
    note.fill(copied, note.sections(found, experiment("copies")))  # has a place for everything


def test_results_that_are_kept_give_their_note_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("copies", "nvidia-h200") == judged("copies", "cpu") == 7
    regenerated("copies", tmp_path, monkeypatch)


# --- a list of pieces


def some(sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sources = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in sizes]
    return sources, [torch.zeros_like(t) for t in sources]


SIZES = (4, 24, 16384, 16388, 100_000)


@pytest.mark.parametrize("make", [list_copy.over_a_list, list_copy.one_by_one, list_copy.in_torch, list_copy.foreach])
def test_every_way_copies_every_byte(make: Any) -> None:
    sources, targets = some(SIZES)
    make(sources, targets)()
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


def test_pieces_are_cut_and_none_is_lost() -> None:
    sources, targets = some(SIZES)
    rows = list_copy.pieces(sources, targets)
    assert rows[:, 2].sum() == sum(SIZES)
    assert rows[:, 2].max() == list_copy.CUT
    assert len(rows) == 1 + 1 + 1 + 2 + 7


def test_a_way_that_leaves_an_element_out_is_seen() -> None:
    source, target = torch.rand(100), torch.empty(100)
    with pytest.raises(AssertionError, match="wrong"):
        on_device.checked(lambda: target[:-1].copy_(source[:-1]), [source], [target])


#: Lane by lane: no thread waits for another.
HOST = r"""
#include <cstddef>
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __launch_bounds__(n)
%s
extern "C" void play(const Piece* pieces, long long count, int blocks) {
    gridDim = {unsigned(blocks)}, blockDim = {256};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) copy_list(pieces, count);
}
"""


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_kernel_copies_every_byte_and_none_beside(blocks: int, tmp_path: Path) -> None:
    (tmp_path / "play.cpp").write_text(HOST % list_copy.CUDA)
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "play.cpp", "-o", "play.so"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sources, _ = some(SIZES)
    whole = torch.full((2 * sum(SIZES) + 64,), 7, dtype=torch.uint8)
    at, targets = (-whole.data_ptr()) % 16, []
    for source in sources:
        targets.append(whole[at : at + len(source)])
        at += -(-len(source) // 16) * 16 + 16
    rows = list_copy.pieces(sources, targets)
    ctypes.CDLL(str(tmp_path / "play.so")).play(ctypes.c_void_p(rows.ctypes.data), ctypes.c_longlong(len(rows)), blocks)
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    for target in targets:
        target.fill_(7)
    assert bool((whole == 7).all())


def test_the_kernels_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    from pagedopt.kernels.nvrtc import compile_cuda

    for text, name in ((list_copy.CUDA, "copy_list"), (addresses.CUDA, "look")):
        cubin, _ = compile_cuda(text, (name,), "sm_90")
        assert cubin[:4] == b"\x7fELF"


# --- sizes


def truncating(source: torch.Tensor, target: torch.Tensor) -> None:
    """A planted fault: a count of 12 bits, where 32 would need gigabytes."""
    count = len(source) % 4096
    target[:count] = source[:count]


def overrunning(source: torch.Tensor, target: torch.Tensor) -> None:
    """A planted fault: one byte more."""
    target.as_strided((len(target) + 1,), (1,)).fill_(3)
    target.copy_(source)


@pytest.mark.parametrize(
    ("way", "found"),
    [(size.by_torch, (True, True)), (truncating, (False, True)), (overrunning, (True, False))],
)
def test_what_is_cut_and_what_is_written_beside_is_seen(way: Any, found: tuple[bool, bool]) -> None:
    assert size.copied(way, 4100, CPU, CPU) == found


def test_a_spoiled_copy_misses_its_bar() -> None:
    about = {"way": "copy call", "device": "cuda", "bytes": 1 << 32, "said": "", "guards": True}
    pitch = {**about, "way": "cudaMemcpy2D, a pitch of", "right": False}
    assert verdicts("size", Rows([{**about, "right": True}, pitch])) == [True]
    assert verdicts("size", Rows([{**about, "right": True}, {**about, "right": True, "guards": False}])) == [False]
    sums = size.derive(Rows([{**about, "right": True}, pitch])).first(what="sum")
    assert sums is not None
    assert (sums["copies"], sums["bytes"]) == (1, 1 << 32)


def test_the_pattern_is_another_where_a_short_count_would_begin_again() -> None:
    step = size.STEP
    assert len({(begin // step) % 249 for begin in (0, 1 << 31, 1 << 32)}) == 3
    assert not torch.equal(*size.filled(2 * step, CPU).split(step))


# --- directions and addresses


def test_a_direction_fits_where_it_says_what_is_so() -> None:
    assert direction.fits(PAGEABLE, DEVICE, "HostToDevice")
    assert not direction.fits(PAGEABLE, DEVICE, "DeviceToHost")
    assert not direction.fits(RANGE, PINNED, "HostToHost")
    assert all(direction.fits(MANAGED, MANAGED, name) for name in direction.DIRECTIONS)
    assert all(direction.fits(*pair, "Default") for pair in direction.PAIRS)


def pairs(call: str, name: str, outcome: str) -> list[dict[str, Any]]:
    return [
        {"call": call, "direction": name, "source": a, "target": b, "outcome": direction.RIGHT if fits else outcome,
         "said": "", "fits": fits}
        for a, b in direction.PAIRS if (fits := direction.fits(a, b, name)) or True
    ]  # fmt: skip


def test_a_copy_by_default_that_fails_misses_its_bar() -> None:
    rows = Rows([*pairs(direction.ASYNC, "HostToDevice", direction.CRASH), *pairs(direction.NONE, "none", "")])
    assert verdicts("direction", rows) == [True]
    rows[-1] = {**rows[-1], "outcome": "error 1"}
    assert verdicts("direction", rows) == [False]
    one = direction.derive(rows).first(what="sum", direction="HostToDevice")
    assert one is not None
    assert one["fitting"] + one["others"] == len(KINDS) ** 2
    assert (one["failed"], one["right"], one["refused"], one["worse"]) == (0, 0, 0, one["others"])


class Dying:
    """A child that sends two rows and then dies, again and again."""

    def __init__(self, function: Any, call: str, name: str, first: int, limit: float) -> None:
        self.first, self.ended = first, None

    def __iter__(self) -> Any:
        for source, target in direction.PAIRS[self.first : self.first + 2]:
            yield {"source": source, "target": target, "outcome": direction.RIGHT, "said": ""}
        self.ended = "ended with -11: " if self.first + 2 < len(direction.PAIRS) else None  # type: ignore[assignment]


def test_behind_a_pair_that_ends_a_process_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direction, "Child", Dying)
    monkeypatch.setattr(direction, "PROCESSES", 100)
    rows = direction.every_pair(direction.SYNC, "Default")
    assert [(row["source"], row["target"]) for row in rows] == direction.PAIRS
    assert [i for i, row in enumerate(rows) if row["outcome"] == direction.CRASH] == list(range(2, 36, 3))
    monkeypatch.setattr(direction, "PROCESSES", 2)
    assert len(direction.every_pair(direction.SYNC, "Default")) == 6


def test_a_child_that_python_ends_is_no_outcome() -> None:
    if torch.cuda.is_available():
        pytest.skip("memory can be had here")
    with pytest.raises(RuntimeError, match="ended with 1: "):
        direction.every_pair(direction.SYNC, "Default")


@needs_matplotlib
def test_the_matrix_of_directions_is_drawn() -> None:
    figure = new_figure(8, 5)
    rows = [row for name in direction.DIRECTIONS for row in pairs(direction.ASYNC, name, "error 21")]
    direction.draw(figure, direction.derive(Rows([*rows, *pairs(direction.NONE, "none", "")])))
    assert [len(axes.patches) for axes in figure.axes] == [36] * 6


def test_numbers_that_differ_miss_their_bar() -> None:
    about = {"kind": PINNED, "cpu": 64, "gpu": 64, "seen": True, "cpu_reads": "right", "gpu_reads": "right"}
    assert verdicts("addresses", Rows([{**about, "same": True}])) == [True]
    assert verdicts("addresses", Rows([{**about, "same": True}, {**about, "gpu": 65, "same": False}])) == [False]
    row = addresses.on_cpu()
    assert (row["same"], row["seen"], row["cpu_reads"]) == (True, True, "right")


# --- times


def timed(what: str, case: str, length: int, gpu: float) -> dict[str, Any]:
    return {"what": what, "case": case, "size": length, "bytes": 1 << 30, "device": "cuda", **clocks(gpu, gpu)}


def test_a_slow_list_misses_its_bars() -> None:
    for slower, met in ((1.0, True), (1.2, False)):
        rows = Rows([
            timed(on_device.ONE, on_device.ENGINE, 1 << 30, 500.0),
            timed(on_device.ONE, on_device.OURS, 1 << 30, 510.0 * slower),
            timed(on_device.MANY, on_device.FOREACH, 4096, 100.0),
            timed(on_device.MANY, on_device.OURS, 4096, 19.0 * slower),
        ])  # fmt: skip
        assert verdicts("on_device", rows) == [met, met]
        assert on_device.derive(rows)[0]["rate"] == pytest.approx((1 << 30) / 500 / 1e3)


def test_peers_are_left_out_without_two_gpus_and_slow_kernels_miss_their_bars() -> None:
    run = quick_run()
    if torch.cuda.device_count() < 2:
        assert list(peer.measure(run)) == []
        assert run.left_out == ["one GPU is here, it needs two"] or not torch.cuda.is_available()
    for gpu, met in ((110.0, True), (130.0, False)):
        rows = Rows([{"what": "said", "access": 1, "rank": 0, "atomics": 1}] + [
            {"what": "copy", "case": name, "bytes": 1 << 28, **clocks(at, at)}
            for name, at in ((peer.API, 100.0), (peer.PULL, gpu), (peer.PUSH, gpu))
        ])  # fmt: skip
        assert verdicts("peer", rows) == [met, met]


def test_short_copies_are_copies() -> None:
    rows = Rows(small.measure(quick_run()))
    assert {row["case"] for row in rows} == {"memcpy", "torch copy_", "NumPy"}
    assert all(row["returns"] is None for row in rows)
    assert small.shown({"host": {"median": 3.0}, "returns": False}) == "3, waits"
