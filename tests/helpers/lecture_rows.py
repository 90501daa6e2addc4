"""Rows that bear the claims of the lectures out, and rows that do not."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


FOREACH, FUSED, BY_DEFAULT = "torch foreach", "torch fused", "torch, by default"
LIST, PAGED, ON_DEVICE = "one pointer list (ours)", "PagedAdamW", "PagedAdamW, device"


def us(median: float) -> Row:
    return {"median": median, "p10": median, "p90": median, "n": 9}


def counted(operation: str, kernels: dict[str, int]) -> list[Row]:
    """The kernels of some rungs."""
    about = {"what": "count", "operation": operation, "count": 1000, "operators": 9}
    return [{**about, "rung": rung, "kernels": number} for rung, number in kernels.items()]


def gpt2(case: str, ms: float, mib: float, **more: Any) -> Row:
    about = {"key": "gpt2", "work": "GPT-2", "case": case, "time": 1e3 * ms, "clock": "GPU"}
    return {**about, "need": mib * 2**20, "state": mib * 2**20, **more}


def shaped(fused: float) -> list[Row]:
    """Ours and torch's fused over large tensors, and over a thousand, for which torch's takes ``fused`` ms."""
    times = (("llama", ON_DEVICE, 6), ("llama", FUSED, 7.2), ("1000", ON_DEVICE, 0.1), ("1000", FUSED, fused))
    return [gpt2(case, ms, 1, key=key, work=key, share=95.0, numel=855_700_000) for key, case, ms in times]


def unaligned(cost: float) -> list[Row]:
    return [{"optimizer": name, "where": "one element off", "cost": cost} for name in (FUSED, FOREACH, PAGED)]


def listed(way: str, wall: float, launches: int = 1, count: int = 1000, copied: int = 0) -> Row:
    about = {"lists": 4, "mode": "rewritten", "way": way, "count": count}
    return {**about, "launches": launches, "copied_bytes": copied, "wall": us(wall)}


def attempt(name: str, outcome: str) -> Row:
    return {"name": name, "outcome": outcome, "message": "said so"}


def way(case: str, kernels: int, wall: float) -> Row:
    about = {"of": "way", "batch": 1024, "case": case, "kernels": kernels}
    return {**about, "wall": us(wall), "busy_us": 9.0, "faster": 2.0}


def apart(combined: float) -> list[Row]:
    """How far two ways are from the first; ``combined``: the one that is not compiled."""
    differences = {"combined": combined, "combined, compiled": 5e-7}
    return [{"of": "way", "case": case, "difference": d, "of_eager": 0.8} for case, d in differences.items()]


def normed(larger: float) -> list[Row]:
    """LayerNorm of few rows, and of many, which takes ``larger`` times a slice."""
    times = {1024: 1.0, 16384: larger}
    return [{"operation": "LayerNorm", "where": "one tensor", "rows": n, "of_slice": of} for n, of in times.items()]


def replayed(allocations: int) -> list[Row]:
    about = {"work": "split_stack", "kernels": 36, "operators": 0, "allocations": allocations}
    return [{**about, "mode": mode, "launches": n} for mode, n in (("eager", 36), ("replayed", 1))]


def truck(where: str, size: int, passes: bool = True, key: str = "trips cost", time: float = 5.0) -> Row:
    about = {"key": key, "way": where, "size": size, "trips": 512 // size}
    return {**about, "time": time, "clock": "wall", "passes": passes, "bridge": 2**20}


def written(case: str, share: float) -> Row:
    return {"case": case, "share": share, "lines": 200, "time": 9.0, "clock": "GPU"}


def line(text: str, kernels: int, waited: bool = False) -> Row:
    return {"line": text, "kernels": kernels, "copies": 0, "waited": waited}


TORCH, PINNED = "torch.tensor(ptrs).to(cuda)", "….pin_memory(), non_blocking"
STRAIGHT = {"what": "line", "operation": "AdamW", "rung": "torch loop", "a": 0.0, "b": 8.0, "farthest": 0.0}
LONG = listed("struct 4 KB", 180, 12)
BYTES = "bytes cost"
#: Rows that bear a claim out, and rows that do not; for those that something can be said against.
MADE: dict[str, tuple[list[Row], list[Row]]] = {
    "A1": (
        [gpt2("torch loop", 8, 1), gpt2(FOREACH, 3, 2), gpt2(FUSED, 1, 3)],
        [gpt2("torch loop", 8, 949), gpt2(FOREACH, 3, 1424), gpt2(FUSED, 1, 949.1)],
    ),
    "A2": ([truck(FOREACH, 1, time=9), truck(FOREACH, 8)], [truck(FOREACH, 1), truck(FOREACH, 8, time=9)]),
    "A3": (
        [truck(FOREACH, 8, key=BYTES), truck(FOREACH, 512, False, BYTES), truck(PAGED, 512, key=BYTES)],
        [truck(FOREACH, 512, key=BYTES), truck(PAGED, 512, key=BYTES)],
    ),
    "A4": (counted("SGD", {"torch loop": 1000}), counted("SGD", {"torch loop": 999})),
    "A5": (
        [STRAIGHT, *counted("AdamW", {"torch loop": 8000})],
        [{**STRAIGHT, "farthest": 3.0}, *counted("AdamW", {"torch loop": 8003})],
    ),
    "A6": (counted("AdamW", {FOREACH: 115, BY_DEFAULT: 115}), counted("AdamW", {FOREACH: 115, BY_DEFAULT: 38})),
    "A7": (counted("AdamW", {FUSED: 1, LIST: 1}), counted("AdamW", {FUSED: 38, LIST: 1})),
    "A8": (
        [LONG, listed("struct 32 KB", 68, 2), listed("managed", 31)],
        [LONG, listed("struct 32 KB", 300, 2), listed("managed", 31)],
    ),
    "A9": (counted("add", {"torch loop": 1000, FOREACH: 16}), counted("add", {"torch loop": 1000, FOREACH: 1000})),
    "A10": (
        [attempt("vector_nvcc", "left out"), attempt("host_list", "fails")],
        [attempt("vector_nvrtc", "fails"), attempt("host_list", "works")],
    ),
    "A11": ([attempt("launch_three_lists", "works")], [attempt("launch_three_lists", "fails")]),
    "A12": ([attempt("cut_by_hand", "works")], [attempt("cut_by_hand", "fails")]),
    "A13": ([attempt("source_norm_424", "fails")], [attempt("source_norm_424", "works")]),
    "A14": ([LONG], [listed("struct 4 KB", 20)]),
    "A16": ([LONG, listed(TORCH, 90), listed("memcpy", 30)], [LONG, listed(TORCH, 300), listed("memcpy", 30)]),
    "A19": (
        [listed("none", 951), listed("preferred host, accessed by", 244)],
        [listed("none", 250), listed("preferred host, accessed by", 244)],
    ),
    "A20": (
        [listed("hybrid", 30, count=10), listed("hybrid", 30, copied=8)],
        [listed("hybrid", 30, count=10), listed("hybrid", 30)],
    ),
    "A21": (unaligned(1.2), unaligned(1.0)),
    "C1": (
        [written("torch.compile of foreach", 80), written(FUSED, 81), written(PAGED, 95)],
        [written("torch.compile of foreach", 99), written(FUSED, 81), written(PAGED, 95)],
    ),
    "C2": (
        [line("y = x + 1", 1), line("print(y)", 9, True), line("torch.cos(y)", 1), line("torch.relu(z)", 1)],
        [line("y = x + 1", 1), line("print(y)", 9), line("torch.cos(y)", 1), line("torch.relu(z)", 1)],
    ),
    "C7": (
        [gpt2(ON_DEVICE, 1, 949), gpt2("PagedAdamW, bfloat16 state", 1, 474.6), gpt2("PagedAdamW, 0% on device", 1, 1)],
        [gpt2(ON_DEVICE, 1, 949), gpt2("PagedAdamW, float64 state", 1, 1900)],
    ),
    "C14": (shaped(0.4), shaped(0.125)),
    "D1": ([way("split_stack", 36, 400)], [way("split_stack", 35, 400)]),
    "D2": ([way("combined", 5, 50)], [way("combined", 6, 50)]),
    "D3": (normed(7.5), normed(17.5)),
    "D4": ([way("split_stack, compiled", 19, 99)], [way("split_stack, compiled", 20, 99)]),
    "D5": ([way("combined, compiled", 3, 99)], [way("combined, compiled", 5, 99)]),
    "D6": (
        [way("split_stack", 36, 400), way("combined", 5, 50), way("pointer list", 4, 40)],
        [way("split_stack", 36, 400), way("combined", 5, 50), way("pointer list", 4, 500)],
    ),
    "D8": (apart(0.0), apart(1e-9)),
    "D10": (replayed(0), replayed(3)),
    "D11": (
        [{"reason": "bugs", "holds": True}],
        [{"reason": "bugs", "holds": True}, {"reason": "memory", "holds": False}],
    ),
}
