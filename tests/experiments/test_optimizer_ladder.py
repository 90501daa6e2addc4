"""The ladder of optimizers: a real run of toys, what it counts and weighs, and what is made of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import judged, regenerated, run_quick
from ladder_rows import CPU, clocks, quick_run, verdicts
from paths import ROOT
from stand_ins import raising

from experiments.harness.panels import spaced
from experiments.harness.rows import Rows
from experiments.ladder import alignment, counts, effort, pareto, trucks
from experiments.works import contenders, lines, weight
from experiments.works.batching import Limits
from experiments.works.contenders import COMPILED, COPY, FOREACH, FUSED, LOOP, OURS, TRITON
from experiments.works.models import HYPER, Work
from experiments.works.reference import Bound
from experiments.works.rungs import DEFAULT, LIST, OPERATIONS, STRUCT, by_value

#: 4 KB and 32 KB of arguments, as torch 2.11 and a later one built for CUDA 13 have them.
SMALL = Limits((110, 64, 48, 36, 30), (320,) * 5, (96, 64, 48, 36, 30), 65536)
LARGE = Limits((770, 448, 336, 252, 210), (2240,) * 5, (672, 448, 336, 252, 210), 65536)
ADAMW = OPERATIONS[-1]
BROKEN = raising(TypeError("no such argument"))


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    plots = ["pareto-gpt2", "trucks"]
    found = run_quick("optimizer_ladder", tmp_path, plots=plots)
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["counts", "trucks", "pareto", "alignment", "effort"]
    seen = {(row["operation"], row["rung"], row["count"]): row["operators"] for row in parts["counts"]}
    assert [seen[name, LOOP, 37] for name in ("add", "SGD", "SGD with momentum", "AdamW")] == [37, 37, 111, 333]
    assert [seen["AdamW", rung, 37] for rung in (FOREACH, FUSED, LIST)] == [9, 2, 0]
    assert {row["trips"] for row in parts["trucks"]} == {8, 1}
    extra = {(row["way"], row["size"]): row["extra"] for row in parts["trucks"].where(key="bytes cost")}
    assert extra[FOREACH, 8] == pytest.approx(8 * 64 * 64 * 4, rel=0.001)
    assert extra[OURS, 8] == 0
    assert {row["case"] for row in parts["pareto"]} == set(pareto.TOYS)
    assert {row["aligned"] for row in parts["alignment"].where(where=alignment.OFF)} == {0}
    assert {row["case"] for row in parts["effort"]} == set(effort.WRITTEN)
    met = {verdict["work"]: verdict["met"] for verdict in found["verdicts"]}
    assert met["the loop launches M x N, off by"] is True
    assert met["foreach's extra is one intermediate of its group, off by"] is True


def test_the_note_and_its_verdicts_come_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("optimizer_ladder", "nvidia-h200") == 14
    regenerated("optimizer_ladder", tmp_path, monkeypatch)


# --- counts


@pytest.mark.parametrize(
    ("rung", "limits", "kernels"),
    [
        (LOOP, SMALL, 8000),
        (FOREACH, SMALL, 115),
        (FOREACH, LARGE, 20),
        (DEFAULT, SMALL, 115),
        (FUSED, SMALL, 38),
        (FUSED, LARGE, 6),
        (LIST, SMALL, 1),
        (COMPILED, SMALL, None),
    ],
)
def test_what_a_thousand_tensors_must_launch(rung: str, limits: Limits, kernels: int | None) -> None:
    assert ADAMW.expected(rung, [6] * 1000, limits) == kernels


def test_ours_in_structs_takes_as_many_launches_as_its_rows_ask_for() -> None:
    rows = (4096 - 32) // 8 // 6  # of six words, a few of which the scalars take
    assert by_value(ADAMW.rule, [6] * (rows - 5)) == 1
    assert by_value(ADAMW.rule, [6] * (2 * rows)) > 2
    assert ADAMW.expected(STRUCT, [6] * 1000, SMALL) == by_value(ADAMW.rule, [6] * 1000) == 13


def test_structs_are_cut_as_an_h200_was_seen_to_launch_them() -> None:
    """Of rules whose table has not changed since: their numbers of hyperparameters are in it."""
    kept = json.loads((ROOT / "experiments/results/optimizer_ladder-nvidia-h200.json").read_text())
    seen = Rows(kept["parts"]["counts"]["rows"]).where(rung=STRUCT)
    rules = {one.name: one.rule for one in OPERATIONS if one.name in ("add", "SGD", "SGD with momentum")}
    found = [by_value(rules[row["operation"]], [6] * row["count"]) for row in seen if row["operation"] in rules]
    assert found == [row["launches"] for row in seen if row["operation"] in rules]
    assert max(found) == 11


def counted_row(
    rung: str, count: int, kernels: int, expected: int | None, launches: int | None = None
) -> dict[str, Any]:
    return {"what": "count", "operation": "AdamW", "rung": rung, "count": count, "device": "cuda", "operators": 9,
            "kernels": kernels, "launches": launches or kernels, "expected": expected, "ended": None}  # fmt: skip


def test_a_kernel_too_many_misses_the_bar() -> None:
    right = [counted_row(LOOP, n, 8 * n, 8 * n) for n in (1, 10, 100)] + [counted_row(LIST, 100, 1, 1)]
    assert set(verdicts("counts", Rows(right)).values()) == {True, None}
    wrong = verdicts("counts", Rows([*right, counted_row(LOOP, 5, 41, 40), counted_row(LIST, 5, 2, 1)]))
    assert (wrong["the loop launches M x N, off by"], wrong["launches of ours, at any N"]) == (False, False)


def test_the_slope_of_the_loop_is_m() -> None:
    found = counts.derive(Rows([counted_row(LOOP, n, 8 * n + 2, None) for n in (1, 10, 100)])).where(what="line")
    assert (found[0]["a"], found[0]["b"], found[0]["farthest"]) == (2, 8, 0)


def test_a_count_that_is_not_what_it_should_be_is_shown() -> None:
    one, graph = counted_row(FOREACH, 10, 9, 8), counted_row("graph", 10, 2, None, launches=1)
    broken = {**one, "count": 11, "kernels": None, "ended": "ended with 1: a\nno room"}
    assert [counts.shown(row) for row in counts.derive(Rows([one, broken, graph]))] == [
        "9 (not 8)",
        "no room",
        "2 in 1",
    ]


def test_which_rung_torch_takes_by_itself() -> None:
    rows = [counted_row(DEFAULT, 10, 8, 8), counted_row(FOREACH, 10, 8, 8), counted_row(LOOP, 10, 80, 80)]
    said = counts.default(counts.derive(Rows(rows)))
    assert said is not None
    assert "as torch foreach does" in said


# --- memory


def test_the_peak_is_of_what_is_held_at_once() -> None:
    def event(at: float, nbytes: int) -> dict[str, Any]:
        return {"name": "[memory]", "ts": at, "args": {"Bytes": nbytes}}

    assert weight.peak([event(3, 50), event(1, 100), event(2, -100), {"name": "add"}, event(4, 60)]) == 110


def test_a_gpu_is_weighed_by_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an allocator that hands out 512 bytes for 4; tests/gpu weighs with the real one."""
    device = torch.device("cuda", 0)
    held = {"asked": 1000, "given": 1024, "peak": 1000, "gone": 2000, "reserved": 2000}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (9000 - held["gone"], 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: held["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: held["given"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: held["given"] + 512)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(
        torch.cuda, "memory_stats",
        lambda *_: {"requested_bytes.all.current": held["asked"], "requested_bytes.all.peak": held["peak"]},
    )  # fmt: skip
    scales = weight.Scales(device)
    held |= {"asked": 1004, "given": 1536, "gone": 5000, "reserved": 4000}
    assert scales.since() == {"taken": 4, "rounding": 508, "others": 1000}
    assert weight.extra(lambda: held.update(peak=1104), device) == 100


def test_an_allocation_of_a_step_is_seen() -> None:
    values = [torch.ones(1000) for _ in range(4)]
    assert weight.extra(lambda: [v.exp() for v in values], CPU) == 16000
    assert weight.extra(lambda: torch._foreach_exp_(values), CPU) < 100


def test_the_high_water_mark_is_that_of_a_call() -> None:
    torch.ones(16 << 20).exp()  # 128 MiB that were there before
    before = weight.high_water(reset=True)
    torch.ones(8 << 20)
    after = weight.high_water()
    if before is None or after is None:
        pytest.skip("this system has no /proc/self/clear_refs")
    assert 30 << 20 < after - before < 40 << 20


@pytest.mark.parametrize("way", trucks.WAYS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_step_in_groups_is_a_step(way: str, size: int) -> None:
    work = Work("small", [(5, 3)] * 8)
    lists, whole = trucks.lists_of(work, CPU), work.parameters(CPU)
    step, optimizer = trucks.WAYS[way](lists, size), torch.optim.AdamW(whole, **HYPER)
    for _ in range(2):
        step()
        optimizer.step()
    assert len(trucks.groups(lists, size)) == -(-8 // size)
    torch.testing.assert_close(lists[0], [p.detach() for p in whole])


def truck(way: str, size: int, passes: bool, extra: int, gpu: float | None = 1.0) -> dict[str, Any]:
    return {"key": "bytes cost", "work": "512 x 1024²", "device": "cuda", "numel": 512 << 20, "way": way, "size": size,
            "trips": 512 // size, "extra": extra, "bridge": 1 << 28, "passes": passes, **clocks(2.0, gpu)}  # fmt: skip


def test_the_bridge_says_who_passes() -> None:
    rows = [truck(FOREACH, 1, True, 4 << 20), truck(FOREACH, 512, False, 2 << 30), truck(OURS, 512, True, 0)]
    said = trucks.bridge(Rows(rows))
    assert said is not None
    assert "torch foreach passes with 1 of 512 (512 trips)" in said
    assert "PagedAdamW passes with 512 of 512 (1 trips)" in said
    assert set(verdicts("trucks", Rows(rows)).values()) == {True}
    greedy = Rows(
        [truck(FOREACH, 512, False, 3 << 30), truck(OURS, 1, True, 2 << 20), truck(OURS, 512, False, 2 << 20)]
    )
    assert list(verdicts("trucks", greedy).values()) == [True, False, False, False]
    assert trucks.largest(greedy.where(way=OURS, size=512), OURS) == 0, "nothing passes: the bar is missed"
    assert trucks.largest(greedy.where(way=FOREACH), OURS) is None, "ours was not measured"


def test_trucks_of_one_work_are_compared_by_one_clock() -> None:
    rows = [truck(way, size, True, 0) for way in (FOREACH, OURS) for size in (1, 512)]
    light = {**truck(FOREACH, 1, True, 0), "key": "trips cost"}
    found = trucks.derive(Rows([*rows, truck(FUSED, 1, True, 0, gpu=None), light]))
    times = {(row["key"], row["time"]["median"], row["time"]["clock"], row["clock"]) for row in found}
    assert times == {("bytes cost", 2.0, "wall", "wall"), ("trips cost", 1.0, "GPU", "GPU")}


def test_a_bridge_too_small_for_the_allocator_is_compared_with_what_was_asked_for() -> None:
    small = [truck(FOREACH, size, False, size << 14) | {"bridge": 1 << 20} for size in (1, 64, 128)]
    assert [row["passes"] for row in trucks.derive(Rows(small))] == [True, True, False]
    (large,) = trucks.derive(Rows([truck(FOREACH, 1, False, 1 << 14) | {"bridge": 300 << 20}]))
    assert large["passes"] is False


def test_a_way_that_fails_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trucks, "WAYS", {FOREACH: BROKEN, FUSED: trucks.WAYS[FUSED]})
    run = quick_run()
    assert {row["way"] for row in trucks.measure(run)} == {FUSED}
    assert [line for line in run.left_out if "no such argument" in line]


# --- alignment and effort


def test_an_optimizer_that_fails_off_16_bytes_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contenders.CONTENDERS, FOREACH, contenders.Contender(FOREACH, BROKEN))
    run = quick_run()
    found = alignment.derive(Rows(alignment.measure(run)))
    assert {row["optimizer"] for row in found} == {OURS, FUSED, COPY}
    assert len([line for line in run.left_out if "no such argument" in line]) == len(alignment.PLACES)
    assert {row["clock"] for row in found} == {"wall"}


def test_a_step_off_16_bytes_that_takes_long_misses_the_bar() -> None:
    def row(where: str, gpu: float, aligned: float) -> dict[str, Any]:
        return {"device": "cuda", "optimizer": OURS, "where": where, "aligned": aligned, **clocks(200, gpu)}

    on = row(alignment.ON, 100, 1)
    assert list(verdicts("alignment", Rows([on, row(alignment.OFF, 110, 0)])).values()) == [True, True]
    assert list(verdicts("alignment", Rows([on, row(alignment.OFF, 120, 0.5)])).values()) == [False, False]


def test_what_is_off_is_off_and_steps_alike() -> None:
    work = Work("small", [(5, 3), (70,)])
    for what in ((), (alignment.PARAMS, alignment.GRADS), (alignment.PARAMS, alignment.GRADS, alignment.STATE)):
        params, plain = work.parameters(CPU), work.parameters(CPU)
        found = alignment.off_16(FUSED, what)(params)
        contenders.CONTENDERS[FUSED].build(plain).step()
        assert alignment.aligned(found) == 1 - len(what) / 4 - (alignment.STATE in what) / 4  # two moments
        assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


def test_any_failure_of_a_rival_leaves_a_line() -> None:
    run, work = quick_run(), Work("small", [(5, 3)])
    cases, _ = contenders.checked(run, work, {FOREACH: BROKEN, FUSED: contenders.theirs(fused=True)}, CPU)
    assert [case.name for case in cases] == [FUSED]
    assert run.left_out == ["small, torch foreach: TypeError: no such argument"]
    with pytest.raises(TypeError):
        contenders.checked(run, work, {OURS: BROKEN}, CPU)


def test_an_update_that_is_wrong_is_said_and_ours_ends_the_question() -> None:
    run, work = quick_run(), Work("small", [(5, 3)])
    cases, errors = contenders.checked(run, work, {FUSED: lambda _: Bound(lambda: None)}, CPU)
    assert (len(cases), errors[FUSED]) == (1, 1.0)
    assert "its update is off by 1 of itself" in run.left_out[0]
    with pytest.raises(AssertionError, match="off by 1 of itself"):
        contenders.checked(run, work, {f"{OURS}, device": lambda _: Bound(lambda: None)}, CPU)


def test_a_compiled_rung_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = contenders.Contender(COMPILED, raising(RuntimeError("no compiler")))
    monkeypatch.setitem(contenders.CONTENDERS, COMPILED, broken)
    monkeypatch.setattr(effort, "work", lambda run: Work("small", [(5, 3)]))
    with pytest.raises(RuntimeError, match="no compiler"):
        list(effort.compiled_share("cpu"))


def test_lines_are_those_of_code() -> None:
    text = '''"""A module."""

# a remark
@decorated
def one(a):
    """Says
    much."""
    b = [  # spread
        a,
    ]

    return b


def two(): return "a string"
'''
    assert lines.of_python(text) == 7
    assert lines.of_python(text, ["one"]) == 6
    assert lines.of_python(text, ["two"]) == 1
    assert lines.of_python(f"{text}\n\nclass Three:\n    four = 4\n", ["two", "Three"]) == 3
    with pytest.raises(ValueError, match="three"):
        lines.of_python(text, ["three"])
    assert lines.of_cuda("/* all\nof it */ int a; // b\n\n// c\nint d;\n") == 2


def test_the_host_half_of_the_triton_rung_counts() -> None:
    """Somebody has to make the table and launch, as torch.optim and PagedAdamW do beneath their rules."""
    row = effort.WRITTEN[TRITON].as_row()
    kernels = lines.of_python(effort.TRITON_TABLE.read_text(), ["update", "adamw_over_a_table"])
    assert row["lines"] > kernels + 25


def test_a_shorter_rung_that_is_as_close_to_a_copy_misses_the_bar() -> None:
    def rung(case: str, count: int, gpu: float, alone: bool) -> dict[str, Any]:
        times = {**clocks(2 * gpu, gpu), "copy": clocks(95, 90)}
        return {"case": case, "device": "cuda", "lines": count, "alone": alone, **times}

    ours = [rung(OURS, 50, 100, False), rung(effort.ALONE, 18, 100, True)]
    slow, long = rung(LOOP, 10, 900, False), rung("Triton over our table", 38, 95, True)
    assert list(verdicts("effort", Rows([*ours, slow, long])).values()) == [True]
    assert list(verdicts("effort", Rows([*ours, slow, rung(FUSED, 40, 100, False)])).values()) == [False]


def test_lines_beneath_stand_beside_those_that_are_written() -> None:
    def rung(case: str, beneath: int | None) -> dict[str, Any]:
        about = {"work": "toys", "device": "cuda", "alone": case == effort.ALONE, "lines": 50}
        return {**about, "case": case, "beneath": beneath, "python": 50, "cuda": 0, **clocks(200, 100), "copy": None}

    found = effort.derive(Rows([rung(LOOP, None), rung(OURS, 12290), rung(effort.ALONE, None)]))
    ((_, headings, lines),) = effort.TABLES[0].shown(found)
    assert headings[:3] == ("rung", "lines", "beneath, once")
    assert [line[2] for line in lines] == ["-", "12,290", "12,290"], "whoever counts AdamW alone stands on as much"
    names = [row[effort.PANELS[0].each] for row in found]
    assert names == [LOOP, "PagedAdamW (12,290 beneath)", "PagedAdamW, AdamW alone (12,290 beneath)"]


def test_names_beside_a_plot_do_not_lie_on_each_other() -> None:
    assert spaced([0.1, 0.11, 0.9], 0.1) == pytest.approx([0.1, 0.2, 0.9])
    assert spaced([0.95, 0.97, 0.99], 0.1) == pytest.approx([0.8, 0.9, 1.0])
