"""What ran is counted, and a trace that lacks something is noticed; torch's batching; processes with cold caches."""

from __future__ import annotations

import itertools
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_child

from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.works import batching, trace
from experiments.works.dispatch import dispatched
from experiments.works.fresh import FOLDERS, empty_caches, fresh, rows_of
from experiments.works.models import gpt2_shapes

# --- traces


def event(name: str, kind: str, start: float, length: float, correlation: int | None = None) -> dict[str, Any]:
    """As kineto writes it."""
    args = {} if correlation is None else {"correlation": correlation}
    tid = 7 if kind in (trace.KERNEL, *trace.COPIES) else 100
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": args}


def three_adds() -> list[dict[str, Any]]:
    """Three adds on a GPU, of which Triton launches the last, with a copy in between and an operator inside another."""
    return [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        event("aten::add", "cpu_op", 0, 10),
        event("cudaLaunchKernel", "cuda_runtime", 2, 3, 11),
        event("vectorized_elementwise_kernel", "kernel", 8, 4, 11),
        event("aten::add", "cpu_op", 10, 10),
        event("aten::copy_", "cpu_op", 11, 4),
        event("cudaMemcpyAsync", "cuda_runtime", 12, 2, 12),
        event("Memcpy HtoD", "gpu_memcpy", 14, 1, 12),
        event("cudaLaunchKernel", "cuda_runtime", 16, 3, 13),
        event("vectorized_elementwise_kernel", "kernel", 20, 4, 13),
        event("profiler::_record_function_enter_new", "cpu_op", 21, 1),
        event("cuLaunchKernelEx", "cuda_driver", 22, 1, 14),
        event("triton_poi_fused_add_0", "kernel", 22, 6, 14),
        event("cudaDeviceSynchronize", "cuda_runtime", 30, 1, 15),
    ]


def test_a_trace_is_counted() -> None:
    counts = trace.Trace.of(three_adds()).counts()
    assert tuple(counts.numbers.values()) == (3, 3, 1, 2)
    assert counts.busy_us == 4 + 1 + 8, "what runs at the same time is busy once"
    assert counts.span_us == 20
    assert counts.gaps == (trace.Gap(2, 4), trace.Gap(5, 1), trace.Gap(0, 4))
    assert {name: (found["clock"], found["median"]) for name, found in counts.as_dict().items() if "_" in name} == {
        "busy_us": ("GPU", 13), "span_us": ("GPU", 20), "gap_each": ("GPU", 2)
    }  # fmt: skip


@pytest.mark.parametrize("dropped", [e for e in three_adds() if e.get("args", {}).get("correlation") in (11, 13, 14)])
def test_a_dropped_event_fails(dropped: dict[str, Any]) -> None:
    words = "launches without a kernel" if dropped["cat"] == "kernel" else "kernels without a launch"
    with pytest.raises(trace.Incomplete, match=words):
        trace.Trace.of(e for e in three_adds() if e != dropped).counts()


def test_what_two_traces_do_not_agree_on_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = three_adds()
    without_copy = [e for e in whole if "Memcpy" not in e["name"]]
    without_kernel = [e for e in whole if e.get("cat") != "kernel"]
    without_operators = [e for e in whole if e.get("cat") != "cpu_op"]

    def counted(*traces: list[dict[str, Any]]) -> trace.Counts:
        left = iter(traces)
        monkeypatch.setattr(trace, "traced", lambda run: trace.Trace.of(next(left)))
        return trace.counted(lambda: None)

    assert counted(without_copy, whole, whole).copies == 1
    assert counted(without_kernel, whole, without_kernel, whole).copies == 1
    with pytest.raises(trace.Incomplete, match=r"no two of 4 traces.*copies 0.*launches without a kernel"):
        counted(without_copy, whole, without_operators, without_kernel)


def test_the_replay_of_a_graph_is_one_launch() -> None:
    kernels = [event(f"kernel{i}", "kernel", 10 + 5 * i, 2, 9) for i in range(3)]
    counts = trace.Trace.of([event("cudaGraphLaunch", "cuda_runtime", 0, 5, 9), *kernels]).counts()
    assert tuple(counts.numbers.values()) == (1, 3, 0, 0)
    assert [gap.length for gap in counts.gaps] == [3, 3]


def test_a_call_of_the_runtime_that_the_driver_repeats_is_one() -> None:
    twice = [event("cudaLaunchKernel", "cuda_runtime", 0, 5, 9), event("cuLaunchKernel", "cuda_driver", 1, 3, 9)]
    assert trace.Trace.of([*twice, event("kernel", "kernel", 6, 1, 9)]).counts().launches == 1


def test_seven_adds_are_seven_operators() -> None:
    x = torch.ones(8)

    def seven() -> None:
        for _ in range(7):
            x.add_(1)

    counts = trace.counted(seven)
    assert tuple(counts.numbers.values()) == (0, 0, 0, 7)
    assert 0 < counts.busy_us <= counts.span_us
    assert len(counts.gaps) == 6
    assert dispatched(seven).total() == 7


def test_the_second_call_is_what_is_traced() -> None:
    x, calls = torch.ones(8), itertools.count()

    def lazy() -> None:
        for _ in range(1 if next(calls) else 5):
            x.add_(1)

    assert [event.name for event in trace.traced(lazy).operators] == ["aten::add_"]
    assert next(calls) == 2


# --- dispatch


def test_what_starts_no_kernel_is_not_counted() -> None:
    x = torch.ones(256)
    calls = (x.clone, lambda: x.mul_(x), x.zero_, lambda: x.view(16, 16).t()[3:], lambda: x[0].item())
    assert [list(dispatched(call)) for call in calls] == [
        ["aten::clone"],
        ["aten::mul_"],
        ["aten::zero_"],
        [],
        [],
    ]


# --- torch's batching

LLAMA = [8192 * 8192] * 2 + [8192 * 1024] * 2 + [8192 * 28672] * 3 + [8192] * 2
LISTS = {"tiny": [6] * 1000, "gpt2": [math.prod(s) for s in gpt2_shapes()], "llama": LLAMA, "1b": [4096**2] * 60}


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        (12080, {"tiny": (115, 28, 10), "gpt2": (56, 7, 2), "llama": (328, 41, 1), "1b": (384, 48, 1)}),
        (13000, {"tiny": (20, 4, 2), "gpt2": (8, 1, 1), "llama": (48, 6, 1), "1b": (56, 7, 1)}),
    ],
)
def test_the_installed_header_gives_the_launches(cuda: int, expected: dict[str, tuple[int, ...]]) -> None:
    limits = batching.installed(cuda)
    if cuda >= 13000 and limits.tensors[0] == 110:
        pytest.skip("this torch has structs of 4 KB only")
    for name, numels in LISTS.items():
        ones, foreach = [1] * len(numels), limits.step(numels, batching.FOREACH_ADAMW)
        assert (foreach, limits.launches(numels, 4), limits.launches(ones, 1)) == expected[name]


def as_torch_does(numels: list[int], most: int, most_blocks: int, chunk: int) -> int:
    """The loop of MultiTensorApply.cuh, line by line."""
    launches = block = tensor = 0
    for numel in numels:
        if numel == 0:
            continue
        tensor += 1
        chunks = numel // chunk + (numel % chunk != 0)
        for i in range(chunks):
            block += 1
            if (tensor == most and i == chunks - 1) or block == most_blocks:
                launches += 1
                block = 0
                tensor = 0 if i == chunks - 1 else 1
    return launches + (block != 0)


def test_batches_are_those_of_torchs_loop() -> None:
    draw = random.Random(0)
    limits = batching.Limits((5, 4), (7, 6), (3, 3), 10)
    for _ in range(300):
        numels = [draw.choice((0, 1, 9, 10, 11, 60, 70, 71, 200)) for _ in range(draw.randrange(30))]
        for depth in (1, 2):
            for scalars, most in ((False, limits.tensors[depth - 1]), (True, 3)):
                expected = as_torch_does(numels, most, limits.blocks[depth - 1], 10)
                assert limits.launches(numels, depth, scalars) == expected, numels


# --- processes


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child finds ``toy_child``."""
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_child.__file__).parent))


@pytest.mark.usefixtures("helpers")
def test_a_cache_that_is_given_is_warm_the_second_time() -> None:
    with empty_caches() as folder:
        cold, warm = (fresh(toy_child.compiled, limit=60, caches=folder) for _ in range(2))
    assert cold.row["found"] == dict.fromkeys(FOLDERS, False)
    assert warm.row["found"] == dict.fromkeys(FOLDERS, True)
    assert not folder.exists()


@pytest.mark.usefixtures("helpers")
@pytest.mark.parametrize("quick", [False, True], ids=["apart", "here"])
def test_rows_come_as_far_as_a_process_gets_and_toys_stay_here(quick: bool) -> None:
    run = Run(torch.device("cpu"), quick, console())
    rows = list(rows_of(run, toy_child.count, 2, limit=60))
    assert [row["n"] for row in rows] == [0, 1]
    assert (rows[0]["pid"] == os.getpid()) is quick
    if not quick:
        assert list(rows_of(run, toy_child.fail, limit=60)) == [{"n": 0}]
        assert "ValueError: of no use" in run.left_out[0]
