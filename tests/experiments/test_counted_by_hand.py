"""Floors, bytes and launches of the experiments, each held to a small case that is counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experiment_runs import CPU, clocks

from experiments.clock import Case
from experiments.lab import Row, Rows, Run
from experiments.ladder import counts, pareto, trucks
from experiments.ladder.counts import DEFAULT, LIST, OPERATIONS, Limits
from experiments.launch import saturation
from experiments.paging import link
from experiments.step import clip_and_scale, close_to_a_copy, cpu_step
from experiments.vertical import roofline
from experiments.vertical.traffic import ADAMW, NORM, ONCE, RULE, RULES, TWICE, WORKS
from experiments.works import builds, in_place, paged
from experiments.works.contenders import CONTENDERS
from experiments.works.dispatch import operands
from experiments.works.link import IN_PLACE
from experiments.works.models import COMPILED, COPY, FOREACH, FUSED, LOOP, OURS, Work
from experiments.works.steps import copy_of_bytes
from experiments.works.witnesses import BY_COMPILER, EAGER

#: An update reads the gradient, and reads and writes the parameter and both moments.
FLOAT32 = 4 + 4 + 4 + 2 * (4 + 4)
BFLOAT16 = 2 + 2 + 2 + 2 * (2 + 2)
BFLOAT16_WITH_FLOAT32_STATE = 2 + 2 + 2 + 2 * (4 + 4)
#: A code of 1 byte, and 4 bytes of scale for 256 of them; half a byte, and 4 for 128.
INT8 = 4 + 4 + 4 + 2 * 2 * (1 + 4 / 256)


class Watched(Run):
    """A run of toys in which every case takes a microsecond; it holds the cases."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(torch.device(device), True)
        self.cases: dict[str, Case] = {}

    def measure(self, cases: Any, *_: Any, **__: Any) -> dict[str, Any]:
        self.cases |= {case.name: case for case in cases}
        return {case.name: clocks(1.0) for case in cases}


# --- floors, and bytes of an element


def test_a_step_must_move_the_bytes_of_its_formats() -> None:
    due = dict.fromkeys(("gpt2", "1b", "1000", "5000", "50m"), FLOAT32) | {"gpt2-bf16": BFLOAT16_WITH_FLOAT32_STATE}
    for quick in (True, False):
        assert {key: work.bytes_each for key, work in close_to_a_copy.works(quick).items()} == due


def test_torchs_steps_move_the_bytes_of_their_formats() -> None:
    assert close_to_a_copy.TORCH_MOVES == BFLOAT16
    assert {Work("any", [(2, 3)]).bytes_each, *(work.bytes_each for work in cpu_step.works(True))} == {FLOAT32}
    assert paged.FULL.bytes_each == paged.QUICK.bytes_each == FLOAT32
    assert close_to_a_copy.MOVED == INT8 == 16.0625


def test_a_contender_moves_the_bytes_of_its_state() -> None:
    due = dict.fromkeys((OURS, FUSED, FOREACH, LOOP), FLOAT32)
    due |= {f"{OURS}, bfloat16 state": 4 + 4 + 4 + 2 * (2 + 2), f"{OURS}, float64 state": 4 + 4 + 4 + 2 * (8 + 8)}
    due |= dict.fromkeys((f"{OURS}, int8 nearest", f"{OURS}, int8 stochastic", "bitsandbytes AdamW8bit"), INT8)
    assert {name: CONTENDERS[name].moved for name in due} == due


@pytest.mark.parametrize(
    ("dtype", "each"),
    [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16), (torch.bfloat16, BFLOAT16_WITH_FLOAT32_STATE)],
)
def test_the_floor_is_a_copy_that_reads_and_writes_as_many_bytes_as_the_update(dtype: torch.dtype, each: int) -> None:
    work = Work("small", [(4, 8), (8,)], dtype, each)
    assert operands(copy_of_bytes(work, CPU).run) == 40 * each


def test_the_bytes_of_a_row_are_those_of_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Work("small", [(4, 8), (8,)])
    run = Watched()
    rows = Rows(close_to_a_copy.steps(run, "gpt2", small, (OURS, FUSED), CPU))
    assert {row["bytes"] for row in rows} == {40 * 28} == {operands(run.cases[COPY].run)}
    monkeypatch.setattr(cpu_step, "works", lambda quick: [small])
    monkeypatch.setattr(cpu_step, "pairs", lambda run, one, other: {})
    monkeypatch.setattr(cpu_step.os, "sched_getaffinity", lambda _: {0})
    assert {row["bytes"] for row in cpu_step.measure(run)} == {40 * 28}
    monkeypatch.setattr(close_to_a_copy, "gpt2_shapes", lambda *_: [(4, 8), (8,)])
    run.part = "in_16_bits"
    assert {row["bytes"] for row in close_to_a_copy.measure(run)} == {40 * 14} == {operands(run.cases[COPY].run)}
    monkeypatch.setattr(pareto, "works", lambda run: {"small": small})
    assert pareto.about(run, "small", CONTENDERS[FUSED])["bytes"] == 40 * 28


def test_bytes_of_state_in_8_bits_are_codes_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "ours", lambda **_: builds.theirs(foreach=True))  # nothing to compile
    run, small = Watched(), Work("small", [(4096,)])
    rows = Rows(close_to_a_copy.resident(run, small, CPU))
    #: 12 bytes of parameter and gradient; of two moments codes, and 16 scales; read and written.
    int8 = 12 * 4096 + 2 * 2 * (4096 + 16 * 4)
    assert rows.number("bytes", case=OURS) == 28 * 4096
    assert {row["bytes"] for row in rows if row["case"] != OURS} == {int8} == {operands(run.cases[COPY].run)}
    away = Rows(close_to_a_copy.in_a_file(Watched(), small))
    assert away.number("bytes", case=OURS) == 2 * (4 + 4) * 4096
    assert {row["bytes"] for row in away if row["case"] != OURS} == {2 * 2 * (4096 + 16 * 4)}


def test_two_moments_are_eight_bytes() -> None:
    assert paged.STATE_BYTES == 2 * 4
    assert paged.Problem(Watched()).state_bytes == 16 * 512 * 512 * 8
    assert close_to_a_copy.BITS_8 == 2 * (1 + 4 / 256)


def test_a_kernel_over_rows_reads_and_writes_each_float() -> None:
    (few, *_), many = (saturation.measure(Watched()) for _ in range(2))
    assert (few["rows"], few["bytes"]) == (16, 2 * 4 * 16 * 256)
    assert {row["rows"]: row["bytes"] for row in many}[256] == 2 * 4 * 256 * 256
    x = torch.rand(16, 256)
    assert operands(lambda: saturation.OPERATIONS["tanh"](x)) == few["bytes"]
    (row,) = saturation.derive(Rows([few | {"gpu": None, "wall": clocks(8.0)["wall"]}]))
    assert row["rate"] == pytest.approx(32768 / 8e-6 / 1e9)


#: Bytes of each element by way: 4 read and 4 written in each kernel.
DUE: dict[str, dict[str, int]] = {
    ONCE: {COPY: 8, EAGER: 8, BY_COMPILER: 8, RULE: 8},
    TWICE: {COPY: 8, EAGER: 8 + 8, BY_COMPILER: 8, RULE: 8, RULES: 8 + 8},
    NORM: {COPY: 8, EAGER: 8 + 8, BY_COMPILER: 8},
    # mul 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8, add 8, addcdiv 16.
    ADAMW: {COPY: 28, LOOP: 80, FOREACH: 80, FUSED: 28, COMPILED: 28, OURS: 28},
}


@pytest.mark.parametrize("work", DUE)
def test_what_is_fused_must_move_what_its_kernels_read_and_write(work: str) -> None:
    unit, ways = WORKS[work](CPU, True)
    assert {name: way.due for name, way in ways.items()} == DUE[work]
    assert unit == {ONCE: 1 << 14, TWICE: 1 << 14, NORM: 16 * 256, ADAMW: 3 * 64 * 64}[work]
    for name in (COPY, EAGER) if EAGER in ways else (COPY, FUSED):
        call = ways[name].make()
        call()
        assert operands(call) / unit == pytest.approx(DUE[work][name], rel=0.01)  # and means, and step counts


def test_rates_are_of_bytes_that_move_and_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 floats, matrices of 64 x 64; a multiplication with addition is two operations."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))
    monkeypatch.setattr(roofline, "fused", lambda device: lambda x, y, k: y.copy_(roofline.one_by_one(x, k)))
    run = Watched()
    rows = Rows(roofline.measure(run))
    known = {row["case"]: (row["bytes"], row["flop"]) for row in rows.where(what="rate")}
    assert known == {
        roofline.COPY: (2 * 4 * 16384, 0),
        roofline.PRODUCT: (0, 2 * 64 * 64 * 64),
        roofline.LINK: (4 * 16384, 0),
    }
    assert operands(run.cases[roofline.COPY].run) == known[roofline.COPY][0]
    assert {row["k"]: row["flop"] for row in rows.where(what="chain")} == {k: 2 * k * 16384 for k in (1, 2, 4, 8, 16)}


class Wire:
    """A link of 1,000 bytes, without memory behind it."""

    def __init__(self) -> None:
        self.nbytes, self.near = 1000, torch.zeros(2000, dtype=torch.uint8)
        self.cases = in_place.InPlace.cases.__get__(self)
        self.up = self.down = self.both = lambda: None

    @classmethod
    def of(cls, run: Run) -> Wire:
        return cls()

    def in_place(self, blocks: int) -> None: ...

    def best_blocks(self, run: Run) -> tuple[int, list[Row]]:
        return 8, [{"blocks": 8}]


def test_the_link_moves_the_bytes_of_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is of 1,000 bytes; in place twice as many are read and written; so many does a copy on the device."""
    for module in (link, close_to_a_copy):
        monkeypatch.setattr(module, "InPlace", Wire)
    run = Watched()
    moved = {row["what"]: row["moved"] for row in link.measure(run) if row["kind"] == link.CEILING}
    assert moved == {"up": 1000, "down": 1000, "both ways": 2000, "plain kernel in place": 4000, "HBM copy": 4000}
    assert operands(run.cases[link.HBM].run) == moved[link.HBM]
    for module in (close_to_a_copy, paged):
        monkeypatch.setattr(module, "QUICK", Work("small", [(4096,)]))
    monkeypatch.setattr(builds, "ours", lambda **_: builds.theirs(foreach=True))  # nothing to compile
    known = {row["case"]: row["bytes"] for row in close_to_a_copy.away(run)}
    assert (known.pop(close_to_a_copy.BOTH_WAYS), known.pop(IN_PLACE)) == (2000, 4000)
    assert set(known.values()) == {2 * 2 * (4096 + 16 * 4)}, "codes and scales of two moments, up and down"


def test_trips_and_the_bridge_are_counted() -> None:
    """8 tensors of 64 x 64: a truck of 8 makes one trip, one of 1 makes 8; the limit is a sixth of the parameters."""
    rows = Rows(trucks.measure(Watched())).where(key="bytes cost", way=FOREACH)
    assert {row["size"]: row["trips"] for row in rows} == {1: 8, 8: 1}
    assert {row["bridge"] for row in rows} == {8 * 64 * 64 * 4 // 6}
    assert trucks.TENSORS == 512
    group = {"key": "a", "size": 4, "trips": 2, "extra": 4 * 100 * 4, "numel": 800, "bridge": 0, "passes": True}
    (row,) = trucks.derive(Rows([{**group, **clocks(1.0)}]))
    assert row["from_one"] == 0, "a group of 100 x 4 parameters, a float each"


# --- launches

#: As torch 2.11 has them in 4 KB of arguments.
SMALL = Limits((110, 64, 48, 36, 30), (320,) * 5, (96, 64, 48, 36, 30), 65536)
#: Launches over 1,000 tensors: as many kernels as the operation has, or lists of 110, 64, 48 and 36 tensors a launch
#: (with a scalar each 96, of three lists 48).
LAUNCHES = {
    "add": {LOOP: 1000, FOREACH: 16, LIST: 1},
    "SGD": {LOOP: 1000, FOREACH: 16, FUSED: 16, DEFAULT: 16, LIST: 1},
    "AdamW": {
        LOOP: 8000, FOREACH: 10 + 16 + 10 + 21 + 16 + 11 + 10 + 21, FUSED: 28 + 10, DEFAULT: 115, LIST: 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_launches_what_is_counted_by_hand(operation: Any) -> None:
    known = LAUNCHES[operation.name]
    assert {rung: operation.expected(rung, [6] * 1000, SMALL) for rung in known} == known


#: Operators over 5 tensors on a CPU: torch counts steps of AdamW in a tensor for each, and in one call for all.
OPERATORS = {
    "add": {LOOP: 5, FOREACH: 1, LIST: 0},
    "SGD": {LOOP: 5, FOREACH: 1, FUSED: 1, DEFAULT: 5, LIST: 0},
    "AdamW": {LOOP: 45, FOREACH: 9, FUSED: 2, DEFAULT: 45, LIST: 0},
}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_calls_the_operators_that_are_counted_by_hand(operation: Any) -> None:
    found = {rung: counts.row(operation, rung, 5, CPU) for rung in OPERATORS[operation.name]}
    assert {rung: row["operators"] for rung, row in found.items()} == OPERATORS[operation.name]
    assert {rung: row["expected"] for rung, row in found.items()} == OPERATORS[operation.name]


# --- times


def test_queued_steps_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred, 7 µs each, and 50 µs until the device is idle."""
    now = [1.0]

    def spend(us: float) -> None:
        now[0] += us / 1e6

    monkeypatch.setattr(clip_and_scale.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: spend(50.0))
    assert clip_and_scale.mean_of_queued(lambda: spend(7.0)) == pytest.approx(7.5)
