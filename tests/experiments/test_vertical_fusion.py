"""Vertical fusion: a real run of toys, the witnesses of bytes, what is made of rows, and bars that can be missed."""

from __future__ import annotations

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
from experiments.harness.rows import Rows
from experiments.lecture.readings import spilling
from experiments.vertical import rewrite, roofline, spill, traffic
from experiments.works import fusible, registers, witnesses
from experiments.works.contenders import CONTENDERS, COPY, FOREACH, FUSED, LOOP, OURS
from experiments.works.dispatch import operands
from experiments.works.fusible import ADAMW, BY_COMPILER, EAGER, NORM, ONCE, RULE, RULES, TWICE
from experiments.works.models import Work
from pagedopt.rules import RULES as SHIPPED


def verdicts(question: str, rows: Rows) -> dict[str, bool | None]:
    (asked,) = (q for q in experiment("vertical_fusion").questions if q.name == question)
    return {bar.title: bar.verdict(asked.derive(rows)).met for bar in asked.listed("BARS")}


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    nvrtc_support.nvrtc()
    found = run_quick("vertical_fusion", tmp_path, plots=["roofline", "spill", "square"])
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["traffic", "roofline", "spill", "rewrite"]
    seen = {(row["work"], row["case"]): row["model"] / row["numel"] for row in parts["traffic"]}
    assert (seen[TWICE, EAGER], seen[TWICE, RULE], seen[TWICE, RULES]) == (16, 8, 16)
    assert seen[NORM, EAGER] == pytest.approx(16, rel=0.01)
    assert [round(seen[ADAMW, rung]) for rung in (LOOP, FOREACH, FUSED, OURS)] == [80, 80, 28, 28]
    assert {row["case"] for row in parts["roofline"].where(what="chain")} == {roofline.EAGER, roofline.FUSED}
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
    assert judged("vertical_fusion", "cpu") == 18
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
HEADINGS = '"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum",'
REPORT = [
    "==PROF== Connected to process 7",
    HEADINGS + '"lts__t_sectors_srcunit_tex_op_write.sum"',
    '"","","","byte","byte","sector"',
    '"0","7","spin_kernel(long)","0","32","0"',
    '"1","7","void first<float>(T1, int)","1,073,741,824","1,040,000,000","33,554,432"',
    '"2","7","at::cuda::<unnamed>::spin_kernel(long)","0","0","1"',
    '"3","7","second","100","10","4"',
    '"4","7","third","200","n/a","2"',
    "==PROF== Disconnected from process 7",
]


def test_what_left_the_processors_counts_as_written() -> None:
    found = witnesses.counts("\n".join(REPORT), ["one", "two"])
    assert found["one"] == {
        "bytes": 2 << 30,
        "read": 1 << 30,
        "written": 1 << 30,
        "in_dram": 1_040_000_000,
        "kernels": 1,
    }
    assert found["two"] == {"bytes": 300 + 6 * 32, "read": 300, "written": 6 * 32, "in_dram": None, "kernels": 2}


def test_without_sectors_the_bytes_of_dram_are_what_there_is() -> None:
    lines = [HEADINGS.rstrip(","), '"0","7","spin_kernel","0","0"', '"1","7","first","100","90"']
    assert witnesses.counts("\n".join(lines), ["one"])["one"]["bytes"] == 190


def test_counters_that_may_not_be_read_are_an_error_in_their_words() -> None:
    refused = (
        "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n==PROF== Disconnected"
    )
    with pytest.raises(RuntimeError, match="hardware counters: ==ERROR== ERR_NVGPUCTRPERM"):
        witnesses.counts(refused, [])
    with pytest.raises(RuntimeError, match="it said nothing"):
        witnesses.counts("", [])
    with pytest.raises(RuntimeError, match="1 works were counted, 2 have their mark"):
        witnesses.counts("\n".join(REPORT), ["one"])


def test_without_ncu_a_line_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = quick_run()
    assert witnesses.of_hardware(run, traffic.works, True) == {}
    monkeypatch.setattr(witnesses.shutil, "which", lambda _: None)
    monkeypatch.setattr(witnesses, "NCU", "/nowhere/ncu")
    run.device = torch.device("cuda", 0)
    assert witnesses.of_hardware(run, traffic.works, True) == {}
    assert run.left_out == ["hardware counters: need a GPU", "hardware counters: ncu is not here"]


@pytest.mark.long
def test_works_run_in_the_process_that_is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a stand-in for ncu, which starts the process and counts no kernel; without a GPU every work fails there."""
    ncu = tmp_path / "ncu"
    ncu.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "at = sys.argv.index(sys.executable)\n"
        "open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write('\"ID\",\"Kernel Name\"')\n"
        "subprocess.run(sys.argv[at:])\n"
    )
    ncu.chmod(0o755)
    monkeypatch.setattr(witnesses.shutil, "which", lambda _: str(ncu))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, failed = witnesses.hardware(rewrite.works, "cpu", True)
    assert found == {}
    said = [line.partition(": ")[0] for line in failed]
    assert said[0] == f"{rewrite.SOFTMAX}, {rewrite.EAGER}"
    assert len(said) == sum(len(make(CPU, True)[1]) for make in rewrite.WORKS.values())
    _, failed = witnesses.hardware(rewrite.works, "no such device")
    (early,) = failed
    assert early.startswith("works behind the first: the process ended: ")


@pytest.mark.long
def test_a_process_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    inner = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with pytest.raises(RuntimeError, match=r"ncu has not ended in 0\.5 s"):
        witnesses.ended([sys.executable, "-c", outer], 0.5)
    subprocess.run([sys.executable, "-c", "import time; time.sleep(2.5)"], check=True)
    assert not mark.exists()
    assert witnesses.ended([sys.executable, "-c", "print('counted: x')"], 30) == "counted: x\n"


@pytest.mark.long
def test_inductor_counts_what_it_fuses() -> None:
    """It takes a C++ compiler, as on a machine that runs the experiment."""
    x = torch.rand(1 << 16)
    with witnesses.inductor() as found:
        torch.compile(fusible.again, dynamic=False)(x)
    assert found == {"bytes": 2 * x.nbytes, "kernels": 1}


# --- registers


def test_the_assembler_says_what_it_spills() -> None:
    nvrtc_support.nvrtc()
    cubin, few = spill.assembled(8, 1024, "sm_90")
    _, many = spill.assembled(128, 1024, "sm_90")
    _, alone = spill.assembled(128, 256, "sm_90")
    assert cubin[:4] == b"\x7fELF"
    assert all(name in cubin for name in (b"fused", b"add", b"divide"))
    assert (few["spill_stores"], few["spill_loads"], few["stack"]) == (0, 0, 0)
    assert many["registers"] == 65536 // 1024
    assert min(many["spill_stores"], many["spill_loads"]) > 0
    assert alone["registers"] > 128
    assert alone["spill_stores"] == 0
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_COMPILATION"):
        registers.compiled("no text", "fused", {}, "sm_90")


def test_a_kernel_of_which_nothing_is_said_is_an_error() -> None:
    log = "ptxas info : Compiling entry function 'add' for 'sm_90'\n 8 bytes stack frame, 4 bytes spill stores, " \
          "12 bytes spill loads\nptxas info : Used 64 registers"  # fmt: skip
    assert registers.said(log, "add") == {"registers": 64, "stack": 8, "spill_stores": 4, "spill_loads": 12}
    with pytest.raises(RuntimeError, match="nothing of 'fused'"):
        registers.said(log, "fused")


# --- traffic


def moved(work: str, case: str, each: float, due: int, gpu: float, kernels: int = 1, **more: Any) -> dict[str, Any]:
    seen = {"model": int(1000 * each), "inductor": None, "ncu": int(1000 * each), "in_dram": None, **more}
    return {"work": work, "case": case, "device": "cuda", "numel": 1000, "due": due, "kernels": kernels, **seen,
            **clocks(gpu, gpu)}  # fmt: skip


def all_moved(off: float = 1.0, slower: float = 1.0, kernels: int = 1) -> Rows:
    """On which every bar is met, unless bytes are ``off``, ours is ``slower`` or kernels are more."""
    return Rows([
        moved(ONCE, COPY, 8, 8, 1.0), moved(ONCE, EAGER, 8 * off, 8, 1.0), moved(ONCE, RULE, 8, 8, 1.01 * slower),
        moved(ONCE, BY_COMPILER, 8, 8, 1.0, kernels, model=None, inductor=int(8000 * off)),
        moved(TWICE, COPY, 8, 8, 1.0), moved(TWICE, EAGER, 16 * off, 16, 2.0, 2),
        moved(TWICE, BY_COMPILER, 8, 8, 1.0, kernels, model=None, inductor=int(8000 * off)),
        moved(TWICE, RULE, 8, 8, 1.02 * slower), moved(TWICE, RULES, 16, 16, 2.04, 2),
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


@pytest.mark.long
def test_the_fused_chain_is_the_chain() -> None:
    x = torch.rand(2500)  # more than two blocks
    y = torch.empty_like(x)
    chain = roofline.fused(CPU)
    for k in (1, 7):
        chain(x, y, k)
        exact = x.double()
        for _ in range(k):
            exact = exact + roofline.A * exact
        torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(roofline.one_by_one(x, k).double(), exact, rtol=1e-6, atol=0)


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
        {"what": "chain", **about, "case": roofline.FUSED, "k": k, "bytes": 8 * 10**9, "flop": 2 * k * 10**9,
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
    said = roofline.sentence(roofline.derive(chains(64)))
    assert said is not None
    assert "The knee lies at 16.0 operations a byte" in said


def test_without_a_chain_there_are_rates_and_no_knee() -> None:
    rows = Rows(chains(64).where(what="rate"))
    assert roofline.derive(rows).values("case") == [roofline.COPY, roofline.PRODUCT, roofline.LINK]
    assert roofline.sentence(roofline.derive(rows)) is None
    assert set(verdicts("roofline", rows).values()) == {None}


# --- spills


def held(width: int, stack: int, fused: float | None, passes: float = 3.0) -> dict[str, Any]:
    times = {spill.FUSED: clocks(fused, fused), spill.PASSES: clocks(passes, passes)} if fused else dict.fromkeys(
        (spill.FUSED, spill.PASSES))  # fmt: skip
    return {"width": width, "threads": 1024, "device": "cuda" if fused else "cpu", "arch": "sm_90", "registers": 64,
            "stack": stack, "spill_stores": stack, "spill_loads": 2 * stack, "compile_ms": None, **times}  # fmt: skip


def test_rules_that_choose_are_judged_by_the_better_way() -> None:
    rows = spill.derive(Rows([held(8, 0, 2.0), held(64, 16, 2.5), held(320, 800, 6.0)]))
    assert {name: (wrong, round(worst, 3)) for name, (wrong, worst) in spill.judged(rows).items()} == {
        "always": (1, 2.0),
        "if nothing is spilled": (1, 1.2),
        "if fewer than 8 words of local memory are used (Inductor)": (0, 1.0),
        "up to 64 values (Inductor's max_fusion_size is 64 operations)": (0, 1.0),
        "never": (2, 1.5),
    }
    said = spill.sentence(rows)
    assert "1,024 threads a block, sm_90: values are spilled from W = 64 on; fusing loses at W = [320]." in said


def test_bars_of_spills_can_be_missed() -> None:
    right = [held(8, 0, 2.0), held(64, 16, 2.9), held(320, 800, 6.0)]
    assert set(verdicts("spill", Rows(right)).values()) == {True}
    assert set(verdicts("spill", Rows([held(8, 0, 2.0), held(64, 16, 1.0)])).values()) == {False}
    assert set(verdicts("spill", Rows([held(8, 0, None)])).values()) == {None}
    assert spill.judged(spill.derive(Rows([held(8, 0, None)]))) == {}


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
        return {"work": work, "case": case, "extra": extra, "all": 1000, "moved": None, **clocks(1.0, 1.0)}

    rows = [one(rewrite.PLAIN, rewrite.COMPILED, 100), one(rewrite.TERM, rewrite.COMPILED, 2000)]
    found = rewrite.derive(Rows(rows))
    assert [row["keeps"] for row in found] == [0, 1]
    assert rewrite.sentence(found) == (
        "- attention, compiled: was rewritten.\n- attention with a term, compiled: keeps all n² scores."
    )
