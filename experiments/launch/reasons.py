"""The puzzlers gave seven reasons not to leave fusion to a compiler: which of them hold today?

Answer (H200, torch 2.11, 2026-11): compile time and logging are shown.  Dynamic shapes are supported now, and lists of
foreach fused, so two reasons are gone.  Three say what may happen, and it was not seen: bugs in ten usual programs,
more memory, slower shapes (in 0 or 1 of 12, by run: a softmax, 1.08 x).

A small test each.  A reason is shown where its test finds what it says, however
seldom.  One that says what may happen is not refuted by a test that does not find it.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from experiments import child
from experiments.clock import Case
from experiments.comparing import best, over
from experiments.lab import Column, Page, Row, Rows, Run, number
from experiments.works.fresh import fresh
from experiments.works.slices import COMBO, Slices, backend, combo, compiled, forget
from experiments.works.trace import counted

# --- the puzzlers' seven reasons against the compiler, each as a small test that says whether it holds today

#: Seconds after which a first call is given up; from which part on one is faster than the other.
LIMIT, CLEARLY = 300, 1.05
#: Rows of a slice.
BATCH, BATCHES = 1024, (64, 128, 256, 512, 1024, 2048)
Function = Callable[[torch.Tensor], torch.Tensor]
Test = Callable[[Run], Row]


def says(number: float | None, unit: str, holds: bool, words: str, **more: Any) -> Row:
    """What a test found: a number, the words for it, whether the reason holds."""
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


def ran(function: Function, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A program's result, and the gradient of its input."""
    x = torch.rand(64, 256, device=device, generator=torch.Generator(device).manual_seed(1)).requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def bugs(run: Run) -> Row:
    """Bugs: of some usual programs, how many does it fail to compile, or get wrong, forward or backward?"""
    wrong = []
    for name, program in PROGRAMS.items():
        forget()
        try:
            mine, theirs = ran(program, run.device), ran(compiled(program, backend(run)), run.device)
            torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-3)  # cuDNN may take TF32
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).strip()[:150]}")
    words = f"of {len(PROGRAMS)} programs, forward and backward, {len(wrong)} fail or are wrong"
    return says(len(wrong), "programs", bool(wrong), "; ".join([words, *wrong]))


def first_call(device: str, batch: int, kind: str) -> Iterator[Row]:
    """In a process of its own: wall times of the first compiled call, of later ones, and of eager ones."""
    work = Slices(batch, torch.device(device))
    eager, way = work.way(work.split_stack), work.way(compiled(work.split_stack, kind))
    eager()
    run = Run(work.x.device)
    first = run.measure([Case("first", way)], rounds=1, warmup=0)
    later = run.measure([Case("eager", eager), Case("compiled", way)], rounds=101)
    yield {name: timing["wall"] for name, timing in {**first, **later}.items()}


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
    mode = how if how == "reduce-overhead" else None
    function = work.split_stack if how == "eager" else compiled(work.split_stack, mode=mode)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(4):  # what a graph holds is the call's, too
        out = function(work.x)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved() - before
    assert reserved >= out.nbytes, "less than the call returned"
    yield {"mib": reserved / 2**20}


def memory(run: Run) -> Row:
    """Memory: does a call need more of the device, compiled or with ``reduce-overhead``?"""
    ways = ("eager", "compiled", "reduce-overhead")
    peaks = {how: child.only(taken, str(run.device), 16 * BATCH, how, limit=LIMIT)["mib"] for how in ways}
    eager, *others = peaks.values()
    more = max(others) / eager
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
    words = f"in {len(lost)} of {len(ratios)} shapes the native kernel is faster" + ": " * bool(lost) + ", ".join(lost)
    return says(len(lost), f"of {len(ratios)} shapes", bool(lost), words, clock=eager["clock"], ratios=ratios)


def dynamic_shapes(run: Run) -> Row:
    """No dynamic shapes: how many graphs does it make for six batch sizes?"""
    forget()
    function = torch.compile(Slices.combined, backend="eager")  # how many graphs there are is not the backend's choice
    counters = torch._dynamo.utils.counters
    counters.clear()
    for batch in BATCHES:
        work = Slices(batch, run.device, slices=1)
        function(work, work.x)
    graphs = int(counters["stats"]["unique_graphs"])
    return says(graphs, "graphs", graphs >= len(BATCHES), f"{graphs} graphs for {len(BATCHES)} batch sizes")


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
    names: dict[str, Any] = {"torch": torch, "logger": logging.getLogger(__name__)}
    sines = "for _ in range({}): x = torch.sin(x)"
    exec("\n    ".join(["def chain(x):", sines.format(10), line, sines.format(9), "return x"]), names)
    return names["chain"]


def logging_fusion(run: Run) -> Row:
    """Logging ends fusion: into how many graphs do a print, a logger, an ``.item()`` cut nineteen operations?"""
    x = torch.rand(1024, device=run.device)
    found = {name: cut_by(run, chain(line), x) for name, line in BETWEEN.items()}
    with torch._dynamo.config.patch(reorderable_logging_functions={print}):
        found[REORDERED] = cut_by(run, chain("print(x)"), x)
    cut = [name for name in LOGGING if len(found[name]["operations"]) > len(found["nothing"]["operations"])]
    words = [
        f"{name}: {' + '.join(map(str, row['operations']))} operations"
        + ("" if row["kernels"] is None else f", {row['kernels']} kernels")
        for name, row in found.items()
    ]
    return says(len(cut), f"of {len(LOGGING)} kinds of logging cut the graph", bool(cut), "; ".join(words), cut=found)


def cut_by(run: Run, function: Function, x: torch.Tensor) -> Row:
    """Operations of each graph that comes of a function, and on a GPU the kernels."""
    forget()
    kernels = None
    with contextlib.redirect_stdout(io.StringIO()):
        explained = torch._dynamo.explain(function)(x)
        if x.is_cuda and not run.quick:
            forget()
            kernels = counted(partial(compiled(function), x)).kernels
    return {"operations": [n for ops in explained.ops_per_graph if (n := len(ops))], "kernels": kernels}


def horizontal(run: Run) -> Row:
    """No horizontal fusion: how many kernels has split_stack with combo kernels off and on, and a foreach list?"""
    if run.device.type != "cuda":
        raise NotImplementedError("combo kernels are Triton's: they need a GPU")
    work = Slices(BATCH, run.device)
    tensors = [torch.rand(1000, device=run.device) for _ in range(100)]
    ways: dict[str, Callable[[], object]] = {
        "by default": work.way(compiled(work.split_stack)),
        f"with {COMBO}": work.way(compiled(work.split_stack, options=combo())),
        "a foreach list of 100": partial(compiled(lambda tensors: torch._foreach_add(tensors, 1.0)), tensors),
    }
    kernels = {name: counted(way).kernels for name, way in ways.items()}
    off, on, _ = kernels.values()
    words = ", ".join(f"{name} {count} kernels" for name, count in kernels.items())
    return says(on, "kernels", on >= off, words, kernels=kernels)


# --- the question

REASONS: dict[str, Test] = {
    "bugs": bugs,
    "compile time": compile_time,
    "memory": memory,
    "slower for some shapes": slower_shapes,
    "no dynamic shapes": dynamic_shapes,
    "logging ends fusion": logging_fusion,
    "no horizontal fusion": horizontal,
}
#: Those that toys can do in a moment, without Inductor.
QUICK = ("slower for some shapes", "no dynamic shapes", "logging ends fusion")
#: Reasons with a hedge: "not all bugs", "can lead to", "can be".
HEDGED = ("bugs", "compile time", "memory", "slower for some shapes")
SHOWN, NOT_SEEN, GONE = "shown", "not seen here", "no longer"


def measure(run: Run) -> Iterator[Row]:
    """A row per reason: a number, what it says, whether the reason holds."""
    run.rounds, run.seconds = run.size((40, 0.5), (3, 0.1))
    for reason, test in run.each(REASONS.items()):
        if run.quick and reason not in QUICK:
            run.leave_out(f"{reason}: takes longer than toys may")
            continue
        with run.attempt(reason, (Exception,)):
            yield {"reason": reason, "device": run.device.type, **test(run)}
        forget()


def derive(rows: Rows) -> Rows:
    """What today says to each."""
    return Rows({**row, "today": today(row)} for row in rows)


def today(row: Row) -> str:
    """Of one reason."""
    return SHOWN if row["holds"] else NOT_SEEN if row["reason"] in HEDGED else GONE


def by_today(rows: Rows) -> dict[str, list[str]]:
    """Names of reasons by what today says to them."""
    return {word: [row["reason"] for row in rows.where(today=word)] for word in (SHOWN, NOT_SEEN, GONE)}


def sentence(rows: Rows) -> str:
    """Which are which."""
    parts = [f"{word}: {', '.join(names)}" for word, names in by_today(rows).items() if names]
    return f"Of {len(rows)} reasons that were tried: {'; '.join(parts)}."


COLUMNS: dict[str, Column] = {
    "reason": "reason",
    "today": "today",
    "number": lambda row: f"{number(row['number'])} {row['unit']}",
    "found": "says",
}


def report(page: Page, rows: Rows) -> None:
    """A table and what follows."""
    page.table("seven reasons against the compiler, {device}", rows, COLUMNS)
    page.say(sentence(rows))
