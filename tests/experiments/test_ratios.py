"""Shares, ratios and rates that experiments derive from rows, each held to a small case that is worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from experiment_runs import asked, clocks

from experiments.clock import series
from experiments.lab import Row, Rows
from experiments.launch import puzzlers, replays
from experiments.paging import rivals, sweep
from experiments.step import clip_and_scale, close_to_a_copy, codes, fsdp2, sixteen_bits
from experiments.vertical import roofline, spill
from experiments.works import link
from experiments.works.first_steps import COLD
from experiments.works.models import COPY, FUSED, GRAPH, OURS
from experiments.works.witnesses import BY_COMPILER, EAGER


def one(us: float, clock: str = "wall") -> dict[str, Any]:
    return series([us], clock)


def queued(case: str, wall: float, gpu: float, each: float) -> Row:
    return {"work": clip_and_scale.IN_GRAPHS, "case": case, **clocks(wall, gpu), "queued": one(each)}


def step(case: str, gpu: float, nbytes: int = 28_000, **about: Any) -> Row:
    return {"key": "gpt2", "device": "cuda", "work": "w", "numel": 1000, "bytes": nbytes, "case": case,
            **clocks(2 * gpu, gpu), **about}  # fmt: skip


def in_8(case: str, gpu: float, nbytes: int = 16_000, place: str = "resident") -> Row:
    return {"place": place, "device": "cuda", "case": case, "bytes": nbytes, **clocks(2 * gpu, gpu)}


def learned(case: str, loss: float, moved: float, apart: float, lr: float = 1e-4) -> Row:
    return {"what": "training", "case": case, "lr": lr, "seed": 0, "loss": loss, "moved": moved, "apart": apart}


def sixteen(what: str, case: str, gpu: float, nbytes: int) -> Row:
    return {"what": what, "case": case, "device": "cuda", "bytes": nbytes, "error": None, **clocks(2 * gpu, gpu)}


def swept(case: str, share: float, time: float, way: str = "mapped, staged") -> Row:
    about = {"kind": sweep.TIME, "way": way, "share": share, "case": case, "away": 1 - share, "host_bytes": 8000}
    return {**about, **clocks(9 * time, time)}


def clipped(case: str, time: float) -> Row:
    return {"key": "gpt2", "what": "step", "case": case, "device": "cuda", "numel": 1, "bytes": 32,
            **clocks(2 * time, time)}  # fmt: skip


def coded(decay: float, code: str, error: float) -> Row:
    about = {"family": "AdamW", "which": codes.BOTH, "beta1": 0.9, "decay": decay, "code": code}
    return {**about, "error": error, "turned": 0.0, "bias": -2.0}


#: Question, rows as they are measured, which of them is looked at, what must be derived.
CASES: dict[str, tuple[str, list[Row], dict[str, Any], dict[str, Any]]] = {
    "a copy of 28 bytes in 80 µs is 80 % of a step in 100": (
        "close_to_a_copy",
        [step(OURS, 100), step(FUSED, 160), step(COPY, 80)],
        {"case": OURS},
        {"share": 80, "over_fused": 1.6, "over_fused_wall": 1.6, "of_ours": 1, "rate": 28_000 / 100e-6 / 1e9},
    ),
    "torch's bfloat16 moments are 14 bytes of the copy's 22": (
        "close_to_a_copy",
        [step(name, 100, 22_000, key=close_to_a_copy.BF16) for name in (OURS, FUSED, COPY)],
        {"case": FUSED},
        {"share": 100 * 14 / 22, "rate": 14_000 / 100e-6 / 1e9},
    ),
    "a replay that waits 60 µs is held to 1.05 x 40 + 15": (
        "captured_step",
        [queued(OURS, 100, 40, 90), queued(FUSED, 600, 50, 90), queued(GRAPH, 120, 50, 80),
         queued(clip_and_scale.CAPTURED, 60, 41, 57)],
        {"case": clip_and_scale.CAPTURED},
        {"of_kernel": 57 / 57, "of_fused": 10, "of_graph": 0.5, "queued_of_graph": 57 / 80},
    ),
    "state in 8 bits": (
        "in_8_bits",
        [in_8(OURS, 150, 28_000), in_8(close_to_a_copy.NEAREST, 100), in_8(close_to_a_copy.RIVAL, 400), in_8(COPY, 75)],
        {"case": close_to_a_copy.NEAREST},
        {"share": 75, "over_rival": 4, "over_fp32": 1.5, "rate": 16_000 / 100e-6 / 1e9, "ms": 0.1},
    ),
    "two seeds, and float32 at the same rate": (
        "sixteen_bits",
        [learned("float32", 1.0, 90, 0), learned("float32", 9.0, 90, 0, 1e-3), learned("+8", 1.5, 80, 2),
         learned("+8", 1.25, 60, 4)],
        {"case": "+8"},
        {"loss": 1.375, "spread": 0.25, "seeds": 2, "behind": 0.375, "moved": 70, "apart": 3},
    ),
    "6 bytes over the link in 33 µs, where it moves 20 in 100": (
        "sixteen_bits",
        [sixteen("away", sixteen_bits.EIGHT_INT8, 33, 6_000), sixteen("away", link.BOTH, 100, 20_000)],
        {"case": sixteen_bits.EIGHT_INT8},
        {"of_link": (33 / 6) / (100 / 20), "share": 100 * (100 / 20) / (33 / 6)},
    ),
    "in place, 4 bytes in 50 µs beside 16 in 100": (
        "in_8_bits",
        [in_8(link.IN_PLACE, 100, 16_000, "away"), in_8("int8, in place", 50, 4_000, "away"),
         in_8("int8, staged", 50, 4_000, "away")],
        {"case": "int8, in place"},
        {"share_in_place": 50},
    ),
    "the error of a code": (
        "codes",
        [coded(0.9, codes.OURS, 2.0), coded(0.99, codes.OURS, 4.0), coded(0.99, codes.RIVAL, 16.0),
         coded(0.99, codes.BFLOAT16, 1.0)],
        {"code": codes.OURS, "decay": 0.99},
        {"of_rival": 0.25, "of_nine": 2, "half": 1, "off": 2, "remembers": 100, "allowed": "yes"},
    ),
    "a call of slices": (
        "puzzlers",
        [{"of": "way", "batch": 1024, "device": "cuda", "case": case, "kernels": kernels, **clocks(us)}
         for case, kernels, us in ((puzzlers.SPLIT, 38, 300), (puzzlers.COMBINED, 5, 100), (puzzlers.LIST, 4, 50))],
        {"case": puzzlers.SPLIT},
        {"off": 2, "faster": 1, "of_combined": 3},
    ),
    "a replay": (
        "replays",
        [{"work": "w", "mode": mode, "kernels": kernels, **clocks(us)}
         for mode, kernels, us in ((replays.EAGER, 36, 300), (replays.REPLAY, 35, 60))],
        {"mode": replays.REPLAY},
        {"off": 1, "faster": 5},
    ),
    "a rival that takes three times as long": (
        "rivals",
        [{"name": name, "what": what, "wall": one(us)}
         for name, what, us in ((rivals.OURS, "step", 50), (rivals.RIVAL, rivals.SAME, 150),
                                (rivals.RIVAL, rivals.ALONE, 60))],
        {"what": rivals.SAME},
        {"over": 3, "alone": 60, "piece": False},
    ),
    "state on the host: 8,000 bytes up and down in 100 µs, where a copy of 4,000 both ways takes 40": (
        "sweep",
        [{"kind": sweep.BITS, "way": "mapped, staged", "same": True, "copy_bytes": 4000},
         swept(sweep.STEP, 0.0, 100), swept(sweep.BOTH, 0.0, 40),
         swept(sweep.STEP, 1.0, 11), swept(sweep.DEVICE, 1.0, 10)],
        {"kind": sweep.SAYS},
        {"rate": 16_000 / 100e-6 / 1e9, "of_ceiling": 80, "near": 10, "bits": "same"},
    ),
    "the plain kernel reads and writes 2 x 4,000 bytes in 80 µs": (
        "sweep",
        [{"kind": sweep.BITS, "way": "mapped, in place", "same": True, "copy_bytes": 4000},
         swept(sweep.STEP, 0.0, 100, "mapped, in place"), swept(sweep.IN_PLACE, 0.0, 80, "mapped, in place")],
        {"kind": sweep.SAYS},
        {"of_ceiling": 80},
    ),
    "2,000 bytes away, up and down at once, where 1,000 take 10 µs": (
        "fsdp2",
        [{"kind": fsdp2.LINK, "bytes": 1000, "time": one(10, "GPU")},
         *({"kind": fsdp2.TURNS, "what": what, "away": away}
           for what in ("iterations", "steps") for away in (0, 2000))],
        {"what": "steps", "away": 2000},
        {"floor": 20, "clock": "GPU"},
    ),
    "a clipped step beside a copy of its bytes and torch's": (
        "clip_and_scale",
        [clipped(OURS, 107), clipped(COPY, 100), clipped(FUSED, 214)],
        {"case": OURS},
        {"of_copy": 1.07, "of_torch_wall": 0.5},
    ),
    "16 slices beside one": (
        "saturation",
        [{"case": "LayerNorm, one tensor", "rows": n, "bytes": 2048 * n, **clocks(us)}
         for n, us in ((1024, 4.0), (16384, 28.4))],
        {"rows": 16384},
        {"of_slice": 7.1, "rate": 2048 * 16384 / 28.4e-6 / 1e9},
    ),
    "a first step of 3 s at N = 1, 12 at 2 and 48 at 4": (
        "first_call",
        [{"way": COLD, "count": n, "phases": {"all": 2.7 * n**2}, "first": one(3.0 * n**2), "later": one(9)}
         for n in (1, 2, 4)],
        {"what": "power"},
        {"exponent": 2, "last": 2},
    ),
    "the slope of the loop": (
        "counts",
        [{"operation": "AdamW", "rung": "loop", "count": n, "device": "cuda", "operators": 9, "kernels": 8 * n + 2,
          "expected": 8 * n} for n in (1, 10, 100)],
        {"what": "line"},
        {"a": 2, "b": 8, "farthest": 0},
    ),
    "a kernel too many": (
        "counts",
        [{"operation": "AdamW", "rung": FUSED, "count": 5, "device": "cuda", "operators": 9, "kernels": 41,
          "expected": 40}],
        {},
        {"off": 1, "off_batched": 1},
    ),
    "12 of 16 bytes are saved": (
        "traffic",
        [{"work": "w", "case": case, "device": "cuda", "unit": 1000, "model": model, "inductor": inductor,
          "ncu": None, "ncu_read": None, **clocks(us)} for case, model, inductor, us in
         ((EAGER, 16_000, None, 20), (BY_COMPILER, None, 4_000, 10), (COPY, 8_000, None, 9))],
        {"case": BY_COMPILER},
        {"moved": 4, "saved": 0.75, "faster": 2, "share": 90},
    ),
    "a chain of 64 additions takes the time of one: 128 operations for 8 bytes": (
        "roofline",
        [{"what": "rate", "case": case, "bytes": nbytes, "flop": flop, **clocks(1e3)}
         for case, nbytes, flop in ((roofline.COPY, 8 * 10**9, 0), (roofline.PRODUCT, 0, 10**12))]
        + [{"what": "chain", "case": roofline.FUSED, "k": k, "bytes": 0, "flop": 2 * k * 10**9,
            **clocks(1e3 * max(1, k / 64))} for k in (1, 64, 256)],
        {"what": "knee"},
        {"knee": 64, "balance": 16, "of_product": 125, "free": 64},
    ),
    "a kernel that spills": (
        "spill",
        [{"width": 8, "spill_stores": 3, "spill_loads": 4, spill.FUSED: clocks(9, 6), spill.PASSES: clocks(9, 3)}],
        {},
        {"of_passes": 2, "spilled": 7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_derived_is_worked_out_by_hand(case: str) -> None:
    name, rows, where, wanted = CASES[case]
    row = asked(name).derive(Rows(rows)).first(**where)
    assert row is not None
    derived = {column: row[column] for column in wanted}
    medians = {column: value["median"] if isinstance(value, dict) else value for column, value in derived.items()}
    assert medians == pytest.approx(wanted)
