"""Rows that bear out the claims of functions in readings.py, and rows that do not."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def us(median: float, clock: str = "wall") -> Row:
    return {"clock": clock, "median": median, "p10": median, "p90": median, "n": 9}


def weighed(case: str, ms: float, mib: float = 1, key: str = "gpt2") -> Row:
    about = {"key": key, "work": key, "case": case, "share": 95.0, "lines": 200, "numel": 855_700_000, "clock": "GPU"}
    return {**about, "time": us(1e3 * ms, "GPU"), "need": mib * 2**20, "state": mib * 2**20}


def listed(way: str, wall: float, launches: int = 1, count: int = 1000, copied: int = 0) -> Row:
    about = {"lists": 4, "mode": "rewritten", "way": way, "count": count}
    return {**about, "launches": launches, "copied_bytes": copied, "wall": us(wall)}


def attempt(name: str, outcome: str) -> Row:
    return {"name": name, "outcome": outcome, "message": "said so"}


def way(case: str, kernels: int, wall: float, busy: float = 9.0) -> Row:
    return {"of": "way", "batch": 1024, "case": case, "kernels": kernels, "wall": us(wall), "busy_us": busy}


def truck(where: str, size: int, time: float = 5.0, **more: Any) -> Row:
    about = {"key": "bytes cost", "way": where, "size": size, "trips": 512 // size, "passes": True, "bridge": 2**20}
    return {**about, "clock": "wall", "time": us(time), **more}


def line(text: str, kernels: int, waited: bool = False) -> Row:
    return {"line": text, "kernels": kernels, "copies": 0, "waited": waited}


def normed(rows: int, of_slice: float) -> Row:
    return {"operation": "LayerNorm", "where": "one tensor", "rows": rows, "of_slice": of_slice, "clock": "GPU"}


def fused(case: str, difference: float) -> Row:
    return {"of": "way", "case": case, "difference": difference, "of_eager": 0.8}


def first(way: str, count: int, seconds: float, **more: Any) -> Row:
    return {"what": "step", "way": way, "count": count, "clock": "wall", "first_s": seconds, **more}


def copied(holder: str, updates: str) -> Row:
    return {"holder": holder, "how": "deepcopy", "updates": updates}


def spilled(of_passes: float) -> Row:
    return {"width": 256, "threads": 1024, "spilled": 80, "of_passes": us(of_passes, "GPU")}


def optimizer(name: str, became: str) -> Row:
    return {"what": "class", "name": name, "became": became}


PHASES = ("what is imported", "Dynamo traces", "AOTAutograd", "Inductor, graph", "Inductor, kernels", "Triton or g++")
NOT_COMPILED = [optimizer(name, "not compiled") for name in ("LBFGS", "SparseAdam")]
TORCH, PINNED = "torch.tensor(ptrs).to(cuda)", "….pin_memory(), non_blocking"
LONG = listed("struct 4 KB", 180, 12)
SHAPES = [weighed("PagedAdamW, device", 6, key="llama"), weighed("torch fused", 7.2, key="llama")]
#: Rows that bear a claim out, and other cells of the last one with which they do not.
MADE: dict[str, tuple[list[Row], Row]] = {
    "A1": (
        [weighed("torch loop", 8, 2), weighed("torch fused", 1, 1), weighed("torch foreach", 3, 3)],
        {"need": 1.5 * 2**20},
    ),
    "A3": (
        [truck("PagedAdamW", 512), truck("torch foreach", 8), truck("torch foreach", 512, passes=False)],
        {"passes": True},
    ),
    "A10": ([attempt("vector_nvcc", "left out"), attempt("host_list", "fails")], {"outcome": "works"}),
    "A16": ([listed(TORCH, 900), LONG, listed("memcpy", 30)], {"wall": us(200)}),
    "A19": ([listed("preferred host, accessed by", 244), listed("none", 951)], {"wall": us(250)}),
    "A20": ([listed("hybrid", 30, count=10), listed("hybrid", 30, copied=8)], {"copied_bytes": 0}),
    "A23": ([*NOT_COMPILED, optimizer("Adafactor", "compiled")], {"became": "not compiled"}),
    "C2": (
        [line("y = x + 1", 1), line("torch.cos(y)", 1), line("torch.relu(z)", 1), line("print(y)", 9, True)],
        {"waited": False},
    ),
    "C5": ([spilled(2.2)], {"spilled": 0}),
    "C14": (
        [*SHAPES, weighed("PagedAdamW, device", 0.1, key="1000"), weighed("torch fused", 0.4, key="1000")],
        {"time": us(125, "GPU")},
    ),
    "D3": ([normed(1024, 1.0), normed(16384, 7.5)], {"of_slice": 17.5}),
    "D9": ([spilled(2.2)], {"of_passes": us(0.8, "GPU")}),
    "D11": (
        [{"reason": "bugs", "today": "not seen here"}, {"reason": "no dynamic shapes", "today": "shown"}],
        {"today": "no longer"},
    ),
    "D12": (
        [first("compiled, cold", 148, 50.0, phases=dict.fromkeys(PHASES, 10.0))],
        {"phases": {**dict.fromkeys(PHASES, 10.0), "AOTAutograd": 0.0}},
    ),
}
