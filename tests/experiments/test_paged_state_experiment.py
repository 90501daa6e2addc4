"""The experiment on paged state without a GPU: its counters, its verdicts, its file, and the part that runs here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dying_rival
import numpy as np
import pytest
import torch
from experiment_runs import judged, regenerated, run_quick
from paged_state import PAGED_STATE, QUESTIONS, derived, kept, shown, slower, verdicts

from experiments.harness import note, show
from experiments.harness.revision import ROOT
from experiments.harness.rows import Row
from experiments.harness.run import Run
from experiments.harness.time import series
from experiments.paging import bytes, graph, hidden, rivals, spike, state_file, sweep
from experiments.works import counters, paged

CPU = torch.device("cpu")


# --- counters


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [(5, 9, 4), (9, 9, 0), (2**32 - 3, 4, 7), (2**32 - 1, 2**32 - 2, 2**32 - 1)],
)
def test_a_counter_that_wraps_once_is_read_right(before: int, after: int, counted: int) -> None:
    assert counters.difference(np.array([before]), np.array([after])).tolist() == [counted]


def test_what_could_wrap_twice_is_refused() -> None:
    state = 8 * paged.FULL.numel
    assert counters.fits(state)
    assert not counters.fits(2 * state)
    assert counters.MOST < counters.MODULUS


class Nvml:
    """NVML's own structs; counters that go up by what a test says, each in 32 bits and with rubbish above them."""

    def __init__(self) -> None:
        real = pytest.importorskip("cuda.bindings.nvml", reason="cuda-bindings has NVML from 12.9.6 and 13.2 on")
        self.FieldValue, self.NvmlError = real.FieldValue, real.NvmlError
        self.received, self.sent = 2**32 - 100, 50
        self.fail = 0

    def device_get_field_values(self, card: Any, values: Any) -> Any:
        assert list(values.scope_id) == [0, 0]
        now = {198: self.received, 197: self.sent}
        values.value["ull_val"] = [7 << 32 | now[field] % 2**32 for field in values.field_id]
        values.nvml_return = [self.fail] * len(values)
        return values

    def error_string(self, code: int) -> str:
        return "Not Supported"


def link_counters(monkeypatch: pytest.MonkeyPatch) -> tuple[counters.LinkCounters, Nvml]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(counters, "SETTLE", 0)
    found = counters.LinkCounters.__new__(counters.LinkCounters)
    nvml = Nvml()
    found._nvml, found._card = nvml, None
    return found, nvml


def test_the_fields_are_nvml_s() -> None:
    fields = pytest.importorskip("cuda.bindings.nvml").FieldId
    assert (counters.RECEIVED, counters.SENT) == (fields.DEV_PCIE_COUNT_RX_BYTES, fields.DEV_PCIE_COUNT_TX_BYTES)


def test_counts_are_medians_over_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    found, nvml = link_counters(monkeypatch)
    amounts = iter((300, 301, 9000, 299))

    def run() -> None:
        amount = next(amounts)
        nvml.received, nvml.sent = nvml.received + amount, nvml.sent + 2 * amount

    assert found.count(run, times=4).tolist() == [300.5, 601]


def test_a_field_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, nvml = link_counters(monkeypatch)
    nvml.fail = 3
    with pytest.raises(RuntimeError, match="field 198 failed with 3: Not Supported"):
        found.read()


def test_no_nvml_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"NVML is not here: .*driver"):
            counters.LinkCounters(CPU)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    monkeypatch.delattr(pytest.importorskip("cuda.bindings"), "nvml", raising=False)
    with pytest.raises(RuntimeError, match=r"NVML is not here: .*cuda-bindings has it from"):
        counters.LinkCounters(CPU)


# --- results


def test_what_is_committed_comes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("paged_state", "nvidia-h200") == 33
    regenerated("paged_state", tmp_path, monkeypatch)


def worse(name: str, row: Row) -> Row:
    """A row of a day on which every bar of its question but that of the rivals is missed."""
    if name == "sweep":
        if row["kind"] == sweep.BITS:
            return {**row, "same": False}
        share = 1.1 if row["share"] in (0.0, 1.0) else 1.5
        return slower(row, share) if row["case"] == sweep.STEP else row
    if name == "spike" and row["kind"] == spike.CARD:
        return {**row, "same": False, "helpless": "finished"}
    if name == "spike":
        return row if row["loop"] == spike.UNPAGED else {**row, "ms": 1.1 * row["ms"]}
    if name == "bytes" and row["kind"] == bytes.STEP:
        return {**row, "up": 1.1 * row["up"]}
    if name == "memory":
        return {**row, "device_extra": row["device_extra"] + (4 << 20)}
    if name == "graph":
        taken = row["taken"] + (64 << 20)
        return {
            **(slower(row, 10.0) if row["way"] == graph.GRAPH else row),
            "made": slower(row, 99.0)["made"],
            "taken": taken,
        }
    if name == "hidden":
        return {**row, hidden.TOGETHER: slower(row, 1.2)[hidden.TOGETHER]}
    if name == "state_file" and row["kind"] == state_file.STATE:
        return {**row, "resident": row["resident"] + (40 << 20), "digest": row["name"]}
    return slower(row, 2.0) if row.get("name") == rivals.RIVAL else row


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_bar_can_be_met_and_missed(name: str) -> None:
    bad = [worse(name, row) for row in kept()[name]]
    here, there = verdicts(name, derived(name, kept()[name])), verdicts(name, derived(name, bad))
    missed = [
        name == "rivals" or bar.work.endswith("B, float32: host") or bar.work.endswith("B, int8: host") for bar in here
    ]
    assert [verdict.met for verdict in here] == [not each for each in missed]
    assert [verdict.met for verdict in there] == [name == "rivals"] * len(here)


def test_a_rival_is_one_bar_whose_parts_are_a_sum() -> None:
    """As long as the step with its pages pushed out, measured in one piece; other pieces stand in the table only."""
    found = derived("rivals", kept()["rivals"])
    bars = found.where(**rivals.STEPS.where)
    assert [row["name"] for row in bars] == found.values("name")
    assert {row["name"] for row in bars if row["alone"]} == {rivals.RIVAL, rivals.RIVAL_8BIT}
    for row in bars:
        if row["alone"]:
            assert row["what"] == rivals.SAME
            assert row["alone"] == (found.first(name=row["name"], what=rivals.ALONE) or {})["wall"]
            assert row["alone"]["median"] < row["wall"]["median"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_shown_whatever_was_left_out(name: str) -> None:
    """Without any way, contender or loop: tables, texts and bars are made of the rest."""
    measured = kept()[name]
    for column in ("way", "name", "loop", "placement"):
        for value in {row[column] for row in measured if column in row}:
            shown(name, [row for row in measured if row.get(column) != value])


def test_the_share_of_the_ceiling_counts_the_bytes_of_both() -> None:
    said = derived("sweep", kept()["sweep"]).where(kind=sweep.SAYS)
    # A step moves 2 GiB each way; the copies 1 GiB each way, the plain kernel as much as the step.
    assert said.number("of_ceiling", way="mapped, staged") == pytest.approx(100 * 2 * 21.118 / 43.718, abs=0.01)
    assert said.number("of_ceiling", way="mapped, in place") == pytest.approx(100 * 50.527 / 50.720, abs=0.01)


def test_the_line_is_held_to_the_share_that_was_really_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LINE", (0.5,))
    points = {1.0: (0.0, 10.0), 0.5: (0.6, 70.0), 0.0: (1.0, 100.0)}
    rows: list[Row] = [
        {"kind": sweep.TIME, "way": "a", "case": sweep.STEP, "share": share, "away": away, "host_bytes": 0}
        | {"gpu": None, "wall": series([time], "wall")}
        for share, (away, time) in points.items()
    ]
    assert derived("sweep", rows).number("worst", kind=sweep.SAYS) == pytest.approx(1.0)
    assert derived("sweep", rows[1:]).number("worst", kind=sweep.SAYS) is None


def test_hidden_is_what_adds_nothing() -> None:
    times = {hidden.PRODUCTS: 100.0, hidden.UPDATE: 40.0, hidden.TOGETHER: 104.0}
    (row,) = derived("hidden", [{name: series([time], "GPU") for name, time in times.items()}])
    assert (row["clock"], row["added"], row["hidden"]) == ("GPU", 4.0, 90.0)


def test_medians_of_a_loop_are_of_steps_that_count() -> None:
    kinds = [(1, None, 100.0), (19, "ordinary", 1.0), (20, "large", 50.0), (21, "behind", 5.0), (22, "ordinary", 3.0)]
    rows: list[Row] = [
        {"kind": spike.TIME, "loop": spike.UNPAGED, "turn": 0, "step": step, "ms": ms}
        | ({"what": what} if what else {})
        for step, what, ms in kinds
    ]
    rows.append({"kind": spike.CARD, "same": True, "helpless": "finished"})
    found = derived("spike", rows)
    assert {what: found[0][what] for what in ("ordinary", "large", "behind")} == {
        "ordinary": 2,
        "large": 50,
        "behind": 5,
    }
    assert found.where(kind=spike.TIME).values("step") == [19, 20, 21, 22]


# --- pieces of the parts


def test_a_digest_sees_every_bit_and_its_place() -> None:
    one, other = torch.arange(10.0), torch.arange(10.0, 20.0)
    known = paged.digest([one, other])
    assert known == paged.digest([one.clone(), other.clone()])
    changed = one.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    swapped = one.clone()
    swapped[[1, 2]] = one[[2, 1]]
    others = [[changed, other], [swapped, other], [other, one], [one]]
    assert len({known, *map(paged.digest, others)}) == 5


def test_a_digest_in_pieces_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    monkeypatch.setattr(paged, "PIECE", 300)
    swapped = values.clone()
    swapped[:300], swapped[300:600] = values[300:600], values[:300]
    assert paged.digest([values]) != paged.digest([swapped])


def test_the_tail_of_ranges_is_pushed_out_in_whole_granules() -> None:
    mib = 1 << 20
    assert sweep.tail([(0, 8 * mib), (100 * mib, 4 * mib)], 7 * mib) == [(6 * mib, 2 * mib), (100 * mib, 4 * mib)]
    assert sweep.tail([(0, 8 * mib)], 8 * mib) == [(0, 8 * mib)]
    assert sweep.tail([(0, 8 * mib)], 1 * mib) == []
    assert sweep.tail([(0, 8 * mib)], 0) == []


def test_a_card_has_room_for_an_ordinary_step_and_not_for_a_large_one() -> None:
    state, normal, spiked = 2000, 3500, 7000
    card = spike.card_bytes(state, normal, spiked)
    assert normal < card - state < spiked < card
    with pytest.raises(ValueError, match="too close to tell apart"):
        spike.card_bytes(state, 3500, 3600)


def test_rows_of_a_rival_that_dies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "helpers"))
    monkeypatch.setattr(rivals, "PACKAGES", {"json": dying_rival.rows})
    monkeypatch.setattr(rivals, "HERE", {})
    asked = Run(CPU, True, show.console())
    assert [row["name"] for row in rivals.measure(asked)] == ["x"]
    assert asked.left_out == ["json: its process ended with 3: invalid device ordinal"]


# --- the part that needs no GPU, for real


@pytest.mark.long
def test_a_state_file_is_measured_for_real(tmp_path: Path) -> None:
    found = run_quick("paged_state", tmp_path)
    part = found["parts"]["state_file"]
    assert part["left_out"] == []
    states = derived("state_file", part["rows"])
    assert states[0]["name"] == state_file.IN_RAM
    assert states.values("bits") == ["same"]
    assert all(row["resident"] > 0 and row["seen"] > 0 for row in states)
    assert found["left_out"][0].startswith("link, sweep, rivals,")
    assert "need a GPU" in found["left_out"][0]
    assert "file, 25% in RAM" in note.sections(found, PAGED_STATE)["state_file"]


def test_a_process_that_fails_is_a_state_left_out() -> None:
    with pytest.raises(RuntimeError, match=r"its process ended with 1: (.|\n)*device_budget"):
        state_file._followed(1, 16, -5)
