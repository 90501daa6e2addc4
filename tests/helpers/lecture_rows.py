"""Rows that bear the claims of the lectures out, and rows that do not."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def us(median: float) -> Row:
    return {"median": median, "p10": median, "p90": median, "n": 9}


def counted(operation: str, rung: str, kernels: int) -> Row:
    return {"what": "count", "operation": operation, "rung": rung, "count": 1000, "kernels": kernels, "operators": 9}


def gpt2(case: str, ms: float, mib: float, **more: Any) -> Row:
    about = {"key": "gpt2", "work": "GPT-2", "case": case, "time": 1e3 * ms, "clock": "GPU"}
    return {**about, "need": mib * 2**20, "state": mib * 2**20, **more}


def shaped(key: str, case: str, ms: float) -> Row:
    return gpt2(case, ms, 1, key=key, work=key, share=95.0, numel=855_700_000)


def listed(way: str, wall: float, launches: int = 1, count: int = 1000, copied: int = 0) -> Row:
    about = {"lists": 4, "mode": "rewritten", "way": way, "count": count}
    return {**about, "launches": launches, "copied_bytes": copied, "wall": us(wall)}


def attempt(name: str, outcome: str) -> Row:
    return {"name": name, "outcome": outcome, "message": "said so"}


def way(case: str, kernels: int, wall: float) -> Row:
    return {
        "of": "way",
        "batch": 1024,
        "case": case,
        "kernels": kernels,
        "wall": us(wall),
        "busy_us": 9.0,
        "faster": 2.0,
    }


def truck(where: str, size: int, passes: bool = True, key: str = "trips cost", time: float = 5.0) -> Row:
    return {
        "key": key,
        "way": where,
        "size": size,
        "trips": 512 // size,
        "time": time,
        "clock": "wall",
        "passes": passes,
        "bridge": 2**20,
    }


def written(case: str, share: float) -> Row:
    return {"case": case, "share": share, "lines": 200, "time": 9.0, "clock": "GPU"}


def line(text: str, kernels: int, waited: bool = False) -> Row:
    return {"line": text, "kernels": kernels, "copies": 0, "waited": waited}


TORCH, PINNED = "torch.tensor(ptrs).to(cuda)", "….pin_memory(), non_blocking"
STRAIGHT = {"what": "line", "operation": "AdamW", "rung": "torch loop", "a": 0.0, "b": 8.0, "farthest": 0.0}
LONG = listed("struct 4 KB", 180, 12)
#: Rows that bear a claim out, and rows that do not; for those that something can be said against.
MADE: dict[str, tuple[list[Row], list[Row]]] = {
    "A1": (
        [gpt2("torch loop", 8, 1), gpt2("torch foreach", 3, 2), gpt2("torch fused", 1, 3)],
        [gpt2("torch loop", 8, 949), gpt2("torch foreach", 3, 1424), gpt2("torch fused", 1, 949.1)],
    ),
    "A2": (
        [truck("torch foreach", 1, time=9), truck("torch foreach", 8)],
        [truck("torch foreach", 1), truck("torch foreach", 8, time=9)],
    ),
    "A3": (
        [
            truck("torch foreach", 8, key="bytes cost"),
            truck("torch foreach", 512, False, "bytes cost"),
            truck("PagedAdamW", 512, key="bytes cost"),
        ],
        [truck("torch foreach", 512, key="bytes cost"), truck("PagedAdamW", 512, key="bytes cost")],
    ),
    "A4": ([counted("SGD", "torch loop", 1000)], [counted("SGD", "torch loop", 999)]),
    "A5": (
        [STRAIGHT, counted("AdamW", "torch loop", 8000)],
        [{**STRAIGHT, "farthest": 3.0}, counted("AdamW", "torch loop", 8003)],
    ),
    "A6": (
        [counted("AdamW", "torch foreach", 115), counted("AdamW", "torch, by default", 115)],
        [counted("AdamW", "torch foreach", 115), counted("AdamW", "torch, by default", 38)],
    ),
    "A7": (
        [counted("AdamW", "torch fused", 1), counted("AdamW", "one pointer list (ours)", 1)],
        [counted("AdamW", "torch fused", 38), counted("AdamW", "one pointer list (ours)", 1)],
    ),
    "A8": (
        [LONG, listed("struct 32 KB", 68, 2), listed("managed", 31)],
        [LONG, listed("struct 32 KB", 300, 2), listed("managed", 31)],
    ),
    "A9": (
        [counted("add", "torch loop", 1000), counted("add", "torch foreach", 16)],
        [counted("add", "torch loop", 1000), counted("add", "torch foreach", 1000)],
    ),
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
    "A21": (
        [
            {"optimizer": name, "where": "one element off", "cost": 1.2}
            for name in ("torch fused", "torch foreach", "PagedAdamW")
        ],
        [
            {"optimizer": name, "where": "one element off", "cost": 1.0}
            for name in ("torch fused", "torch foreach", "PagedAdamW")
        ],
    ),
    "C1": (
        [written("torch.compile of foreach", 80), written("torch fused", 81), written("PagedAdamW", 95)],
        [written("torch.compile of foreach", 99), written("torch fused", 81), written("PagedAdamW", 95)],
    ),
    "C2": (
        [line("y = x + 1", 1), line("print(y)", 9, True), line("torch.cos(y)", 1), line("torch.relu(z)", 1)],
        [line("y = x + 1", 1), line("print(y)", 9), line("torch.cos(y)", 1), line("torch.relu(z)", 1)],
    ),
    "C7": (
        [
            gpt2("PagedAdamW, device", 1, 949),
            gpt2("PagedAdamW, bfloat16 state", 1, 474.6),
            gpt2("PagedAdamW, 0% on device", 1, 1),
        ],
        [gpt2("PagedAdamW, device", 1, 949), gpt2("PagedAdamW, float64 state", 1, 1900)],
    ),
    "C14": (
        [
            *(shaped("llama", case, ms) for case, ms in (("PagedAdamW, device", 6), ("torch fused", 7.2))),
            *(shaped("1000", case, ms) for case, ms in (("PagedAdamW, device", 0.1), ("torch fused", 0.4))),
        ],
        [
            *(shaped("llama", case, ms) for case, ms in (("PagedAdamW, device", 6), ("torch fused", 7.2))),
            *(shaped("1000", case, ms) for case, ms in (("PagedAdamW, device", 0.1), ("torch fused", 0.125))),
        ],
    ),
    "D1": ([way("split_stack", 36, 400)], [way("split_stack", 35, 400)]),
    "D2": ([way("combined", 5, 50)], [way("combined", 6, 50)]),
    "D3": (
        [
            {"operation": "LayerNorm", "where": "one tensor", "rows": rows, "of_slice": of}
            for rows, of in ((1024, 1.0), (16384, 7.5))
        ],
        [
            {"operation": "LayerNorm", "where": "one tensor", "rows": rows, "of_slice": of}
            for rows, of in ((1024, 1.0), (16384, 17.5))
        ],
    ),
    "D4": ([way("split_stack, compiled", 19, 99)], [way("split_stack, compiled", 20, 99)]),
    "D5": ([way("combined, compiled", 3, 99)], [way("combined, compiled", 5, 99)]),
    "D6": (
        [way("split_stack", 36, 400), way("combined", 5, 50), way("pointer list", 4, 40)],
        [way("split_stack", 36, 400), way("combined", 5, 50), way("pointer list", 4, 500)],
    ),
    "D8": (
        [
            {"of": "way", "case": case, "difference": d, "of_eager": 0.8}
            for case, d in (("combined", 0.0), ("combined, compiled", 5e-7))
        ],
        [
            {"of": "way", "case": case, "difference": d, "of_eager": 0.8}
            for case, d in (("combined", 1e-9), ("combined, compiled", 5e-7))
        ],
    ),
    "D10": (
        [
            {"work": "split_stack", "mode": mode, "kernels": 36, "launches": n, "operators": 0, "allocations": 0}
            for mode, n in (("eager", 36), ("replayed", 1))
        ],
        [
            {"work": "split_stack", "mode": mode, "kernels": 36, "launches": n, "operators": 0, "allocations": 3}
            for mode, n in (("eager", 36), ("replayed", 1))
        ],
    ),
    "D11": (
        [{"reason": "bugs", "holds": True}],
        [{"reason": "bugs", "holds": True}, {"reason": "memory", "holds": False}],
    ),
}
