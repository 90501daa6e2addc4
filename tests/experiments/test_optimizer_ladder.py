"""The ladder of optimizers: what it counts and weighs, and contenders that fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ladder_rows import CPU, clocks, quick_run
from paths import ROOT
from stand_ins import raising

from experiments.harness.rows import Rows
from experiments.ladder import alignment, trucks
from experiments.works import contenders, lines, weight
from experiments.works.batching import Limits
from experiments.works.contenders import FOREACH, FUSED, OURS
from experiments.works.models import HYPER, Work
from experiments.works.reference import Bound
from experiments.works.rungs import OPERATIONS, STRUCT, by_value

#: 4 KB and 32 KB of arguments, as torch 2.11 and a later one built for CUDA 13 have them.
SMALL = Limits((110, 64, 48, 36, 30), (320,) * 5, (96, 64, 48, 36, 30), 65536)
ADAMW = OPERATIONS[-1]
BROKEN = raising(TypeError("no such argument"))


# --- counts


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


def test_a_bridge_too_small_for_the_allocator_is_compared_with_what_was_asked_for() -> None:
    about = {"key": "bytes cost", "way": FOREACH, "numel": 512 << 20, "passes": False, **clocks(2.0)}
    small = [{**about, "size": size, "trips": 512 // size, "extra": size << 14, "bridge": 1 << 20}
             for size in (1, 64, 128)]  # fmt: skip
    assert [row["passes"] for row in trucks.derive(Rows(small))] == [True, True, False]
    (large,) = trucks.derive(Rows([small[0] | {"bridge": 300 << 20}]))
    assert large["passes"] is False


# --- alignment and effort


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
