"""The experiment on paged state without a GPU: its counters, its verdicts, its files, and the part that runs here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dying_rival
import pytest
import torch
from experiment_runs import judged, regenerated, run_quick
from paged_state_results import PAGED_STATE, derived, result, verdicts, whole

from experiments.harness import note, rows, show
from experiments.harness.main import KEPT, main
from experiments.harness.revision import ROOT
from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.paging import bytes, rivals, spike, state_file, sweep
from experiments.works import counters, paged
from experiments.works.counters import Traffic
from pagedopt.commands.results import new_figure

CPU = torch.device("cpu")
RAW = "paged_state-nvidia-h200.json"
PARTS = [question.name for question in PAGED_STATE.questions]


# --- counters


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [(5, 9, 4), (9, 9, 0), (2**32 - 3, 4, 7), (2**32 - 1, 2**32 - 2, 2**32 - 1)],
)
def test_a_counter_that_wraps_once_is_read_right(before: int, after: int, counted: int) -> None:
    assert counters.difference(before, after) == counted


def test_what_could_wrap_twice_is_refused() -> None:
    state = 8 * paged.FULL.numel
    assert counters.fits(Traffic(state, state))
    assert not counters.fits(Traffic(2 * state, 0))
    assert not counters.fits(Traffic(0, 2 * state))
    assert counters.MOST < counters.MODULUS


def test_a_calibration_takes_packets_off() -> None:
    per_byte = Traffic(1.08e9, 1.2e9) / Traffic(1e9, 1e9)
    moved = Traffic(0.54e9, 2.4e9) / per_byte
    assert moved.up == pytest.approx(0.5e9)
    assert moved.down == pytest.approx(2e9)


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

    assert found.count(run, times=4) == Traffic(300.5, 601)


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
    assert judged("paged_state", "nvidia-h200") == 24
    regenerated("paged_state", tmp_path, monkeypatch)


def test_a_question_that_had_another_name_keeps_its_circumstances() -> None:
    raw, read = json.loads((KEPT / RAW).read_text()), rows.read(KEPT / RAW, PAGED_STATE)
    assert list(read["parts"]) == PARTS
    assert read["parts"]["state_file"]["when"] == raw["parts"]["cpu"]["when"]


def test_every_row_of_the_issue_is_a_bar_that_can_be_met_or_missed() -> None:
    assert [(v.work, v.met) for v in verdicts(whole()) if not v.met] == []
    assert [v.work for v in verdicts(whole(slower=3.0)) if v.met is not False] == []


def test_what_was_not_measured_is_no_verdict() -> None:
    found = verdicts({})
    assert len(found) == len(verdicts(whole())) == 24
    assert all(verdict.met is None for verdict in found)


@pytest.mark.parametrize("name", PARTS)
def test_a_question_is_shown_whatever_was_left_out(name: str) -> None:
    """Rows up to any, of results or of made-up ones: tables, texts and bars, none of which may need those behind."""
    raw = rows.read(KEPT / RAW, PAGED_STATE)["parts"][name]["rows"]
    for measured in (raw, whole()[name]):
        (question,) = (question for question in PAGED_STATE.questions if question.name == name)
        for end in range(min(len(measured), 40) + 1):
            found = derived(name, measured[:end])
            for table in question.listed("TABLES"):
                for _, headings, lines in table.shown(found):
                    assert lines
                    assert all(len(line) == len(headings) for line in lines)
            for text in question.listed("TEXTS"):
                text.say(found)
            verdicts({name: measured[:end]})


def test_the_share_of_the_ceiling_counts_the_bytes_of_both() -> None:
    found = derived("sweep", whole()["sweep"])
    # A step moves 2 GiB each way; the copies 1 GiB each way in 21.2 ms, the plain kernel 2 GiB each way in 50.8 ms.
    assert found.number("of_ceiling", kind=sweep.SAYS, way="mapped, staged") == pytest.approx(100 * 2 * 21.2 / 43.0)
    assert found.number("of_ceiling", kind=sweep.SAYS, way="mapped, in place") == pytest.approx(100 * 50.8 / 50.9)


def test_the_line_is_held_to_the_share_that_was_really_away() -> None:
    times = Rows([
        {"way": "a", "case": sweep.STEP, "share": 1.0, "away": 0.0, "best": 10.0},
        {"way": "a", "case": sweep.STEP, "share": 0.5, "away": 0.6, "best": 70.0},
        {"way": "a", "case": sweep.STEP, "share": 0.0, "away": 1.0, "best": 100.0},
    ])  # fmt: skip
    assert sweep.over_line(times, 0.5) == pytest.approx(1.0)
    assert sweep.worst_of_line(times) is None, "shares are missing"


def test_a_note_takes_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "paged_state.md"
    target.write_text((ROOT / "notes" / "paged_state.md").read_text())
    monkeypatch.setattr(note, "NOTES", tmp_path)
    path = tmp_path / "paged_state-h200.json"
    path.write_text(json.dumps(result(whole())))
    assert main(PAGED_STATE, ["--note", str(path)]) == 0
    filled = target.read_text()
    for content in note.sections(result(whole()), PAGED_STATE).values():
        assert content in filled
    without = whole()
    without.pop("spike")
    path.write_text(json.dumps(result(without)))
    assert main(PAGED_STATE, ["--note", "--out", str(tmp_path)]) == 0
    assert "not measured in this run" in target.read_text()


def test_plots_are_drawn(tmp_path: Path) -> None:
    drawn = []
    for question in PAGED_STATE.questions:
        for plot in question.listed("PLOTS"):
            for measured in (
                whole()[question.name],
                rows.read(KEPT / RAW, PAGED_STATE)["parts"][question.name]["rows"],
            ):
                if (figure := new_figure(11, 7.5)) is None:
                    pytest.skip("matplotlib is not installed")
                plot.draw(figure, derived(question.name, measured).where(**plot.where))
                figure.savefig(tmp_path / f"{plot.name}.png", dpi=40)
            drawn.append(plot.name)
    assert drawn == ["shares", "rivals", "spikes"]


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


def test_medians_of_ordinary_and_large_steps_and_those_behind() -> None:
    times = [100.0] * spike.WARM + [1.0] * (45 - spike.WARM)
    times[19], times[20], times[39], times[40] = 50.0, 5.0, 50.0, 5.0
    assert spike.summary([{"ms": times}]) == {"ordinary_ms": 1.0, "large_ms": 50.0, "behind_ms": 5.0}


def test_rows_of_a_rival_that_dies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "helpers"))
    monkeypatch.setattr(rivals, "PACKAGES", {"json": dying_rival.rows})
    monkeypatch.setattr(rivals, "_here", lambda problem: [])
    asked = Run(CPU, True, show.console())
    assert [row["name"] for row in rivals.measure(asked)] == ["x"]
    assert asked.left_out == ["json: its process ended with 3: invalid device ordinal"]


def test_copies_of_a_trace_add_up_by_name() -> None:
    events = [{"cat": "gpu_memcpy", "name": n, "args": {"bytes": b}} for n, b in (("up", 1), ("down", 2), ("up", 4))]
    assert bytes.copied({"traceEvents": [*events, {"cat": "kernel", "name": "k"}]}) == {"up": 5, "down": 2}


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
