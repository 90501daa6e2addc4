"""Time against memory: who is on the front, what is weighed, and by which clock."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ladder_rows import CPU, clocks, quick_run

from experiments.harness.rows import Rows
from experiments.ladder import pareto
from experiments.works import contenders
from experiments.works.contenders import COMPILED, CONTENDERS, FOREACH, FUSED, GRAPH, OURS
from experiments.works.models import HYPER, Work
from experiments.works.reference import Bound, Reference


def weighed(case: str, gpu: float, extra: int = 0, error: float = 1e-7, **more: Any) -> dict[str, Any]:
    return {"key": "gpt2", "work": "GPT-2", "device": "cuda", "numel": 1000, "tensors": 2, "case": case, "error": error,
            "state": 8000, "extra": extra, "others": 0, "away": 0, "rounding": 512, "bytes": 28_000, "moved": 28,
            **clocks(2 * gpu, gpu), "copy": clocks(95.0, 90.0), **more}  # fmt: skip


def verdicts(rows: Rows) -> dict[str, bool | None]:
    return {bar.title: bar.verdict(pareto.derive(rows)).met for bar in pareto.BARS}


def test_who_is_on_the_front() -> None:
    rows = Rows([
        weighed(f"{OURS}, device", 100), weighed(FUSED, 120), weighed(FOREACH, 300, 4000),
        weighed("coarse", 80, -4000, error=1e-2),
        {"key": "gpt2", "work": "GPT-2", "device": "cuda", "numel": 1000, "tensors": 2, "case": COMPILED,
         "ended": "not ended in 300 s", "process_s": 300.0},
    ])  # fmt: skip
    found = {row["case"]: row for row in pareto.derive(rows)}
    assert [name for name, row in found.items() if row["front"]] == ["coarse"]
    assert [name for name, row in found.items() if row["front_exact"]] == [f"{OURS}, device"]
    assert pareto.ended(found[COMPILED]) == "not ended in 300 s"
    assert set(verdicts(rows).values()) == {True}
    (table,) = pareto.TABLES
    assert len(next(table.shown(pareto.derive(rows)))[2]) == 5


def test_a_work_is_weighed_by_one_clock() -> None:
    rows = Rows([weighed(f"{OURS}, device", 100), weighed(FUSED, 120)])
    assert [(row["time"]["median"], round(row["share"], 6)) for row in pareto.derive(rows)] == [(100, 90), (120, 75)]
    late = pareto.derive(Rows([*rows, weighed("waits", 90) | clocks(300, None)]))
    assert [(row["time"]["median"], row["clock"]) for row in late] == [(200, "wall"), (240, "wall"), (300, "wall")]
    assert late[0]["share"] == pytest.approx(100 * 95 / 200)
    assert next(pareto.TABLES[0].shown(late))[1][1] == "ms, wall"


def test_the_share_of_the_copy_is_of_the_bytes_that_an_update_must_move() -> None:
    half, away = weighed("half", 100, moved=14), weighed("away", 100, moved=None)
    assert [row["share"] for row in pareto.derive(Rows([half, away]))] == [pytest.approx(45), None]


def test_exact_is_float32_in_any_order_and_nothing_narrower() -> None:
    """Decay after the update, as bitsandbytes has it, is off by 1e-4 of it; bfloat16 state by 7e-4."""
    work = pareto.works(quick_run())["gpt2"]
    reference = Reference(work.parameters(CPU))
    params = work.parameters(CPU)
    assert reference.error(params, CONTENDERS[f"{OURS}, bfloat16 state"].build(params)) > pareto.EXACT
    params = work.parameters(CPU)
    plain = torch.optim.AdamW(params, **{**HYPER, "weight_decay": 0.0})

    def decayed_later() -> None:
        plain.step()
        for p in params:
            p.data.mul_(1 - HYPER["lr"] * HYPER["weight_decay"])

    error = reference.error(params, Bound(decayed_later))
    assert work.tolerance < error <= pareto.EXACT
    found = pareto.derive(Rows([weighed(f"{OURS}, device", 100), weighed("decays later", 90, error=error)]))
    assert [row["front_exact"] for row in found] == [False, True]


def test_a_contender_has_two_lives() -> None:
    """What the first loads is not weighed."""
    built = []

    def build(params: list[torch.nn.Parameter]) -> Bound:
        built.append(len(params))
        return CONTENDERS[FOREACH].build(params)

    run = quick_run()
    work = pareto.works(run)["gpt2"]
    compiled = contenders.Contender(COMPILED, build, compiled=True)
    row = pareto.weighed(run, work, compiled, Reference(work.parameters(CPU)))
    assert len(built) == 2
    assert row["error"] <= work.tolerance
    assert row["state"] == sum(8 * p.numel() + 4 for p in work.parameters(CPU))


def test_a_rival_that_keeps_float32_for_short_tensors_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "installed", lambda run, names: list(names))  # whatever is here
    run = quick_run()
    run.quick, run.device = False, torch.device("cuda")
    for shape, count in (((64, 64), 2), ((2, 3), 0)):
        found = [each.name for each in pareto.chosen(run, Work("small", [shape] * 1000), compiled=True)]
        assert sum("torchao" in name for name in found) == count
    assert [line for line in run.left_out if "torchao AdamW4bit: keeps float32 for tensors of fewer than 4,096" in line]


def test_what_is_in_a_file_takes_no_memory_on_a_cpu() -> None:
    (there,) = pareto.derive(Rows([weighed(OURS, 100, away=6000) | {"device": "cpu"}]))
    (here,) = pareto.derive(Rows([weighed(OURS, 100, away=6000)]))  # on a GPU torch's allocator never had it
    assert (there["need"], here["need"]) == (2000, 8000)


def test_state_that_escaped_the_scales_counts_all_the_same() -> None:
    """Two moments in float32 are eight bytes a parameter, whoever holds them."""
    half = weighed("half", 120, state=16, moved=20)
    rows = Rows([weighed(f"{OURS}, device", 100), weighed(GRAPH, 90, state=16), half])
    mine, graph, half = pareto.derive(rows)
    assert (mine["need"], graph["need"], half["need"]) == (8000, 8000, 4000)
    assert (mine["weighed"], graph["weighed"]) == (True, False)
    assert pareto.ended(graph) == "yes (state by reckoning)"
    assert verdicts(rows)["works in which ours is off the Pareto front of exact updates"] is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_of_a_step_holds_the_state_that_it_writes() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True, capturable=True)
    contender = contenders.graph_of(optimizer.step)
    state = weakref.ref(optimizer.state[parameter]["exp_avg"])
    del optimizer
    gc.collect()
    assert state() is not None
    del contender
    gc.collect()
    assert state() is None
