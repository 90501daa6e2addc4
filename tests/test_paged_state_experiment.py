"""The experiment on paged state without a GPU: its counters, its verdicts, its files, and the part that runs here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_state_results import result, stats, sweep_part, whole_result

from experiments import paged_state, report
from experiments.paging import bars, counters, crossing, parts, plots, problem, rivals, spike, state_file, sweep, tables
from experiments.paging.counters import Calibration, Traffic
from experiments.report import ROOT

CPU = torch.device("cpu")
PARTS = list(paged_state.PARTS)


# --- counters


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [(5, 9, 4), (9, 9, 0), (2**32 - 3, 4, 7), (2**32 - 1, 2**32 - 2, 2**32 - 1)],
)
def test_a_counter_that_wraps_once_is_read_right(before: int, after: int, counted: int) -> None:
    assert counters.difference(before, after) == counted


def test_what_could_wrap_twice_is_refused() -> None:
    state = 8 * problem.FULL.numel
    assert counters.fits(Traffic(state, state))
    assert not counters.fits(Traffic(2 * state, 0))
    assert not counters.fits(Traffic(0, 2 * state))
    assert counters.MOST < counters.MODULUS


def test_a_calibration_takes_packets_off() -> None:
    packets = Calibration.of(Traffic(1.08e9, 1.2e9), Traffic(1e9, 1e9))
    moved = packets.moved(Traffic(0.54e9, 2.4e9))
    assert moved.up == pytest.approx(0.5e9)
    assert moved.down == pytest.approx(2e9)
    assert moved.sum == pytest.approx(2.5e9)


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


# --- parts in one file


def test_parts_are_put_together_and_newer_ones_win() -> None:
    old = result(parts={"link": 1, "sweep": 1}, machine={"versions": {"numba": "0.68", "torchao": "0.18"}})
    new = result(parts={"sweep": 2}, machine={"when": "later", "commit": "b"})
    both = parts.merged(old, new)
    assert both["parts"] == {"link": 1, "sweep": 2}
    assert both["machine"]["when"] == "later"
    assert both["machine"]["versions"] == {"numba": "0.68", "torch": "2.11", "torchao": "0.18"}
    assert parts.merged(None, new) == new


@pytest.mark.parametrize(
    "changes",
    [{"machine": {"driver": "581"}}, {"machine": {"versions": {"numba": "0.69"}}}, {"quick": True}, {"device": "cpu"}],
)
def test_parts_of_different_machines_are_kept_apart(changes: dict[str, Any], tmp_path: Path) -> None:
    old, new = result(parts={"link": 1}), result(**changes)
    assert len(parts.differences(old, new)) == 1
    with pytest.raises(ValueError, match="not measured on one machine"):
        parts.merged(old, new)
    path = tmp_path / "paged_state-h200.json"
    path.write_text(json.dumps(old))
    moved = parts.set_aside(path)
    assert not path.exists()
    assert json.loads(moved.read_text()) == old
    assert not moved.match("paged_state-*.json"), "--note would take it for the results"


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert parts.load(path) is None
    path.write_text('{"machine": 1}')
    with pytest.raises(ValueError, match="does not hold results of this experiment"):
        parts.load(path)


def test_only_names_parts_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.chosen("cpu,link", PARTS) == ["link", "cpu"]
    with pytest.raises(argparse.ArgumentTypeError, match="no part 'speed'; there are link, sweep"):
        parts.chosen("link,speed", PARTS)
    with pytest.raises(SystemExit):
        paged_state.main(["--only", ","])
    assert "no part is named" in capsys.readouterr().err


def test_what_is_missing_is_said() -> None:
    found = result(parts={"link": {"left_out": ["a: b"]}, "cpu": {}})
    lines = parts.left_out(found, ["link", "sweep", "cpu"], ["cpu"])
    assert lines == ["part sweep: not measured", "link, a: b"]
    assert parts.left_out({**found, "device": "cpu"}, ["sweep", "hidden", "cpu"], ["cpu"])[0] == (
        "parts sweep, hidden: need a GPU"
    )


# --- verdicts, tables and plots of made-up results


def test_every_row_of_the_issue_is_a_bar_that_can_be_met_or_missed() -> None:
    assert [(b.work, b.met) for b in bars.bars(whole_result()) if not b.met] == []
    assert [bar.work for bar in bars.bars(whole_result(slower=3.0)) if bar.met is not False] == []


def test_what_was_not_measured_is_no_verdict() -> None:
    found = bars.bars(result())
    assert len(found) == len(bars.bars(whole_result()))
    assert all(bar.met is None for bar in found)


def test_the_share_of_the_ceiling_counts_the_bytes_of_both() -> None:
    part = sweep_part(1.0)
    # A step moves 2 GiB each way; the copies 1 GiB each way in 21.2 ms, the plain kernel 2 GiB each way in 50.8 ms.
    assert bars.share_of_ceiling(part["rows"], "mapped, staged", part) == pytest.approx(2 * 21.2 / 43.0)
    assert bars.share_of_ceiling(part["rows"], "mapped, in place", part) == pytest.approx(50.8 / 50.9)


def test_the_line_is_held_to_the_share_that_was_really_away() -> None:
    rows = [
        {"way": "a", "share": 1.0, "away": 0.0, "best": 10.0},
        {"way": "a", "share": 0.5, "away": 0.6, "best": 70.0},
        {"way": "a", "share": 0.0, "away": 1.0, "best": 100.0},
    ]
    assert bars.over_line(rows, "a", 0.5) == pytest.approx(1.0)
    assert bars.worst_of_line(rows, "a") is None, "shares are missing"


def test_a_note_takes_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "paged_state.md"
    note.write_text((ROOT / "notes" / "paged_state.md").read_text())
    monkeypatch.setattr(report, "NOTES", tmp_path)
    whole = whole_result()
    path = tmp_path / "paged_state-h200.json"
    path.write_text(json.dumps(whole))
    assert paged_state.main(["--note", str(path)]) == 0
    filled = note.read_text()
    for content in tables.sections(json.loads(path.read_text())).values():
        assert content in filled
    whole["parts"].pop("spike")
    path.write_text(json.dumps(whole))
    assert paged_state.main(["--note", "--out", str(tmp_path)]) == 0
    assert "not measured in this run" in note.read_text()


def test_plots_are_drawn(tmp_path: Path) -> None:
    for name, (part, draw) in plots.PLOTS.items():
        if (figure := report.new_figure(11, 7.5)) is None:
            pytest.skip("matplotlib is not installed")
        assert part in PARTS
        draw(figure, whole_result())
        figure.savefig(tmp_path / f"{name}.png", dpi=40)


# --- pieces of the parts


def test_a_digest_sees_every_bit_and_its_place() -> None:
    one, other = torch.arange(10.0), torch.arange(10.0, 20.0)
    known = problem.digest([one, other])
    assert known == problem.digest([one.clone(), other.clone()])
    changed = one.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    swapped = one.clone()
    swapped[[1, 2]] = one[[2, 1]]
    others = [[changed, other], [swapped, other], [other, one], [one]]
    assert len({known, *map(problem.digest, others)}) == 5


def test_a_digest_in_pieces_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    monkeypatch.setattr(problem, "PIECE", 300)
    swapped = values.clone()
    swapped[:300], swapped[300:600] = values[300:600], values[:300]
    assert problem.digest([values]) != problem.digest([swapped])


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


def test_results_of_a_child_that_dies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    line = rivals.MARK + json.dumps({"name": "x", "what": "step", "wall": stats(1.0)})
    done = subprocess.CompletedProcess([], -6, stdout=f"noise\n{line}\n", stderr="invalid device ordinal")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    run = problem.Run(CPU, True, report.console())
    assert [row["name"] for row in rivals._child(run, "bitsandbytes")] == ["x"]
    assert run.left_out == ["bitsandbytes: its process ended with -6: invalid device ordinal"]


def test_a_contender_that_fails_is_left_out_and_said() -> None:
    run = problem.Run(CPU, True, report.console())
    with run.attempt("it"):
        raise MemoryError("no room")
    assert run.left_out == ["it: MemoryError: no room"]


def test_copies_of_a_trace_add_up_by_name() -> None:
    events = [{"cat": "gpu_memcpy", "name": n, "args": {"bytes": b}} for n, b in (("up", 1), ("down", 2), ("up", 4))]
    assert crossing.copied({"traceEvents": [*events, {"cat": "kernel", "name": "k"}]}) == {"up": 5, "down": 2}


# --- the part that needs no GPU, for real


def test_cpu_part_for_real(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments", "paged_state", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # to name the card takes some of its memory
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "paged_state-cpu.json").read_text())
    part = found["parts"]["cpu"]
    assert part["left_out"] == []
    assert part["different"] == []
    assert part["rows"][0]["name"] == state_file.IN_RAM
    assert any("need a GPU" in line for line in found["left_out"])
    assert "file, 25% in RAM" in tables.sections(found)["cpu"]
