"""The experiment on paged state without a GPU: its counters, what is made of its rows, and pieces of its parts."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from experiment_runs import asked, experiment, shown

from experiments.harness.main import KEPT
from experiments.harness.rows import Row, Rows, read
from experiments.harness.time import series
from experiments.paging import spike, state_file, sweep
from experiments.works import counters, paged

CPU = torch.device("cpu")
#: By an H200.
MEASURED = read(KEPT / "paged_state-nvidia-h200.json", experiment("paged_state"))["parts"]


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


@pytest.mark.parametrize("name", MEASURED)
def test_a_question_is_shown_whatever_was_left_out(name: str) -> None:
    """Without any way, contender or loop: tables, texts and bars are made of the rest."""
    measured = MEASURED[name]["rows"]
    for column in ("way", "name", "loop", "placement"):
        for value in {row[column] for row in measured if column in row}:
            shown(name, [row for row in measured if row.get(column) != value])


def test_the_line_is_held_to_the_share_that_was_really_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LINE", (0.5,))
    points = {1.0: (0.0, 10.0), 0.5: (0.6, 70.0), 0.0: (1.0, 100.0)}
    rows: list[Row] = [
        {"kind": sweep.TIME, "way": "a", "case": sweep.STEP, "share": share, "away": away, "host_bytes": 0}
        | {"gpu": None, "wall": series([time], "wall")}
        for share, (away, time) in points.items()
    ]
    assert asked("sweep").derive(Rows(rows)).number("worst", kind=sweep.SAYS) == pytest.approx(1.0)
    assert asked("sweep").derive(Rows(rows[1:])).number("worst", kind=sweep.SAYS) is None


def test_medians_of_a_loop_are_of_steps_that_count() -> None:
    kinds = [(1, None, 100.0), (19, "ordinary", 1.0), (20, "large", 50.0), (21, "behind", 5.0), (22, "ordinary", 3.0)]
    rows: list[Row] = [
        {"kind": spike.TIME, "loop": spike.UNPAGED, "turn": 0, "step": step, "ms": ms}
        | ({"what": what} if what else {})
        for step, what, ms in kinds
    ]
    rows.append({"kind": spike.CARD, "same": True, "helpless": "finished"})
    found = asked("spike").derive(Rows(rows))
    assert [found[0][what] for what in ("ordinary", "large", "behind")] == [2, 50, 5]
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


def test_the_tail_of_ranges_is_pushed_out_in_whole_granules() -> None:
    mib = 1 << 20
    assert sweep.tail([(0, 8 * mib), (100 * mib, 4 * mib)], 7 * mib) == [(6 * mib, 2 * mib), (100 * mib, 4 * mib)]
    assert sweep.tail([(0, 8 * mib)], 8 * mib) == [(0, 8 * mib)]
    assert sweep.tail([(0, 8 * mib)], 1 * mib) == []
    assert sweep.tail([(0, 8 * mib)], 0) == []


def test_a_process_that_fails_is_a_state_left_out() -> None:
    with pytest.raises(RuntimeError, match=r"its process ended with 1: (.|\n)*device_budget"):
        state_file._followed(1, 16, -5)
