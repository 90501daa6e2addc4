"""Vertical fusion: the witnesses of bytes, what the assembler spills, and what is made of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import nvrtc_support
import pytest
import torch
from ladder_rows import clocks, quick_run
from paths import ROOT

from experiments.harness.rows import Row, Rows
from experiments.vertical import rewrite, roofline, spill, traffic
from experiments.works import fusible, witnesses
from experiments.works.contenders import COPY
from experiments.works.dispatch import operands
from experiments.works.fusible import EAGER, RULE, RULES, TWICE
from experiments.works.registers import registers
from pagedopt.rules import RULES as SHIPPED

# --- bytes by operands


@pytest.mark.parametrize(
    ("accesses", "run"),
    [
        (2, lambda x: x * x),  # one operand, given twice
        (3, lambda x: torch.add(x, torch.empty_like(x))),
        (3, lambda x: x.add_(torch.empty_like(x))),  # reads both, writes one
        (2, lambda x: x.mul_(2)),
        (1, lambda x: x.fill_(2)),
        (2, lambda x: torch.exp(x, out=torch.empty_like(x))),  # what it overwrites it does not read
        (2, lambda x: torch.empty_like(x).copy_(x)),
        (1 + 1 / 64, lambda x: x.view(64, 64).sum(1)),
        (2 + 1 / 64, lambda x: x.view(64, 64) + torch.empty(64, 1).expand(64, 64)),  # a column, read once
        (0, lambda x: x.view(64, 64)),
        (2, lambda x: torch._foreach_mul_([x[:2048], x[2048:]], 2)),
    ],
)
def test_an_operator_moves_what_it_reads_and_writes(accesses: float, run: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(4096)
    assert operands(lambda: run(x)) == accesses * x.nbytes


def test_what_ours_must_move_is_what_its_rules_read_and_write() -> None:
    for rule, each in ((SHIPPED["adamw"], 28), (fusible.square, 8), (fusible.square_of_square, 8)):
        assert 4 * (len(rule.reads) + len(rule.writes)) == each


# --- bytes by others

#: As ``ncu --csv --page raw --print-units base`` writes it: its own lines, headings, units, a line per kernel.
REPORT = [
    "==PROF== Connected to process 7",
    '"ID","Process ID","Kernel Name","dram__bytes_read.sum","lts__t_sectors_srcunit_tex_op_write.sum"',
    '"","","","byte","sector"',
    '"0","7","spin_kernel(long)","0","0"',
    '"1","7","void first<float>(T1, int)","1,073,741,824","33,554,432"',
    '"2","7","at::cuda::<unnamed>::spin_kernel(long)","0","1"',
    '"3","7","second","100","4"',
    '"4","7","third","200","2"',
    "==PROF== Disconnected from process 7",
]


def test_what_left_the_processors_counts_as_written() -> None:
    assert witnesses.counts(REPORT, ["one", "two"]) == {
        "one": {"ncu": 2 << 30, "ncu_read": 1 << 30},
        "two": {"ncu": 300 + 6 * 32, "ncu_read": 300},
    }


def test_counters_that_may_not_be_read_are_an_error_in_their_words() -> None:
    refused = ["==PROF== Connected", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"]
    with pytest.raises(RuntimeError, match=r"1 ways were called, 0 have their mark. ==ERROR== ERR_NVGPUCTRPERM"):
        witnesses.counts(refused, ["one"])


@pytest.mark.long
def test_ways_are_called_in_the_process_that_is_watched() -> None:
    """Without ncu, and without a GPU: each fails there, and the process goes on to its end."""
    command = [sys.executable, "-P", "-c", witnesses.BOOT, str(ROOT), rewrite.__name__, "cpu", "quick"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.stdout.splitlines() == [witnesses.DONE], done.stderr


@pytest.mark.long
def test_inductor_counts_what_it_fuses() -> None:
    """It takes a C++ compiler, as on a machine that runs the experiment."""
    x = torch.rand(1 << 16)
    torch._dynamo.reset()
    with witnesses.inductor() as found:
        torch.compile(fusible.again, dynamic=False)(x)
    assert found == {"bytes": 2 * x.nbytes, "kernels": 1}


# --- registers


def test_the_assembler_says_what_it_spills_however_often_it_is_asked() -> None:
    nvrtc_support.nvrtc()

    def said(width: int, threads: int) -> Row:
        return registers(spill.TEXT, "fused", "sm_90", *spill.defines(width, threads))

    few, many, again, alone = said(8, 1024), said(128, 1024), said(128, 1024), said(128, 256)
    assert (few["spill_stores"], few["spill_loads"], few["stack"]) == (0, 0, 0)
    assert {**many, "compile_ms": None} == {**again, "compile_ms": None}
    assert many["registers"] == 65536 // 1024
    assert min(many["spill_stores"], many["spill_loads"]) > 0
    assert alone["registers"] > 128
    assert alone["spill_stores"] == 0
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_COMPILATION"):
        registers("no text", "fused", "sm_90")
    with pytest.raises(RuntimeError, match="of 'another' it says: "):
        registers(spill.TEXT, "another", "sm_90", *spill.defines(8, 256))


# --- traffic


def test_a_way_that_is_wrong_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusible, "square_of_square", fusible.square)
    monkeypatch.setattr(traffic, "WORKS", {TWICE: fusible.WORKS[TWICE]})
    run = quick_run()
    assert [row["case"] for row in traffic.measure(run)] == [COPY, EAGER, RULES]
    assert any(line.startswith(f"{TWICE}, {RULE}: AssertionError") for line in run.left_out)


# --- roofline


@pytest.mark.parametrize(("rule", "count"), [("sgd", 4), ("adamw", 15)])
def test_operations_of_a_rule_are_those_of_its_text(rule: str, count: int) -> None:
    """SGD: p - lr * (g + decay * p).  AdamW: two of a difference and a lerp's fma, and so on, counted by hand."""
    assert roofline.operations(SHIPPED[rule]) == count


# --- spills


def held(width: int, stack: int, fused: float | None, passes: float = 3.0) -> dict[str, Any]:
    times = {spill.FUSED: clocks(fused, fused), spill.PASSES: clocks(passes, passes)} if fused else dict.fromkeys(
        (spill.FUSED, spill.PASSES))  # fmt: skip
    return {"width": width, "threads": 1024, "block": "1,024 threads", "arch": "sm_90", "registers": 64,
            "stack": stack, "spill_stores": stack, "spill_loads": 2 * stack, "compile_ms": None, **times}  # fmt: skip


def test_rules_that_choose_are_judged_by_the_better_way() -> None:
    rows = spill.derive(Rows([held(8, 0, 2.0), held(64, 16, 2.5), held(320, 800, 6.0)]))
    assert {name: (wrong, round(worst, 3)) for name, (wrong, worst) in spill.judged(rows).items()} == {
        "always": (1, 2.0),
        "if nothing is spilled": (1, 1.2),
        "if fewer than 8 words of local memory are used (Inductor)": (0, 1.0),
        "up to 64 values (Inductor's max_fusion_size is 64 operations)": (0, 1.0),
    }


# --- rewriting


def test_attention_with_a_term_is_what_its_formula_says() -> None:
    q, k, v = (torch.rand(1, 1, 16, rewrite.DIM, dtype=torch.float64) for _ in "qkv")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(rewrite.attention(q, k, v, False), plain)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8
    capped = torch.softmax(20 * torch.tanh(scores / 20), -1)
    torch.testing.assert_close(rewrite.attention(q, k, v, True), capped @ v)
