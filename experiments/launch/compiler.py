"""The puzzlers' seven reasons against the compiler, each as a small test that says whether it holds today.

Each function gives a number, its unit, the words for it, and whether the reason ``holds``; its docstring is what it
asks.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from experiments.harness.rows import Row, best, over
from experiments.harness.run import Run
from experiments.harness.time import Case, measure
from experiments.works.fresh import fresh
from experiments.works.slices import COMBO, Slices, backend, combo, compiled, forget
from experiments.works.trace import counted

#: Seconds after which a first call is given up.
LIMIT = 300
#: From which part on one is faster than the other.
CLEARLY = 1.05
#: Rows of a slice.
BATCH, BATCHES = 1024, (64, 128, 256, 512, 1024, 2048)
Function = Callable[[torch.Tensor], torch.Tensor]
Test = Callable[[Run], Row]


@dataclass(frozen=True)
class Reason:
    """A reason of the puzzlers', its test, and whether toys on a CPU can do that in a moment."""

    name: str
    test: Test
    quick: bool


REASONS: list[Reason] = []


def reason(name: str, quick: bool = False) -> Callable[[Test], Test]:
    """A test of a reason, which is put on the list."""

    def listed(test: Test) -> Test:
        REASONS.append(Reason(name, test, quick))
        return test

    return listed


def says(number: float | None, unit: str, holds: bool, words: str, **more: Any) -> Row:
    """What a test found."""
    return {"number": number, "unit": unit, "holds": holds, "says": words, **more}


#: Programs with a result to compare; x is (64, 256).
PROGRAMS: dict[str, Function] = {
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


@reason("bugs")
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
    words = f"of {len(PROGRAMS)} programs, forward and backward, {len(wrong)} fail or are wrong"
    return says(len(wrong), "programs", bool(wrong), "; ".join([words, *wrong]))


def first_call(device: str, batch: int, kind: str) -> Iterator[Row]:
    """In a process of its own: wall times of the first compiled call, of later ones, and of eager ones."""
    work = Slices(batch, torch.device(device))
    eager, way = work.way(work.split_stack), work.way(compiled(work.split_stack, kind))
    eager()
    first = measure([Case("first", way)], work.x.device, rounds=1, warmup=0)
    later = measure([Case("eager", eager), Case("compiled", way)], work.x.device, rounds=101)
    yield {name: timing["wall"] for name, timing in {**first, **later}.items()}


@reason("compile time")
def compile_time(run: Run) -> Row:
    """Compile time: with empty caches, after how many calls has the first one paid?"""
    ended = fresh(first_call, str(run.device), BATCH, backend(run), limit=LIMIT)
    if not ended.row:
        return says(None, "calls", True, f"the first call: {ended.ended}")
    first, eager, later = (ended.row[name]["median"] for name in ("first", "eager", "compiled"))
    calls = first / (eager - later) if eager > later else None
    paid = f"it has paid after {calls:,.0f} calls" if calls else "it never pays"
    words = f"the first call takes {first / 1e6:.1f} s, later ones {later:.0f} µs (eager {eager:.0f}): {paid}"
    return says(calls, "calls", first > 1e6, words, clock="wall", **ended.row)


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


@reason("memory")
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
    more = max(peaks.values()) / peaks["eager"]
    words = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in peaks.items())
    return says(more, "x eager's", more > CLEARLY, words, peaks=peaks)


#: Operation → from (rows, columns) what to call; a product is of squares.
NATIVE: dict[str, Function] = {
    "LayerNorm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: torch.softmax(x, -1),
    "mm": lambda x: x @ x.T,
}
WIDE = ((64, 256), (16384, 256), (1024, 4096), (64, 65536))
SHAPES = {"LayerNorm": WIDE, "softmax": WIDE, "mm": ((64, 64), (1024, 1024), (4096, 4096), (4096, 64))}


@reason("slower for some shapes", quick=True)
def slower_shapes(run: Run) -> Row:
    """Slower shapes: where are torch's own kernels faster than what it makes?"""
    shapes = [(name, size) for name, sizes in SHAPES.items() for size in sizes[: 4 if run.device.type == "cuda" else 2]]
    ratios = {}
    for name, size in run.size(shapes, shapes[:1]):
        forget()
        x = torch.rand(*size, device=run.device)
        functions = {"eager": NATIVE[name], "compiled": compiled(NATIVE[name], backend(run))}
        timings = run.measure([Case(way, partial(f, x), repeats=8) for way, f in functions.items()], seconds=0.3)
        eager = best(timings["eager"])
        ratios[f"{name} {size[0]:,} x {size[1]:,}"] = over(best(timings["compiled"]), eager) or 0.0
    lost = [f"{shape} {ratio:.2f} x" for shape, ratio in ratios.items() if ratio >= CLEARLY]
    words = f"in {len(lost)} of {len(ratios)} shapes the native kernel is faster"
    words = f"{words}: {', '.join(lost)}" if lost else words
    return says(len(lost), f"of {len(ratios)} shapes", bool(lost), words, clock=eager["clock"], ratios=ratios)


@reason("no dynamic shapes", quick=True)
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
    return says(graphs, "graphs", graphs >= len(BATCHES), f"{graphs} graphs for {len(BATCHES)} batch sizes")


def sines(x: torch.Tensor, count: int) -> torch.Tensor:
    """So many operations, one after the other."""
    for _ in range(count):
        x = torch.sin(x)
    return x


#: Name → what stands between ten sines and nine.
BETWEEN = {
    "nothing": "pass",
    "print(x.shape)": "print(x.shape)",
    "print(x)": "print(x)",
    "logger.info": "logger.info('%s', x.shape)",
    "x[0].item()": "x = x + x[0].item()",
}
LOGGING = ("print(x.shape)", "print(x)", "logger.info")
#: Functions that may be called later, if one says so; nobody need know this setting.
REORDERED = "print(x), declared reorderable"


def chain(line: str) -> Function:
    """Nineteen sines, and a line behind the tenth."""
    names: dict[str, Any] = {"sines": sines, "logger": logging.getLogger(__name__)}
    exec(f"def chain(x):\n    x = sines(x, 10)\n    {line}\n    return sines(x, 9)", names)
    found: Function = names["chain"]
    return found


@reason("logging ends fusion", quick=True)
def logging_fusion(run: Run) -> Row:
    """Logging ends fusion: into how many graphs do a print, a logger, an ``.item()`` cut nineteen operations?"""
    x = torch.rand(1024, device=run.device)
    found = {name: cut_by(chain(line), x) for name, line in BETWEEN.items()}
    with torch._dynamo.config.patch(reorderable_logging_functions={print}):
        found[REORDERED] = cut_by(chain("print(x)"), x)
    cut = [name for name in LOGGING if len(found[name]["operations"]) > len(found["nothing"]["operations"])]
    words = [
        f"{name}: {' + '.join(map(str, row['operations']))} operations"
        + ("" if row["kernels"] is None else f", {row['kernels']} kernels")
        for name, row in found.items()
    ]
    return says(len(cut), f"of {len(LOGGING)} kinds of logging cut the graph", bool(cut), "; ".join(words), cut=found)


def cut_by(function: Function, x: torch.Tensor) -> Row:
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


@reason("no horizontal fusion")
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
    off, on, _ = kernels.values()
    words = ", ".join(f"{name} {count} kernels" for name, count in kernels.items())
    return says(on, "kernels", on >= off, words, kernels=kernels)
