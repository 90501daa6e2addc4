"""What torch.compile makes of an optimizer: its phases, and the oracle of each count."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.compiled import coverage, first_call, generated, kernels, recompiles
from experiments.harness.rows import Rows
from experiments.harness.time import series
from experiments.works import first_steps
from experiments.works.first_steps import COLD, FOREACH, FUSED, PORTABLE, WARM, first_step
from experiments.works.fresh import empty_caches, fresh
from experiments.works.models import HYPER, Work
from experiments.works.phases import AOT, BUILD, CACHES, DYNAMO, GRAPH, KERNELS, Event, exclusive, recorded

CPU = torch.device("cpu")


# --- phases


def event(sign: str, name: str, second: float) -> Event:
    return Event(sign == "+", name, int(second * 1e9))


def test_each_moment_is_in_one_phase() -> None:
    found = exclusive([
        event("+", "unknown, around", 0), event("+", "entire_frame_compile", 1), event("+", "gc", 2),
        event("-", "gc", 3), event("+", "Scheduler.codegen", 4), event("+", "compile_file", 6),
        event("-", "compile_file", 13), event("+", "left open by an error", 13), event("-", "Scheduler.codegen", 14),
        event("-", "never begun", 15), event("-", "entire_frame_compile", 16), event("-", "unknown, around", 20),
    ])  # fmt: skip
    assert {name: taken for name, taken in found.items() if taken} == {DYNAMO: 5, KERNELS: 3, BUILD: 7}
    assert sum(found.values()) == 15, "what lies around the frame is in none"


@pytest.mark.long
def test_what_torch_logs_is_all_of_its_compilation() -> None:
    from torch._dynamo.utils import compilation_time_metrics

    torch._dynamo.reset()
    before = sum(compilation_time_metrics.get("_compile.compile_inner", ()))
    with recorded() as events:
        torch.compile(lambda x: torch.sin(x) + 1, backend="aot_eager")(torch.ones(3))
    taken = sum(compilation_time_metrics["_compile.compile_inner"]) - before
    assert sum(exclusive(events).values()) == pytest.approx(taken, rel=0.2)
    assert exclusive(events)[AOT] > 0


# --- first steps


def test_tensor_by_tensor_is_adamw() -> None:
    work = Work("small", [(5, 3), (7,)])
    params, plain = work.parameters(CPU), work.parameters(CPU)
    with torch.compiler.set_stance("force_eager"):
        step, optimizer = first_steps.each(params), torch.optim.AdamW(plain, **HYPER)
        for _ in range(3):
            step()
            optimizer.step()
    torch.testing.assert_close(params, plain, rtol=1e-6, atol=1e-8)


def timed(way: str, count: int, first: float, later: float, **more: Any) -> dict[str, Any]:
    times = {"first": series([first], "wall"), "later": series([later], "wall")}
    return {"way": way, "count": count, "device": "cuda", "clock": "wall", "phases": None, **times, **more}


def test_a_first_step_has_paid_when_the_rival_took_longer() -> None:
    cold = timed(COLD, 10, 7.0, 1000.0)
    assert first_call.paid_after(cold, timed(FOREACH, 10, 1.0, 3000.0)) == 3001  # 6 s, 2 ms a step
    assert first_call.paid_after(cold, timed(FUSED, 10, 1.0, 900.0)) == "never"
    assert first_call.paid_after(cold, timed(FUSED, 10, 8.0, 900.0)) == 1
    assert first_call.paid_after(cold, None) is None


@pytest.mark.long
def test_a_cold_step_leaves_what_a_warm_and_a_portable_one_take(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    with empty_caches() as caches:
        processes = ((COLD, caches), (WARM, caches), (PORTABLE, None))
        kept = str(tmp_path / "artifacts")
        found = [fresh(first_step, "cpu", way, 1, kept, limit=100, caches=folder) for way, folder in processes]
    assert [one.ended for one in found] == [None] * 3
    cold, warm, portable = (one.row["phases"] for one in found)
    assert warm[BUILD] < cold[BUILD]
    assert max(warm[GRAPH], portable[GRAPH]) < cold[GRAPH]
    assert min(warm[CACHES], portable[CACHES]) > 0


# --- what compiles again


@pytest.mark.long
def test_graphs_are_those_that_dynamo_counts() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    (row,) = recompiles.changed("cpu", [(recompiles.FOREACH, recompiles.MISSING)], 3)
    assert row["by_step"][-1] == counters["stats"]["unique_graphs"] == 2
    assert row["ran"] == 3
    assert "grad" in row["reason"]


def test_a_kernel_of_ours_is_counted_when_it_is_made() -> None:
    (row,) = recompiles.changed("cpu", [(recompiles.OURS, recompiles.LR)], 3)
    assert row["by_step"] == [row["by_step"][0]] * 3
    assert row["by_step"][0] >= 1


def test_a_way_that_torch_refuses_says_why() -> None:
    (row,) = recompiles.changed("cpu", [("foreach, lr a tensor", recompiles.LR)], 2)
    assert "lr as a Tensor is not supported" in row["ended"]
    assert recompiles.derive(Rows([row]))[0].get("again") is None


# --- optimizers of one's own


@pytest.mark.parametrize("update", [kernels.lion, kernels.lion_loop])
def test_lion_is_ours_in_every_form(update: kernels.Update) -> None:
    three, right = kernels.lists(3, CPU), kernels.lists(3, CPU)
    step = kernels.built(kernels.RULE, right)
    for _ in range(2):
        update(*three)
        step()
    torch.testing.assert_close(three[0], right[0], rtol=0, atol=1e-3 * kernels.LR)


# --- coverage


def test_the_classes_are_those_of_torch() -> None:
    assert {"AdamW", "LBFGS", "SGD", "SparseAdam"} <= set(coverage.names())
    assert "Optimizer" not in coverage.names()
    assert coverage.capability(CPU)["least"] == 7


@pytest.mark.long
def test_a_break_on_purpose_is_told_from_others() -> None:
    (row,) = coverage.covered(["Adafactor"])
    assert (row["graphs"], row["deliberate"]) == (0, 0)
    assert "item()" in row["why"]
    assert coverage.why("Call to `torch._dynamo.graph_break()`\n  Developer debug context: x") == coverage.DELIBERATE
    assert coverage.why("Skip\n  Developer debug context: <function step at 0x7f>\n more") == "Skip (<function step)"


# --- code


TRITON = """
triton_for_fused_0 = async_compile.triton('triton_for_fused_0', '''
def triton_for_fused_0(in_ptr0, out_ptr0):
    tmp0 = tl.load(in_ptr0 + (x0), None)
    tmp1 = -0.001
    tmp2 = tmp0 * tmp1
    tl.store(out_ptr0 + (x0), tmp2, None)
''', device_str='cuda')

def call(args):
        triton_for_fused_0.run(arg0_1, arg1_1, stream=stream0)
        arg1_1.copy_(buf0)
"""


def test_code_is_counted() -> None:
    counts = {name: len(re.findall(pattern, TRITON, re.MULTILINE)) for name, pattern in generated.PATTERNS.items()}
    assert counts == {"kernels": 1, "loads": 1, "stores": 1, "intermediates": 3}
    kernel = generated.KERNEL.search(TRITON)
    assert kernel is not None
    assert kernel[0].splitlines()[0] == "def triton_for_fused_0(in_ptr0, out_ptr0):"
    assert "tl.store" in kernel[0].splitlines()[-1]
