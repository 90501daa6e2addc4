"""Lists that outlive what they name: a real run of toys, what becomes of each hazard, and bars that can be missed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick
from ladder_rows import CPU, quick_run
from paths import ROOT
from pictures import needs_matplotlib

from experiments.harness import note
from experiments.harness.rows import Rows
from experiments.lifetime import hazards, leaks, owners, price, tables
from experiments.works import held_lists, mishaps
from experiments.works.held_lists import BARE, OURS, OURS_GRAPH, TORCH, TORCH_GRAPH, User
from experiments.works.mishaps import CRASH, FOLLOWED, HARMS, HAZARDS, KEPT, REFUSED, WRONG
from pagedopt.commands.results import new_figure


def verdicts(question: str, rows: Rows) -> list[bool | None]:
    (asked,) = (q for q in experiment("pointer_lifetime").questions if q.name == question)
    return [bar.verdict(asked.derive(rows)).met for bar in asked.listed("BARS")]


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("pointer_lifetime", tmp_path, plots=["hazards"])
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["hazards", "owners", "price", "leaks"]
    outcomes = {row["way"]: row["outcome"] for row in parts["hazards"]}
    assert outcomes[OURS] == KEPT
    assert outcomes[BARE] in mishaps.BAD
    assert any("memcheck: need a GPU" in line for line in found["left_out"])
    copied = tmp_path / "note.md"
    copied.write_text((ROOT / "notes" / "pointer_lifetime.md").read_text())
    note.fill(copied, note.sections(found, experiment("pointer_lifetime")))  # has a place for everything


def test_results_that_are_kept_give_their_note_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("pointer_lifetime", "nvidia-h200") == judged("pointer_lifetime", "cpu") == 6
    regenerated("pointer_lifetime", tmp_path, monkeypatch)


def test_on_a_cpu_bare_addresses_always_go_wrong_and_ours_never() -> None:
    rows = Rows(note_rows("hazards"))
    bad = [row["hazard"] for row in rows.where(way=BARE) if row["outcome"] in mishaps.BAD]
    assert bad == [name for name, hazard in HAZARDS.items() if not hazard.late]
    assert {row["outcome"] for row in rows.where(way=OURS)} == {KEPT, FOLLOWED, REFUSED}


def note_rows(question: str) -> list[dict[str, Any]]:
    from experiments.harness.main import KEPT as FOLDER
    from experiments.harness.rows import read

    result = read(FOLDER / "pointer_lifetime-cpu.json", experiment("pointer_lifetime"))
    return list(result["parts"][question]["rows"])


# --- hazards


@pytest.mark.parametrize(
    ("hazard", "way", "outcome"),
    [
        ("deleted", TORCH, KEPT),
        ("deleted", OURS, KEPT),
        ("moved (p.data = …)", OURS, FOLLOWED),
        ("storage swapped (set_)", TORCH, FOLLOWED),
        ("gradients made anew", OURS, FOLLOWED),
        ("shrunk (resize_(0))", OURS, REFUSED),
    ],
)
def test_who_holds_tensors_can_be_played_in_this_process(hazard: str, way: str, outcome: str) -> None:
    (row,) = mishaps.played(hazard, way, "cpu")
    assert (row["outcome"], row["elements"]) == (outcome, 0)
    assert bool(row["said"]) is (outcome == REFUSED)
    assert "parameter 1" in row["said"] or outcome != REFUSED


def stale(user: User) -> Any:
    """A planted fault: a way that updates what the parameters were."""
    old = [p.detach() for p in user.params]
    grads = [p.grad for p in user.params]
    return lambda: torch._foreach_sub_(old, grads)


def test_a_way_that_follows_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(held_lists.WAYS, "stale", stale)
    (row,) = mishaps.played("moved (p.data = …)", "stale", "cpu")
    assert (row["outcome"], row["elements"]) == (WRONG, mishaps.SMALL)
    (row,) = mishaps.played("gradients made anew", "stale", "cpu")
    assert (row["outcome"], row["elements"]) == (WRONG, 4 * mishaps.SMALL)


def test_numbers_of_others_that_change_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    real = mishaps.others
    monkeypatch.setattr(mishaps, "others", lambda device: kept.extend(real(device)) or kept)
    monkeypatch.setitem(held_lists.WAYS, "rude", lambda user: lambda: kept[3][:5].sub_(1))
    (row,) = mishaps.played("deleted", "rude", "cpu")
    assert (row["outcome"], row["elements"]) == (HARMS, 5)


def test_a_parameter_without_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def those_with_memory(user: User) -> Callable[[], None]:
        def step() -> None:
            for p in user.params:
                if p.untyped_storage().nbytes():
                    p.data.sub_(p.grad)  # type: ignore[arg-type]

        return step

    monkeypatch.setitem(held_lists.WAYS, "careful", those_with_memory)
    (found,) = mishaps.played("shrunk (resize_(0))", "careful", "cpu")
    assert found["outcome"] == mishaps.SILENT


def test_a_process_that_dies_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hazards.in_child("deleted and given back", BARE, "cpu")
    assert row["outcome"] == CRASH
    assert row["said"].startswith("ended with -11")


def row(hazard: str, way: str, outcome: str) -> dict[str, Any]:
    about = {"what": "hazard", "device": "cuda", "hazard": hazard, "way": way}
    return {**about, "outcome": outcome, "elements": 0, "said": ""}


def matrix(ours: str = FOLLOWED, memcheck: str = hazards.NOTHING) -> Rows:
    ways = {BARE: HARMS, TORCH: FOLLOWED, TORCH_GRAPH: HARMS, OURS: ours, OURS_GRAPH: REFUSED, "memcheck": memcheck}
    return Rows(row(name, way, outcome) for way, outcome in ways.items() for name in list(HAZARDS)[:3])


def test_bars_of_hazards_can_be_missed() -> None:
    assert verdicts("hazards", matrix()) == [True, True]
    assert verdicts("hazards", matrix(ours=WRONG)) == [False, True]
    both = Rows({**row, "outcome": WRONG} if row["way"] == TORCH else row for row in matrix(ours=WRONG))
    assert hazards.unnoticed(both) == (0, f" (both let through: {'; '.join(sorted(list(HAZARDS)[:3]))})")
    assert verdicts("hazards", matrix(memcheck=hazards.NAMED)) == [True, False]
    assert verdicts("hazards", matrix().where(way=BARE)) == [None, None]
    sums = hazards.derive(matrix()).where(what="sum")
    assert sums.number("harms", way=TORCH_GRAPH) == 3
    assert sums.number("missed", way="memcheck") == 3


@needs_matplotlib
def test_the_matrix_is_drawn_with_a_cell_for_each_row() -> None:
    figure = new_figure(8, 5)
    hazards.draw(figure, hazards.derive(matrix()))
    (axes,) = figure.axes
    assert len(axes.patches) == len(matrix()) == 18


REPORT = (
    "========= Invalid __global__ write of size 4 bytes\n=========     at listed\n========= ERROR SUMMARY: {} error{}\n"
)


def test_a_report_of_memcheck_is_read() -> None:
    assert hazards.judged(REPORT.format(3, "s"))["outcome"] == hazards.NAMED
    ended = "{'outcome': 'followed'}\n========= ERROR SUMMARY: 0 errors"
    assert hazards.judged(ended)["outcome"] == hazards.NOTHING
    assert hazards.judged(REPORT.format(1, ""))["said"] == "Invalid __global__ write of size 4 bytes"
    for text in ("killed", "Device not supported\n========= ERROR SUMMARY: 0 errors"):
        with pytest.raises(RuntimeError, match="memcheck has checked nothing: "):
            hazards.judged(text)


# --- owners, leaks, price


@pytest.mark.parametrize("how", owners.HOW)
def test_bare_addresses_are_the_originals_and_deep_copies_of_ours_are_not(how: str) -> None:
    rows = Rows(owners.used("cpu"))
    assert rows.first(holder=BARE, how=how)["updates"] == owners.ORIGINAL  # type: ignore[index]
    for holder in ("DeviceTable", "Sweep", "PagedSGD"):
        wanted = owners.ORIGINAL if how == "copy" else owners.OWN
        assert rows.first(holder=holder, how=how)["updates"] == wanted  # type: ignore[index]


def test_a_deep_copy_that_shares_misses_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts("owners", Rows(owners.used("cpu"))) == [True]
    monkeypatch.setitem(owners.HOW, "deepcopy", copy.copy)
    assert verdicts("owners", Rows(owners.used("cpu"))) == [False]


def test_what_is_kept_by_somebody_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    hoard: list[Any] = []
    monkeypatch.setitem(leaks.KINDS, "hoarded", lambda user: hoard.append(torch.ones(1 << 20)))
    (row,) = leaks.left({"hoarded": 10}, "cpu")
    assert row["ram"] > 8 * 4 << 20
    (row,) = leaks.left({"DeviceTable": 100}, "cpu")
    assert verdicts("leaks", Rows([{"kind": "a", **row}]))[1] is True
    assert verdicts("leaks", Rows([{"kind": "a", "ram": 2 << 20, "descriptors": 1}])) == [False, False]
    assert verdicts("leaks", Rows([{"kind": "a", "ram": 0, "card": 2 << 20, "descriptors": 0}])) == [False, True]


def test_guards_know_their_tensors_again() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    found = price.guards(tensors)
    assert found.check(*tensors)
    assert not found.check(torch.ones(5), tensors[1])


def test_the_price_is_of_the_longest_list() -> None:
    rows = Rows(price.measure(quick_run()))
    assert {row["case"] for row in rows} == {price.LOOK, price.PYTHON, price.GUARDS, price.STEP}
    assert str(price.sentence(rows)).startswith("- 100 tensors: ")


# --- tables, without a GPU


def test_a_list_of_ours_that_finds_another_misses_its_bar() -> None:
    about = {"who": OURS, "where": "managed", "act": "rewritten", "waited": False}
    assert verdicts("tables", Rows([{**about, "found": tables.RIGHT}])) == [True]
    assert verdicts("tables", Rows([{**about, "found": tables.OTHER}])) == [False]


def test_every_way_of_a_list_has_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are what a table of ours has, so that one kernel follows both."""
    from pagedopt import DeviceTable

    user = User.of(3, 50, CPU)
    table = DeviceTable(held_lists.lists(user), writes=[0])
    assert held_lists.addresses(user.params).tolist() == table.rows.tolist()
    torch._foreach_add_(held_lists.lists(user)[1], 1.0)
    functools.partial(held_lists.follow(table.rows, CPU))()
    assert [float(p.detach().mean()) for p in user.params] == [0.0, 1.0, 2.0]


def test_the_kernels_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    from pagedopt.kernels.nvrtc import compile_cuda

    cubin, _ = compile_cuda(held_lists.CUDA, ("listed", "by_value"), "sm_90")
    assert cubin[:4] == b"\x7fELF"


def test_an_error_of_python_is_no_outcome() -> None:
    if torch.cuda.is_available():
        pytest.skip("a graph can be made here")
    with pytest.raises(RuntimeError, match="ended with 1: "):
        hazards.in_child("deleted", OURS_GRAPH, "cpu")
