"""Where time goes when kernels are short: traces, the ways of a call, and what is said against torch.compile."""

from __future__ import annotations

import weakref

import pytest
import torch
from stand_ins import raising

from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.launch import compiler, reasons, saturation, timeline
from experiments.works import slices
from experiments.works.dispatch import dispatched
from experiments.works.slices import COMBINED, HELD, LIST, SPLIT, Slices, made
from experiments.works.trace import Event, Trace

CPU = torch.device("cpu")


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


# --- what is made of rows


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
    assert [row["today"] for row in rows] == ["shown", "not seen here", "no longer"]
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
