"""Rows that bear the claims of the lectures out, and rows that do not."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def us(median: float, clock: str = "wall") -> Row:
    return {"clock": clock, "median": median, "p10": median, "p90": median, "n": 9}


def counted(operation: str, rung: str, kernels: int, count: int = 1000, operators: int = 9) -> Row:
    about = {"what": "count", "operation": operation, "rung": rung}
    return {**about, "count": count, "kernels": kernels, "operators": operators}


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


def replayed(mode: str, launches: int) -> Row:
    return {"work": "split_stack", "mode": mode, "kernels": 36, "launches": launches, "operators": 0, "allocations": 0}


def normed(rows: int, of_slice: float) -> Row:
    return {"operation": "LayerNorm", "where": "one tensor", "rows": rows, "of_slice": of_slice, "clock": "GPU"}


def fused(case: str, difference: float) -> Row:
    return {"of": "way", "case": case, "difference": difference, "of_eager": 0.8}


def shifted(optimizer: str) -> Row:
    return {"optimizer": optimizer, "where": "one element off", "cost": 1.2}


def shipped(kind: str, wheels: int) -> Row:
    return {"kind": kind, "wheels": wheels, "machines": 225}


def begun(case: str, cold: float, warm: float) -> Row:
    return {"case": case, "cold": us(cold), "warm": us(warm), "build": us(20.0), "tag": "cp312-cp312-linux_x86_64"}


def first(way: str, count: int, seconds: float, **more: Any) -> Row:
    return {"what": "step", "way": way, "count": count, "clock": "wall", "first_s": seconds, **more}


def own(way: str, count: int, kernels: int) -> Row:
    return {"way": way, "count": count, "kernels": kernels}


def logged(setting: str, paths: int) -> Row:
    return {"what": "way", "case": f"TORCH_LOGS={setting}", "paths": paths}


def written(case: str) -> Row:
    return {"what": "code", "case": case, "kernels": 1, "loads": 4, "stores": 2, "intermediates": 6}


def summed(way: str, harms: int) -> Row:
    about = {"what": "sum", "way": way, "hazards": 8, "wrong": 1, "crashes": 2}
    return {**about, "harms": harms, "bad": harms}


def copied(holder: str, updates: str) -> Row:
    return {"holder": holder, "how": "deepcopy", "updates": updates}


def traffic(work: str, case: str = "torch.compile", kernels: int = 1) -> Row:
    return {"work": work, "case": case, "kernels": kernels, "inductor_each": 8.0, "model_each": 8.0 * kernels}


def stepped(case: str, nbytes: int, gpu: float) -> Row:
    about = {"place": "resident", "device": "cuda", "work": "268 M fp32", "case": case}
    return {**about, "bytes": nbytes, "gpu": us(gpu, "GPU")}


def sent(case: str, rate: float) -> Row:
    return {"what": "copy", "case": case, "rate": rate, "clock": "GPU"}


def spilled(of_passes: float) -> Row:
    return {"width": 256, "threads": 1024, "spilled": 80, "of_passes": us(of_passes, "GPU")}


def optimizer(name: str, became: str) -> Row:
    return {"what": "class", "name": name, "became": became}


PHASES = ("what is imported", "Dynamo traces", "AOTAutograd", "Inductor, graph", "Inductor, kernels", "Triton or g++")
UNCHANGED = {"way": "foreach, lr a float", "change": "nothing", "steps": 12, "ran": 12, "eager": 0, "again": 0}
NOT_COMPILED = [optimizer(name, "not compiled") for name in ("LBFGS", "SparseAdam")]
TORCH, PINNED = "torch.tensor(ptrs).to(cuda)", "….pin_memory(), non_blocking"
LONG = listed("struct 4 KB", 180, 12)
STRAIGHT = {"what": "line", "operation": "AdamW", "rung": "torch loop", "a": 0.0, "b": 8.0, "farthest": 0.0}
SHAPES = [weighed("PagedAdamW, device", 6, key="llama"), weighed("torch fused", 7.2, key="llama")]
#: Rows that bear a claim out, and other cells of the last one with which they do not; of what can be said against.
MADE: dict[str, tuple[list[Row], Row]] = {
    "A1": (
        [weighed("torch loop", 8, 2), weighed("torch fused", 1, 1), weighed("torch foreach", 3, 3)],
        {"need": 1.5 * 2**20},
    ),
    "A2": ([truck("torch foreach", 8), truck("torch foreach", 1, 9)], {"time": us(1)}),
    "A3": (
        [truck("PagedAdamW", 512), truck("torch foreach", 8), truck("torch foreach", 512, passes=False)],
        {"passes": True},
    ),
    "A4": ([counted("SGD", "torch loop", 1000)], {"kernels": 999}),
    "A5": ([counted("AdamW", "torch loop", 8000), STRAIGHT], {"farthest": 3.0}),
    "A6": ([counted("AdamW", "torch foreach", 115), counted("AdamW", "torch, by default", 115)], {"kernels": 38}),
    "A7": (
        [
            counted("AdamW", "one pointer list (ours)", 1),
            counted("AdamW", "torch foreach", 115),
            counted("AdamW", "torch fused", 38),
            counted("AdamW", "torch fused", 2, 36, 2),
        ],
        {"kernels": 3},
    ),
    "A8": ([listed("managed", 31), listed("struct 32 KB", 68, 2), LONG], {"wall": us(60)}),
    "A9": ([counted("add", "torch loop", 1000), counted("add", "torch foreach", 16)], {"kernels": 1000}),
    "A10": ([attempt("vector_nvcc", "left out"), attempt("host_list", "fails")], {"outcome": "works"}),
    "A11": ([attempt("launch_three_lists", "works")], {"outcome": "fails"}),
    "A13": ([attempt("source_norm_424", "fails")], {"outcome": "works"}),
    "A14": ([LONG], {"launches": 1}),
    "A15": ([listed(TORCH, 900), listed("memcpy", 30), listed(PINNED, 950)], {"launches": 12}),
    "A16": ([listed(TORCH, 900), LONG, listed("memcpy", 30)], {"wall": us(200)}),
    "A17": (
        [summed("torch, graph", 6), summed("pagedopt", 0), summed("pagedopt, graph", 0), summed("bare addresses", 5)],
        {"harms": 0},
    ),
    "A18": ([{"kind": "device", "cpu_reads": "ends the process"}, {"what": "sum", "same": 3, "both": 3}], {"same": 2}),
    "A19": ([listed("preferred host, accessed by", 244), listed("none", 951)], {"wall": us(250)}),
    "A20": ([listed("hybrid", 30, count=10), listed("hybrid", 30, copied=8)], {"copied_bytes": 0}),
    "A21": ([shifted("torch foreach"), shifted("PagedAdamW"), shifted("torch fused")], {"cost": 1.0}),
    "A22": ([UNCHANGED], {"again": 2}),
    "A23": ([*NOT_COMPILED, optimizer("Adafactor", "compiled")], {"became": "not compiled"}),
    "A24": ([{"what": "capability", "least": 7, "here": 9, "cuda": "13.0"}], {"least": 8}),
    "A25": ([own("Lion, _foreach", 110, 2), own("Signum, _foreach", 110, 2)], {"kernels": 330}),
    "A26": (
        [
            own("Lion, loop with combo_kernels", 36, 5),
            own("Lion, loop", 36, 36),
            own("Lion, _foreach", 36, 36),
        ],
        {"kernels": 1},
    ),
    "A27": ([weighed("PagedAdamW, device", 1), weighed("Triton over our table", 2)], {"time": us(900)}),
    "A28": (
        [
            first("compiled, cold", 1, 3.0),
            {"what": "power", "way": "compiled, cold", "last": 2.0},
            first("compiled, cold", 148, 50.0),
        ],
        {"first_s": 3.0},
    ),
    "A29": (
        [
            first("compiled, cold", 110, 22.0),
            first("compiled, portable cache", 110, 4.0),
            first("compiled, warm", 110, 3.0),
        ],
        {"first_s": 22.0},
    ),
    "A30": ([logged("output_code", 2), logged("inductor", 1)], {"paths": 0}),
    "A31": ([{"what": "graph", "count": 30, "kernels": 2}], {"kernels": 0}),
    "A32": ([written("AdamW, foreach"), written("SGD, foreach")], {"intermediates": 0}),
    "A34": (
        [
            copied("DeviceTable", "its own"),
            copied("torch.optim.SGD", "its own"),
            copied("bare addresses", "the original's"),
        ],
        {"updates": "its own"},
    ),
    "A35": ([{"what": "sum", "bytes": 2**34, "spoiled": 0, "copies": 16}], {"spoiled": 1}),
    "A36": ([{"what": "all", "default": 0, "others": 90, "right": 60, "refused": 20, "worse": 10}], {"default": 1}),
    "A37": (
        [
            *(sent(name, 300) for name in ("cuMemcpyPeerAsync", "a kernel over tensors of both")),
            *(sent(f"a kernel that {does} there", 300) for does in ("reads", "writes")),
            sent("through pinned host memory", 25),
        ],
        {"rate": 400},
    ),
    "C2": (
        [line("y = x + 1", 1), line("torch.cos(y)", 1), line("torch.relu(z)", 1), line("print(y)", 9, True)],
        {"waited": False},
    ),
    "C3": (
        [
            {"what": "rate", "case": "memory, a copy", "rate": 4000.0},
            {"what": "knee", "balance": 14.8, "of_product": 204.0},
            {"what": "rate", "case": "link, host to device", "rate": 55.0},
        ],
        {"rate": 5000.0},
    ),
    "C4": (
        [traffic("square", "torch.compile"), traffic("square of square", "eager", 2), traffic("square of square")],
        {"kernels": 2},
    ),
    "C5": ([spilled(2.2)], {"spilled": 0}),
    "C6": (
        [
            {"work": "attention", "case": "torch.compile", "share": 0.008, "keeps": 0},
            {"work": "attention with a term", "case": "torch.compile", "share": 1.01, "keeps": 1},
        ],
        {"keeps": 0},
    ),
    "C7": ([stepped("PagedAdamW", 28, 1800), stepped("PagedAdamW, int8 stochastic", 16, 1300)], {"gpu": us(1900)}),
    "C9": ([begun("load_inline", 12.0, 0.3), begun("C++ extension, built ahead", 0.01, 0.01)], {"cold": us(13.0)}),
    "C8": (
        [
            {"told": "nothing", "graphs": 2, "compiled": "refused"},
            {"told": "and its gradient", "differentiated": "right", "compiled and differentiated": "right"},
            {"told": "and a fake", "compiled": "right", "differentiated": "wrong"},
        ],
        {"compiled": "refused"},
    ),
    "C12": (
        [
            {"case": "compiled, torch's operators", "all": 1},
            {"case": "rules, composed (ours)", "all": 1},
            {"case": "compiled, opaque", "all": 3},
        ],
        {"all": 1},
    ),
    "C13": (
        [
            {"what": "mistake", "case": "a rule (ours)", "at": "a.py:7: no", "named": True},
            {"what": "mistake", "case": "a string of CUDA", "at": "x.cu(3): no", "named": False},
        ],
        {"named": True},
    ),
    "C14": (
        [*SHAPES, weighed("PagedAdamW, device", 0.1, key="1000"), weighed("torch fused", 0.4, key="1000")],
        {"time": us(125, "GPU")},
    ),
    "C10": ([shipped("any_torch", 9), shipped("full", 225), shipped("pagedopt", 1)], {"wheels": 225}),
    "C11": ([begun("torch.compile", 20, 5), begun("PagedAdamW", 0.5, 0.3)], {"cold": us(0.2)}),
    "D1": ([way("split_stack", 36, 400)], {"kernels": 35}),
    "D2": ([way("combined", 5, 50)], {"kernels": 6}),
    "D3": ([normed(1024, 1.0), normed(16384, 7.5)], {"of_slice": 17.5}),
    "D4": ([way("split_stack", 36, 400, 94), way("split_stack, compiled", 19, 99, 73)], {"kernels": 20}),
    "D5": ([way("combined", 5, 50, 47), way("combined, compiled", 3, 99, 15)], {"busy_us": 50.0}),
    "D6": ([way("split_stack", 36, 400), way("combined", 5, 50), way("pointer list", 4, 40)], {"wall": us(500)}),
    "D7": (
        [
            {"work": "LayerNorm and tanh", "case": "eager", "moved": 16.0, "saved": 0.0},
            {"work": "LayerNorm and tanh", "case": "torch.compile", "moved": 8.0, "saved": 0.5},
        ],
        {"saved": 0.33},
    ),
    "D8": ([fused("combined, compiled", 5e-7), fused("combined", 0.0)], {"difference": 1e-9}),
    "D9": ([spilled(2.2)], {"of_passes": us(0.8, "GPU")}),
    "D10": ([replayed("eager", 36), replayed("replayed", 1)], {"allocations": 3}),
    "D11": (
        [{"reason": "bugs", "today": "not seen here"}, {"reason": "no dynamic shapes", "today": "shown"}],
        {"today": "no longer"},
    ),
    "D12": (
        [first("compiled, cold", 148, 50.0, phases=dict.fromkeys(PHASES, 10.0))],
        {"phases": {**dict.fromkeys(PHASES, 10.0), "AOTAutograd": 0.0}},
    ),
}
