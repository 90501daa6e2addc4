"""Vertical fusion: a real run of toys, the witnesses of bytes, what is made of rows, and bars that can be missed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvrtc_support
import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick
from ladder_rows import CPU, clocks, quick_run
from paths import ROOT

from experiments.harness import note
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.lecture.readings import spilling
from experiments.vertical import rewrite, roofline, spill, traffic
from experiments.works import fusible, witnesses
from experiments.works.contenders import CONTENDERS, COPY, FOREACH, FUSED, LOOP, OURS
from experiments.works.dispatch import operands
from experiments.works.fusible import ADAMW, BY_COMPILER, EAGER, JITERATOR, NORM, ONCE, RULE, RULES, TWICE
from experiments.works.models import Work
from experiments.works.registers import registers
from pagedopt.rules import RULES as SHIPPED


def verdicts(question: str, rows: Rows) -> dict[str, bool | None]:
    (asked,) = (q for q in experiment("vertical_fusion").questions if q.name == question)
    return {bar.title: bar.verdict(asked.derive(rows)).met for bar in asked.listed("BARS")}


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    nvrtc_support.nvrtc()
    found = run_quick("vertical_fusion", tmp_path, plots=["spill", "square"])
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["traffic", "spill", "rewrite"]
    seen = {(row["work"], row["case"]): row["model"] / row["unit"] for row in parts["traffic"]}
    assert (seen[TWICE, EAGER], seen[TWICE, RULE], seen[TWICE, RULES]) == (16, 8, 16)
    assert seen[NORM, EAGER] == pytest.approx(16, rel=0.01)
    assert [round(seen[ADAMW, rung]) for rung in (LOOP, FOREACH, FUSED, OURS)] == [80, 80, 28, 28]
    assert [row["width"] for row in parts["spill"] if row["spill_stores"]] == [128]
    assert {row["work"] for row in parts["rewrite"]} == set(rewrite.WORKS)
    assert any("hardware counters: need a GPU" in line for line in found["left_out"])
    met = {verdict["work"]: verdict["met"] for verdict in found["verdicts"]}
    assert met["square of square: bytes by the model, off from what they must be"] is True
    assert met["square of square: bytes by ncu, off from what they must be"] is None
    copied = tmp_path / "note.md"
    copied.write_text((ROOT / "notes" / "vertical_fusion.md").read_text())
    note.fill(copied, note.sections(found, experiment("vertical_fusion")))  # has a place for everything


def test_results_that_are_kept_give_their_note_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("vertical_fusion", "nvidia-h200") == judged("vertical_fusion", "cpu") == 18
    regenerated("vertical_fusion", tmp_path, monkeypatch)


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


@pytest.mark.parametrize(("rung", "each"), [(LOOP, 80), (FOREACH, 80), (FUSED, 28)])
def test_a_step_of_adamw_moves_what_its_operators_take(rung: str, each: int) -> None:
    """By hand: mul 8, lerp 12, mul 8, addcmul 12, sqrt, div, add 8 each, addcdiv 16; fused 4 read, 3 written."""
    work = Work("small", [(64, 64)] * 3)
    step = CONTENDERS[rung].build(work.parameters(CPU)).step
    step()
    assert operands(step) / work.numel == pytest.approx(each, rel=0.001)  # and the step counts


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


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, ncu: Path) -> Run:
    """A run that believes to have one, with a stand-in for ncu, which counts nothing."""
    run = quick_run()
    run.device = torch.device("cuda", 0)
    monkeypatch.setattr(run, "free", lambda: None)
    monkeypatch.setattr(witnesses.shutil, "which", lambda _: str(ncu))
    return run


@pytest.mark.long
def test_what_hardware_does_not_count_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_cpu = quick_run()
    assert witnesses.of_hardware(on_cpu, traffic.__name__) == {}
    assert on_cpu.left_out == ["hardware counters: need a GPU"]
    run = on_a_gpu(monkeypatch, tmp_path / "ncu")
    assert witnesses.of_hardware(run, traffic.__name__) == {}
    assert "No such file or directory" in run.left_out[0]
    (tmp_path / "ncu").write_text("#!/bin/sh\nsleep 60")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(witnesses, "SECONDS", "0.2")
    assert witnesses.of_hardware(run, traffic.__name__) == {}
    assert "ncu ended with -9" in run.left_out[1]


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


def moved(work: str, case: str, each: float, due: int, gpu: float, kernels: int = 1, **more: Any) -> dict[str, Any]:
    seen = {"model": int(1000 * each), "inductor": None, "ncu": int(1000 * each), "ncu_read": None, **more}
    return {"work": work, "case": case, "device": "cuda", "unit": 1000, "due": due, "kernels": kernels, **seen,
            **clocks(gpu, gpu)}  # fmt: skip


def all_moved(off: float = 1.0, slower: float = 1.0, kernels: int = 1) -> Rows:
    """On which bars are met, whatever jiterator moves; not if bytes are ``off``, ours ``slower`` or kernels more."""
    return Rows([
        moved(ONCE, COPY, 8, 8, 1.0), moved(ONCE, EAGER, 8 * off, 8, 1.0), moved(ONCE, RULE, 8, 8, 1.01 * slower),
        moved(ONCE, BY_COMPILER, 8, 8, 1.0, kernels, model=None, inductor=int(8000 * off)),
        moved(TWICE, COPY, 8, 8, 1.0), moved(TWICE, EAGER, 16 * off, 16, 2.0, 2),
        moved(TWICE, BY_COMPILER, 8, 8, 1.0, kernels, model=None, inductor=int(8000 * off)),
        moved(TWICE, RULE, 8, 8, 1.02 * slower), moved(TWICE, RULES, 16, 16, 2.04, 2),
        moved(TWICE, JITERATOR, 10, 8, 1.1),
        moved(NORM, COPY, 8, 8, 1.0), moved(NORM, EAGER, 16 * off, 16, 2.0),
        moved(NORM, BY_COMPILER, 8, 8, 1.0, model=None, inductor=int(8000 * off)),
        moved(ADAMW, COPY, 28, 28, 3.5), moved(ADAMW, FOREACH, 80 * off, 80, 10.0),
        moved(ADAMW, OURS, 28, 28, 3.6 * slower),
    ])  # fmt: skip


def test_bytes_that_are_off_and_times_that_are_long_miss_their_bars() -> None:
    assert set(verdicts("traffic", all_moved()).values()) == {True}
    off = verdicts("traffic", all_moved(off=1.04))
    assert {met for title, met in off.items() if "off from what they must be" in title} == {False}
    slow = verdicts("traffic", all_moved(slower=1.5))
    assert slow["one rule, of a copy"] is False
    assert slow["square of square, two rules against one"] is False
    assert slow["AdamW, ours against foreach"] is False
    assert verdicts("traffic", all_moved(slower=0.9))["square of square, two rules against one, no more than"] is False
    many = verdicts("traffic", all_moved(kernels=2))
    assert many["square and its square: kernels, off from 1 (2 of what is not fused)"] is False


def test_what_is_saved_is_of_what_was_counted() -> None:
    found = traffic.derive(all_moved(off=1.25))
    assert found.number("saved", work=NORM, case=BY_COMPILER) == pytest.approx(1 - 10 / 20)
    assert found.number("saved", work=ADAMW, case=OURS) == pytest.approx(1 - 28 / 100)
    assert found.number("faster", work=ADAMW, case=OURS) == pytest.approx(10 / 3.6)


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


def chains(free: int) -> Rows:
    """A chain that takes the time of one up to so many links, then that of its arithmetic; 1e9 elements."""
    about = {"device": "cuda", "numel": 10**9}
    rates = [
        {"what": "rate", **about, "case": name, "bytes": nbytes, "flop": flop, **clocks(1e3, 1e3)}
        for name, nbytes, flop in (
            (roofline.COPY, 8 * 10**9, 0),
            (roofline.PRODUCT, 0, 10**12),
            (roofline.LINK, 10**8, 0),
        )
    ]
    links = [
        {"what": "chain", **about, "case": roofline.FUSED, "k": k, "bytes": 0, "flop": 2 * k * 10**9,
         **clocks(t := 1e3 * max(1, k / free), t)}
        for k in roofline.LENGTHS
    ]  # fmt: skip
    return Rows(rates + links)


def test_the_knee_is_where_arithmetic_takes_the_time_of_memory() -> None:
    knee = roofline.derive(chains(64)).first(what="knee")
    assert knee is not None
    assert (knee["knee"], knee["balance"], knee["of_product"], knee["free"]) == (64, 16, 125, 64)
    assert set(verdicts("roofline", chains(64)).values()) == {True}
    assert set(verdicts("roofline", chains(8)).values()) == {False}
    assert "The knee lies at 16.0 operations a byte" in roofline.sentence(roofline.derive(chains(64)))


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
    said = spill.sentence(rows)
    assert "1,024 threads a block, sm_90: values are spilled at W = [64, 320]." in said
    assert said.count("Fusing loses") == said.count("Fusing loses at W = 320 in blocks of 1,024 threads.") == 1


def test_bars_of_spills_can_be_missed() -> None:
    right = [held(8, 0, 2.0), held(64, 16, 2.9), held(320, 800, 6.0)]
    assert set(verdicts("spill", Rows(right)).values()) == {True}
    assert set(verdicts("spill", Rows([held(8, 0, 2.0), held(64, 16, 1.0)])).values()) == {False}
    assert set(verdicts("spill", Rows([held(8, 0, None)])).values()) == {None}


def test_the_claim_of_spills_holds_only_where_a_kernel_that_spills_loses() -> None:
    for rows, holds in (([held(8, 0, 2.0), held(320, 800, 6.0)], True), ([held(8, 0, 4.0), held(320, 8, 2.0)], False)):
        found = spilling(spill.derive(Rows(rows)))
        assert found is not None
        assert found[0] is holds
        assert (found[1]["all"], found[1]["loses"], found[1]["spilled"]) == (2, 1, 1)
    assert spilling(spill.derive(Rows([held(8, 0, None)]))) is None


# --- rewriting


def test_attention_with_a_term_is_what_its_formula_says() -> None:
    q, k, v = (torch.rand(1, 1, 16, rewrite.DIM, dtype=torch.float64) for _ in "qkv")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(rewrite.attention(q, k, v, False), plain)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8
    capped = torch.softmax(20 * torch.tanh(scores / 20), -1)
    torch.testing.assert_close(rewrite.attention(q, k, v, True), capped @ v)


def test_who_keeps_all_scores_is_seen_by_the_peak() -> None:
    def one(work: str, case: str, extra: int) -> dict[str, Any]:
        return {"work": work, "case": case, "extra": extra, "unit": 1000, **clocks(1.0, 1.0)}

    rows = [one(rewrite.PLAIN, BY_COMPILER, 100), one(rewrite.TERM, BY_COMPILER, 2000)]
    assert [row["keeps"] for row in rewrite.derive(Rows(rows))] == [0, 1]
