"""Where time goes when kernels are short: a real run of toys, what is made of rows, the kernel over a pointer list."""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick
from paths import ROOT
from pictures import needs_matplotlib
from stand_ins import raising

from experiments.harness import note
from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.harness.time import series
from experiments.launch import compiler, eager, gaps, puzzlers, reasons, saturation, timeline
from experiments.works import norm_tanh, slices
from experiments.works.dispatch import dispatched
from experiments.works.slices import COMBINED, COMPILED, GRAPH, HELD, LIST, SPLIT, WIDE, Slices, made
from experiments.works.trace import Event, Trace
from pagedopt.commands.results import new_figure

CPU = torch.device("cpu")
WAYS = [LIST, HELD, SPLIT, COMBINED, *COMPILED.values()]


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("launch_overhead", tmp_path, plots=["saturation", "traces"])
    assert "gaps, replays: need a GPU" in found["left_out"]
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    ways = parts["puzzlers"].where(of="way")
    assert ways.values("case") == WAYS
    assert all(row["error"] < 1e-6 for row in ways)
    assert all(row["difference"] < 1e-6 for row in parts["numerics"].where(of="way"))
    assert parts["numerics"].number("difference", case=COMBINED) == 0
    assert parts["eager"].values("line") == list(eager.LINES)
    known = {row["reason"]: row for row in parts["reasons"]}
    assert known["no dynamic shapes"]["number"] == 2
    assert known["logging ends fusion"]["cut"]["print(x.shape)"]["operations"] == [10, 9]
    assert known["logging ends fusion"]["cut"]["x[0].item()"]["operations"] == [11, 10]
    assert known["logging ends fusion"]["cut"][compiler.REORDERED]["operations"] == [19]
    copied = tmp_path / "note.md"
    copied.write_text((ROOT / "notes" / "launch_overhead.md").read_text())
    note.fill(copied, note.sections(found, experiment("launch_overhead")))  # has a place for everything
    assert "| split_stack | 37 |" in copied.read_text()


def test_results_that_are_kept_give_their_note_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("launch_overhead", "nvidia-h200") == 17
    regenerated("launch_overhead", tmp_path, monkeypatch)


# --- bars


def timed(gpu: float, wall: float | None = None) -> dict[str, Any]:
    return {"gpu": series([gpu], "GPU"), "wall": series([wall or gpu], "wall")}


def made_up(more: int = 0, slower: float = 1.0) -> dict[str, Rows]:
    """Rows of a GPU on which every bar is met, unless there are ``more`` of everything and ours is ``slower``."""
    kernels = {SPLIT: 36, COMBINED: 5, COMPILED[SPLIT]: 19, COMPILED[COMBINED]: 4, WIDE: 4, LIST: 4}
    walls = {SPLIT: 400.0 / slower, COMBINED: 100.0, LIST: 90.0 * slower}
    ways = [
        {"of": "way", "batch": 1024, "device": "cuda", "case": name, "kernels": count + more, "trace": "",
         "error": 1e-7, **timed(walls.get(name, 50.0))}
        for name, count in kernels.items()
    ]  # fmt: skip
    replays = [
        {"work": "x", "mode": mode, "kernels": 36 + (more if mode == "replayed" else 0), "launches": 1 + more,
         "operators": more, "allocations": more, "different": more, **timed(10.0)}
        for mode in ("eager", "replayed")
    ]  # fmt: skip
    numerics = [
        {"of": "way", "case": name, "device": "cuda", "seeds": 2, "alike": 2, "rms": 1e-8,
         "difference": 2e-6 * more * (name != SPLIT), "error": 1e-7 * (1 + more * (name != SPLIT))}
        for name in kernels
    ]  # fmt: skip
    return {"puzzlers": Rows(ways), "replays": Rows(replays), "numerics": Rows(numerics)}


def met(found: dict[str, Rows]) -> list[bool | None]:
    asked = [q for q in experiment("launch_overhead").questions if q.name in found]
    return [bar.verdict(q.derive(found[q.name])).met for q in asked for bar in q.listed("BARS")]


def test_the_bars_are_met_or_missed() -> None:
    assert met(made_up()) == [True] * 17
    assert met(made_up(more=1, slower=1.2)) == [False] * 17


def test_a_cpu_meets_no_bar_of_a_gpu() -> None:
    on_cpu = Rows({**row, "device": "cpu"} for row in made_up()["puzzlers"])
    assert [bar.verdict(puzzlers.derive(on_cpu)).met for bar in puzzlers.BARS] == [None] * 7


def test_the_a100_stands_beside_what_it_ran() -> None:
    first, *_ = puzzlers.derive(made_up()["puzzlers"])
    assert (first["a100"], first["faster"], first["of_combined"]) == ("36 / 1,613", 1.0, 4.0)
    ways, *_ = puzzlers.TABLES
    (_, headings, lines), *_ = ways.shown(puzzlers.derive(made_up()["puzzlers"]))
    assert dict(zip(headings, lines[1], strict=True))["A100, its trace: faster"] == "8.4 x"


def test_the_a100_stands_beside_no_other_kernels() -> None:
    rows = [{"of": "kernels", "batch": batch, "case": SPLIT, "kind": "tanh"} for batch in (1024, 16384)]
    assert [row["a100"] for row in puzzlers.derive(Rows(rows))] == [4, None]


# --- traces


def event(name: str, kind: str, start: float, length: float, correlation: int | None = None) -> Event:
    return Event(name, kind, start, length, ("lane", kind), correlation)


SMALL = Trace([
    event("aten::tanh", "cpu_op", 1000.0, 8.04),
    event("cudaLaunchKernel", "cuda_runtime", 1004.0, 3.0, 7),
    event("void at::native::vectorized_elementwise_kernel<4, tanh_kernel_cuda>", "kernel", 1010.0, 2.5, 7),
])  # fmt: skip


def test_a_trace_comes_back_from_its_row() -> None:
    again = list(timeline.unpacked(timeline.packed(SMALL)))
    assert again == [("o", 0.0, 8.0, 0), ("l", 4.0, 3.0, 7), ("k", 10.0, 2.5, 7)]
    assert timeline.packed(Trace([])) == ""


@needs_matplotlib
def test_a_trace_is_drawn_in_lanes_with_launches_joined_to_their_kernels() -> None:
    figure = new_figure(6, 3)
    axes = figure.subplots()
    timeline.Timeline(title="{case}").onto(axes, Rows([{"case": SPLIT, "trace": timeline.packed(SMALL)}]))
    assert [len(bars.get_paths()) for bars in axes.collections] == [1, 1, 1]
    assert [list(line.get_xdata()) for line in axes.lines] == [[0.0, 6.0]]
    assert (axes.get_xlim(), axes.get_title(loc="right")) == ((0, timeline.MOST), "")


@needs_matplotlib
def test_what_lies_beyond_the_axis_is_cut_and_said() -> None:
    late = event("cudaLaunchKernel", "cuda_runtime", 3500.0, 4.0, 8)
    figure = new_figure(6, 3)
    axes = figure.subplots()
    rows = Rows([{"case": SPLIT, "trace": timeline.packed(Trace([*SMALL.events, late]))}])
    timeline.Timeline(title="{case}").onto(axes, rows)
    assert (axes.get_xlim(), axes.get_title(loc="right")) == ((0, timeline.MOST), "… until 2,500")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "LayerNorm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda(...)>", "tanh"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<...>", "stack"),
        ("void gemv2T_kernel_val<int, int, float>", "linear"),
        ("triton_per_fused_native_layer_norm_tanh_0", "Triton"),
        ("norm_tanh", "LayerNorm + tanh"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar>", "ReLU"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert timeline.kind(name) == kind


def test_kernels_of_a_kind_are_put_together() -> None:
    (row,) = timeline.by_kind(Trace([*SMALL.events, event("tanh_kernel", "kernel", 1020.0, 3.5, 8)]))
    assert (row["kind"], row["count"], row["all"], row["each"]["median"]) == ("tanh", 2, 6.0, 3.0)


# --- ways


def test_a_way_that_fails_is_left_out_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "compiled", raising(AttributeError("config.combo_kernels is gone")))
    run = Run(CPU, True, console())
    assert [name for name, _, _ in made(Slices(2, CPU), run)] == [LIST, HELD, SPLIT, COMBINED]
    assert len(run.left_out) == 2
    assert run.left_out[0].endswith("AttributeError: config.combo_kernels is gone")


def test_ways_of_a_gpu_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._inductor.config.combo_kernel_max_num_nodes", raising=False)
    work, run = Slices(2, CPU), Run(CPU, True, console())
    run.device = torch.device("cuda", 0)
    makers = slices.makers(work, run)
    assert {GRAPH, WIDE, LIST} < set(makers)
    with pytest.raises(NotImplementedError, match="8 is the most"):
        makers[WIDE]()


def test_every_way_sees_other_input_in_the_same_memory() -> None:
    work = Slices(3, CPU)
    for seed, way in enumerate((work.pointer_list(), work.pointer_list(held=True)), 1):
        before = way()
        work.fill(seed)
        torch.testing.assert_close(way(), work.split_stack(work.x), rtol=0, atol=1e-6)
        assert not torch.allclose(before, way())
    assert torch.equal(work.split_stack(work.x), work.combined(work.x))
    # 16 LayerNorms, 16 tanh, stack, Linear, ReLU; the pointer list leaves the last two.
    ways = (work.way(work.split_stack), work.way(work.combined), work.pointer_list())
    assert [dispatched(way).total() for way in ways] == [35, 4, 2]


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (256, torch.float64)])
def test_other_rows_are_refused(dim: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"multiple of 128, float32"):
        norm_tanh.NormTanh([torch.rand(2, dim, dtype=dtype)])


# --- the kernel over a pointer list

#: 256 threads in step: a warp's exchange is a barrier of its 32.
HOST = r"""
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
struct float4 { float x, y, z, w; };
struct Index { unsigned x, y; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static float held[256];
static std::barrier<>* warps[8];
static float __shfl_xor_sync(unsigned, float value, int other) {
    auto& warp = *warps[threadIdx.x / 32];
    held[threadIdx.x] = value;
    warp.arrive_and_wait();
    const float found = held[threadIdx.x ^ other];
    warp.arrive_and_wait();
    return found;
}
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
#define __device__
#define __global__
#define __launch_bounds__(n)
#define DIM 256
%s
extern "C" void play(const unsigned long long* rows, float* out, long long batch, int across, int down) {
    gridDim = {unsigned(across), unsigned(down)};
    for (auto& warp : warps) warp = new std::barrier<>(32);
    for (unsigned block = 0; block < gridDim.x * gridDim.y; ++block) {
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 256; ++t) threads.emplace_back([=] {
            threadIdx = {t, 0}, blockIdx = {block %% gridDim.x, block / gridDim.x};
            norm_tanh(rows, out, batch);
        });
        for (auto& thread : threads) thread.join();
    }
}
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("norm_tanh")
    (folder / "play.cpp").write_text(HOST % norm_tanh.CUDA)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "play.cpp", "-o", "play.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "play.so")).play


@pytest.mark.parametrize(("batch", "across"), [(1, 1), (37, 2), (40, 1)])
def test_the_kernel_normalizes_every_row_once(played: Any, batch: int, across: int) -> None:
    tensors = [torch.rand(batch, 256) for _ in range(3)]
    table = norm_tanh.NormTanh(tensors).table
    out = torch.full((3 * batch + 1, 256), 7.0)
    rows = table.rows.ctypes.data
    played(ctypes.c_void_p(rows), ctypes.c_void_p(out.data_ptr()), ctypes.c_longlong(batch), across, 3)
    x = torch.stack(tensors).double()
    exact = torch.tanh(torch.nn.functional.layer_norm(x, (256,), eps=0))
    torch.testing.assert_close(out[:-1].view_as(exact).double(), exact, rtol=0, atol=1e-6)
    assert bool((out[-1] == 7).all())


def test_the_kernel_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    from pagedopt.kernels.nvrtc import compile_cuda

    cubin, _ = compile_cuda("#define DIM 256\n" + norm_tanh.CUDA, ("norm_tanh",), "sm_90")
    assert cubin[:4] == b"\x7fELF"


# --- what is made of rows


def test_a_launch_is_hidden_behind_a_long_kernel() -> None:
    known = ((64, 72.0, 360.0), (4096, 720.0, 750.0), (16384, 3600.0, 3610.0))
    about = {"case": SPLIT, "kernels": 36}
    rows = gaps.derive(Rows({**about, "batch": batch, **timed(gpu, wall)} for batch, gpu, wall in known))
    assert (rows[0]["exposed"], rows[0]["waits"]) == (8.0, pytest.approx(80.0))
    assert "4,096 rows a slice on, where a kernel takes 20.0 µs" in gaps.sentence(rows)
    assert "At no batch" in gaps.sentence(rows.where(batch=64))


def test_saturation_compares_16_slices_with_one() -> None:
    rows = saturation.derive(Rows(
        {"case": f"LayerNorm, {where}", "rows": rows, "bytes": 2048 * rows, **timed(gpu)}
        for where in (saturation.SAME, "in turn") for rows, gpu in ((1024, 4.0), (16384, 28.4))
    ))  # fmt: skip
    assert (rows[1]["operation"], rows[1]["where"]) == ("LayerNorm", "one tensor")
    assert (rows[1]["of_slice"], rows[1]["clock"]) == (pytest.approx(7.1), "GPU")
    assert saturation.sentence(rows).splitlines()[0].endswith("take 7.1 times as long (A100: 7.1 times).")


def test_inputs_take_turns_and_results_are_kept_as_long() -> None:
    seen: list[float] = []
    results: list[torch.Tensor] = []

    def operation(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x))
        results.append(x + 1)
        return results[-1]

    call = saturation.repeated(operation, [torch.tensor(0.0), torch.tensor(1.0)])
    for _ in range(3):
        call()
    assert seen == [0, 1, 0]
    kept = [weakref.ref(x) for x in results]
    results.clear()
    assert [ref() is None for ref in kept] == [True, False, False]


def test_a_reason_is_shown_not_seen_or_gone() -> None:
    """What may happen is not refuted by a test that does not find it."""
    about = {"number": 2, "unit": "programs", "says": "", "device": "cpu"}
    found = {"compile time": True, "bugs": False, "no dynamic shapes": False}
    rows = reasons.derive(Rows({"reason": reason, "holds": holds, **about} for reason, holds in found.items()))
    (_, _, lines), *_ = reasons.TABLES[0].shown(rows)
    assert [line[:2] for line in lines] == [
        ["compile time", "shown"],
        ["bugs", "not seen here"],
        ["no dynamic shapes", "no longer"],
    ]
    said = "shown: compile time; not seen here: bugs; no longer: no dynamic shapes"
    assert reasons.sentence(rows) == f"Of 3 reasons that were tried: {said}."
    assert {reason.name for reason in compiler.REASONS} > set(reasons.HEDGED)


def test_a_first_call_that_does_not_end_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LIMIT", 0.2)
    row = compiler.compile_time(Run(CPU, True, console()))
    assert (row["holds"], row["number"], row["says"]) == (True, None, "the first call: not ended in 0.2 s")


def test_programs_that_come_out_wrong_are_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = dict.fromkeys(("one", "two"), lambda x: 2 * x)
    monkeypatch.setattr(compiler, "PROGRAMS", programs)
    monkeypatch.setattr(compiler, "compiled", lambda program, backend: lambda x: 3 * x)
    row = compiler.bugs(Run(CPU, True, console()))
    assert (row["number"], row["holds"]) == (2, True)
    monkeypatch.setattr(compiler, "compiled", lambda program, backend: program)
    assert compiler.bugs(Run(CPU, True, console()))["number"] == 0


def test_seven_reasons() -> None:
    assert len(compiler.REASONS) == 7
    assert all((test.__doc__ or "").strip().endswith("?") for test in compiler.REASONS.values())
