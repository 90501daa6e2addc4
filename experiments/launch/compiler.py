"""The puzzlers' seven reasons against the compiler, each as a small test that says whether it holds today.

Each function gives a number, the words for it, and whether the reason ``holds``; its docstring is what it asks.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from experiments.harness.rows import Row
from experiments.harness.run import Run
from experiments.harness.time import Case
from experiments.launch.puzzlers import BATCH, forget
from experiments.works.fresh import fresh
from experiments.works.slices import COMBO, Slices, backend, combo, compiled
from experiments.works.trace import counted

#: Seconds after which a first call is given up.
LIMIT = 300
#: From which part on one is faster than the other.
CLEARLY = 1.05
BATCHES = (64, 128, 256, 512, 1024, 2048)

#: Programs with a result to compare; x is (64, 256).
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LayerNorm, tanh": lambda x: torch.tanh(functional.layer_norm(x, (256,))),
    "cumsum": lambda x: x.cumsum(1),
    "sort, gather": lambda x: x.gather(1, x.argsort(1)),
    "softmax": lambda x: torch.softmax(x @ x.T, 1),
    "group_norm": lambda x: functional.group_norm(x.view(64, 16, 16), 4),
    "conv1d": lambda x: functional.conv1d(x.view(8, 8, 256), x[:8, :24].view(8, 8, 3)),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(64, device=x.device) // 2, x),
    "embedding": lambda x: functional.embedding(torch.arange(128, device=x.device) % 64, x),
    "logsumexp, where": lambda x: torch.where(x > 0.5, x, 0 * x).logsumexp(1),
    "attention": lambda x: functional.scaled_dot_product_attention(heads := x.view(1, 4, 16, 256), heads, heads),
}


def bugs(run: Run) -> Row:
    """Bugs: of some usual programs, how many does it fail to compile, or get wrong, forward or backward?"""
    wrong = []
    for name, program in PROGRAMS.items():
        forget()
        results = []
        try:
            for function in (program, compiled(program, backend(run))):
                x = torch.rand(64, 256, device=run.device, generator=torch.Generator(run.device).manual_seed(1))
                x.requires_grad_()
                y = function(x)
                y.square().sum().backward()
                results.append((y.detach(), x.grad))
            for mine, theirs in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)  # cuDNN may take TF32
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).strip()[:150]}")
    says = f"of {len(PROGRAMS)} programs, forward and backward, {len(wrong)} fail or are wrong"
    return {"number": len(wrong), "unit": "programs", "holds": bool(wrong), "says": "; ".join([says, *wrong])}


def first_call(device: str, batch: int, kind: str) -> Iterator[dict[str, float]]:
    """In a process of its own: seconds of the first compiled call, µs of later ones, MiB the process grew by."""
    import resource

    work = Slices(batch, torch.device(device))
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)

    def once(way: Callable[[], torch.Tensor]) -> float:
        wait()
        begin = time.perf_counter()
        way()
        wait()
        return time.perf_counter() - begin

    eager, way = work.way(work.split_stack), work.way(compiled(work.split_stack, kind))
    eager()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = once(way)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    times = {name: 1e6 * sorted(once(f) for _ in range(101))[50] for name, f in (("eager", eager), ("compiled", way))}
    yield {"first_s": first, "eager_us": times["eager"], "compiled_us": times["compiled"], "grown_mib": grown}


def compile_time(run: Run) -> Row:
    """Compile time: with empty caches, after how many calls has the first one paid?"""
    ended = fresh(first_call, str(run.device), BATCH, backend(run), limit=LIMIT)
    if not (found := ended.row):
        return {"number": None, "unit": "calls", "holds": True, "says": f"the first call: {ended.ended}"}
    saved = found["eager_us"] - found["compiled_us"]
    calls = 1e6 * found["first_s"] / saved if saved > 0 else None
    paid = f"it has paid after {calls:,.0f} calls" if calls else "it never pays"
    says = (
        f"the first call takes {found['first_s']:.1f} s, later ones {found['compiled_us']:.0f} µs "
        f"(eager {found['eager_us']:.0f}): {paid}"
    )
    return {"number": calls, "unit": "calls", "holds": found["first_s"] > 1, "says": says, **found}


def taken(device: str, batch: int, how: str) -> Iterator[dict[str, float]]:
    """In a process of its own: MiB that torch's allocator has reserved beyond the input after four calls.

    What lies in the private pools of CUDA graphs is reserved, and counted as allocated only while they are recorded.
    """
    work = Slices(batch, torch.device(device))
    mode = {"mode": how} if how == "reduce-overhead" else {}
    function = work.split_stack if how == "eager" else compiled(work.split_stack, **mode)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(4):  # what a graph holds is the call's, too
        out = function(work.x)
    torch.cuda.synchronize()
    yield {"mib": (torch.cuda.memory_reserved() - before) / 2**20, "returned": out.nbytes / 2**20}


def memory(run: Run) -> Row:
    """Memory: does a call need more of the device, compiled or with ``reduce-overhead``?"""
    if run.device.type != "cuda":
        raise NotImplementedError("what a call takes of a device is known on a GPU alone")
    peaks = {}
    for how in ("eager", "compiled", "reduce-overhead"):
        ended = fresh(taken, str(run.device), 16 * BATCH, how, limit=LIMIT)
        if not (found := ended.row) or found["mib"] < found["returned"]:
            raise RuntimeError(f"{how}: {found or ended.ended}")
        peaks[how] = found["mib"]
    most = max(peaks["compiled"], peaks["reduce-overhead"])
    says = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in peaks.items())
    holds = most > CLEARLY * peaks["eager"]
    return {"number": most / peaks["eager"], "unit": "x eager's", "holds": holds, "says": says, "peaks": peaks}


#: Operation → from (rows, columns) what to call; a product is of squares.
NATIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LayerNorm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: torch.softmax(x, -1),
    "mm": lambda x: x @ x.T,
}
SHAPES = {
    "LayerNorm": ((64, 256), (16384, 256), (1024, 4096), (64, 65536)),
    "softmax": ((64, 256), (16384, 256), (1024, 4096), (64, 65536)),
    "mm": ((64, 64), (1024, 1024), (4096, 4096), (4096, 64)),
}


def slower_shapes(run: Run) -> Row:
    """Slower shapes: where are torch's own kernels faster than what it makes?"""
    ratios = {}
    shapes = SHAPES if run.device.type == "cuda" else {name: found[:2] for name, found in SHAPES.items()}
    for name, sizes in {"LayerNorm": ((64, 256),)}.items() if run.quick else shapes.items():
        for size in sizes:
            forget()
            x = torch.rand(*size, device=run.device)
            functions = {"eager": NATIVE[name], "compiled": compiled(NATIVE[name], backend(run))}
            cases = [Case(way, partial(f, x), repeats=8) for way, f in functions.items()]
            best = {way: timing["best"] for way, timing in run.measure(cases, seconds=0.3).items()}
            ratios[f"{name} {size[0]:,} x {size[1]:,}"] = best["compiled"] / best["eager"]
    lost = [f"{shape} {ratio:.2f} x" for shape, ratio in ratios.items() if ratio >= CLEARLY]
    says = f"in {len(lost)} of {len(ratios)} shapes the native kernel is faster" + (
        f": {', '.join(lost)}" if lost else ""
    )
    return {
        "number": len(lost),
        "unit": f"of {len(ratios)} shapes",
        "holds": bool(lost),
        "says": says,
        "ratios": ratios,
    }


def dynamic_shapes(run: Run) -> Row:
    """No dynamic shapes: how many graphs does it make for six batch sizes?"""
    forget()
    function = torch.compile(Slices.combined, backend="eager" if run.device.type == "cpu" else "inductor")
    from torch._dynamo.utils import counters

    counters.clear()
    for batch in BATCHES:
        work = Slices(batch, run.device, slices=1)
        function(work, work.x)
    graphs = int(counters["stats"]["unique_graphs"])
    says = f"{graphs} graphs for {len(BATCHES)} batch sizes"
    return {"number": graphs, "unit": "graphs", "holds": graphs >= len(BATCHES), "says": says}


def sines(x: torch.Tensor, count: int) -> torch.Tensor:
    """So many operations, one after the other."""
    for _ in range(count):
        x = torch.sin(x)
    return x


def with_nothing(x: torch.Tensor) -> torch.Tensor:
    return sines(sines(x, 10), 9)


def with_print(x: torch.Tensor) -> torch.Tensor:
    x = sines(x, 10)
    print(x.shape)
    return sines(x, 9)


def with_printed_numbers(x: torch.Tensor) -> torch.Tensor:
    x = sines(x, 10)
    print(x)
    return sines(x, 9)


def with_logger(x: torch.Tensor) -> torch.Tensor:
    x = sines(x, 10)
    LOG.info("%s", x.shape)
    return sines(x, 9)


def with_item(x: torch.Tensor) -> torch.Tensor:
    x = sines(x, 10)
    first = x[0].item()
    return sines(x, 9) + first


LOG = logging.getLogger(__name__)
CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": with_nothing,
    "print(x.shape)": with_print,
    "print(x)": with_printed_numbers,
    "logger.info": with_logger,
    "x[0].item()": with_item,
}
LOGGING = ("print(x.shape)", "print(x)", "logger.info")
#: Functions that may be called later, if one says so; nobody need know this setting.
REORDERED = "print(x), declared reorderable"


def logging_fusion(run: Run) -> Row:
    """Logging ends fusion: into how many graphs do a print, a logger, an ``.item()`` cut nineteen operations?"""
    x = torch.rand(1024, device=run.device)
    found = {name: cut_by(function, x) for name, function in CHAINS.items()}
    with torch._dynamo.config.patch(reorderable_logging_functions={print}):
        found[REORDERED] = cut_by(with_printed_numbers, x)
    parts = [
        f"{name}: {' + '.join(map(str, row['operations']))} operations"
        + (f", {row['kernels']} kernels" if row["kernels"] is not None else "")
        for name, row in found.items()
    ]
    cut = [name for name in LOGGING if len(found[name]["operations"]) > len(found["nothing"]["operations"])]
    return {"number": len(cut), "unit": f"of {len(LOGGING)} kinds of logging cut the graph", "holds": bool(cut),
            "says": "; ".join(parts), "cut": found}  # fmt: skip


def cut_by(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Row:
    """Operations of each graph that comes of a function, and on a GPU the kernels."""
    forget()
    kernels = None
    with contextlib.redirect_stdout(io.StringIO()):
        explained = torch._dynamo.explain(function)(x)
        if x.is_cuda:
            forget()
            kernels = counted(partial(compiled(function), x)).kernels
    return {"operations": [n for ops in explained.ops_per_graph if (n := len(ops))], "kernels": kernels}


def add_one(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A list at a time."""
    return list(torch._foreach_add(tensors, 1.0))


def horizontal(run: Run) -> Row:
    """No horizontal fusion: how many kernels has split_stack with combo kernels off and on, and a foreach list?"""
    if run.device.type != "cuda":
        raise NotImplementedError("combo kernels are Triton's: they need a GPU")
    work = Slices(BATCH, run.device)
    tensors = [torch.rand(1000, device=run.device) for _ in range(100)]
    ways: dict[str, Callable[[], object]] = {
        "by default": work.way(compiled(work.split_stack)),
        f"with {COMBO}": work.way(compiled(work.split_stack, options=combo())),
        "a foreach list of 100": partial(compiled(add_one), tensors),
    }
    kernels = {}
    for name, way in ways.items():
        forget()
        kernels[name] = counted(way).kernels
    on = kernels[f"with {COMBO}"]
    says = ", ".join(f"{name} {count} kernels" for name, count in kernels.items())
    return {"number": on, "unit": "kernels", "holds": on >= kernels["by default"], "says": says, "kernels": kernels}


#: The puzzlers' reason → its test, and whether toys on a CPU can do it in a moment.
REASONS: dict[str, tuple[Callable[[Run], Row], bool]] = {
    "bugs": (bugs, False),
    "compile time": (compile_time, False),
    "memory": (memory, False),
    "slower for some shapes": (slower_shapes, True),
    "no dynamic shapes": (dynamic_shapes, True),
    "logging ends fusion": (logging_fusion, True),
    "no horizontal fusion": (horizontal, False),
}
