"""How many bytes does each way move, fused or not, by three witnesses?

Answer: see notes/vertical_fusion.md.

Unfused, what lies between two operators is written and read again.  A square of a square is 16 bytes of each float32 in
two kernels and 8 in one; so are LayerNorm and tanh; AdamW is 80 operator by operator and 28 in one kernel.  The
witnesses are a model (the operands of each kernel), Inductor's own count of what it compiles, and the GPU's counters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from experiments.columns import formatted, ms, percent
from experiments.comparing import by_clock_of, on_one_clock, over
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, ORANGE, PURPLE, Bars
from experiments.works import contenders
from experiments.works.models import COMPILED, COPY, FOREACH, FUSED, LOOP, OURS, Work
from experiments.works.norm_tanh import NormTanh
from experiments.works.steps import copy_of_bytes, of_copy
from experiments.works.witnesses import BY_COMPILER, EAGER, Call, Way, Works, witnessed
from pagedopt import multi_tensor_apply, rule

ONCE, TWICE, NORM, ADAMW = "square", "square of square", "LayerNorm and tanh", "AdamW"
LIST = "one kernel over a pointer list (ours)"
RULE, RULES, JITERATOR = "one rule (ours)", "two rules (ours)", "jiterator"
DIM = 256
Ways = dict[str, Way]


def once(x):
    return x * x


def again(x):
    y = x * x
    return y * y


square, square_of_square = rule(once), rule(again)


def ruled(x: torch.Tensor, out: torch.Tensor, *rules: Any) -> Call:
    """A launch of ours for each rule, with what lies between two of them in memory."""
    between = [torch.empty_like(x) for _ in rules[1:]]

    def run() -> torch.Tensor:
        for each, source, target in zip(rules, [x, *between], [*between, out], strict=True):
            multi_tensor_apply(each, [[source]], out=[[target]])
        return out

    return run


def jiterator(x: torch.Tensor, out: torch.Tensor) -> Call:
    """In torch's compiler of functions on scalars, which gives new memory."""
    text = "template <typename T> T squared(T x) { T y = x * x; return y * y; }"
    return partial(torch.cuda.jiterator._create_jit_fn(text), x)


def triton(x: torch.Tensor, out: torch.Tensor) -> Call:
    """In Triton."""
    return partial(importlib.import_module("experiments.works.triton_kernels").squared, x, out)


#: Of others, for the square of a square.
OTHERS = {JITERATOR: jiterator, "Triton": triton}


def squares(device: torch.device, quick: bool, twice: bool) -> tuple[int, Ways]:
    """Over a GiB of float32; on a CPU a quarter of that."""
    x = torch.rand(1 << (14 if quick else 28 if device.type == "cuda" else 26), device=device)
    out = torch.empty_like(x)
    function, fused = (again, square_of_square) if twice else (once, square)
    ways = {
        COPY: Way(lambda: partial(out.copy_, x), 8),
        EAGER: Way(lambda: partial(function, x), 16 if twice else 8),
        BY_COMPILER: Way(lambda: partial(torch.compile(function, dynamic=False), x), 8, compiled=True),
        RULE: Way(lambda: ruled(x, out, fused), 8, seen=False),
    }
    if twice:
        ways[RULES] = Way(lambda: ruled(x, out, square, square), 16, seen=False)
    if twice and device.type == "cuda":
        ways |= {name: Way(partial(make, x, out), 8, seen=False) for name, make in OTHERS.items()}
    return x.numel(), ways


def norm_tanh(x: torch.Tensor) -> torch.Tensor:
    """As one writes it."""
    return torch.tanh(torch.nn.functional.layer_norm(x, (DIM,), eps=0))


def norms(device: torch.device, quick: bool) -> tuple[int, Ways]:
    """Over rows of 256."""
    x = torch.rand(16 if quick else 1 << (20 if device.type == "cuda" else 16), DIM, device=device)
    ways = {
        COPY: Way(lambda: partial(torch.empty_like(x).copy_, x), 8),
        EAGER: Way(lambda: partial(norm_tanh, x), 16),
        BY_COMPILER: Way(lambda: partial(torch.compile(norm_tanh, dynamic=False), x), 8, compiled=True),
    }
    if device.type == "cuda":
        ways[LIST] = Way(lambda: NormTanh([x]), 8, seen=False)
    return x.numel(), ways


def steps(device: torch.device, quick: bool) -> tuple[int, Ways]:
    """Rungs of AdamW over tensors far larger than a cache."""
    side, count = (64, 3) if quick else (4096, 8) if device.type == "cuda" else (1024, 12)
    work = Work(ADAMW, [(side, side)] * count)

    def step(name: str) -> Call:
        return contenders.CONTENDERS[name].build(work.parameters(device)).step

    ways = {COPY: Way(lambda: copy_of_bytes(work, device).run, 28)}
    for name, due in {LOOP: 80, FOREACH: 80, FUSED: 28, COMPILED: 28, OURS: 28}.items():
        ways[name] = Way(partial(step, name), due, compiled=name == COMPILED, seen=name != OURS)
    return work.numel, ways


WORKS: Works = {ONCE: partial(squares, twice=False), TWICE: partial(squares, twice=True), NORM: norms, ADAMW: steps}


MEASURES = ("kernels", "launch", "tables", "optim")
WITNESSES = {"by the model": "model", "by Inductor": "inductor", "by ncu": "ncu"}


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way (:func:`experiments.works.witnesses.witnessed`), in bytes of each element."""
    run.rounds, run.seconds = run.size((20, 2.0), (3, 0.1))
    yield from witnessed(run, __name__, WORKS)


def derive(rows: Rows) -> Rows:
    """Bytes of each element by each witness; what is saved of the bytes of what is not fused; the share of a copy."""
    found = Rows()
    for group in rows.groups("work"):
        known = Rows(each_element(row) for row in on_one_clock(group))
        copy, most = known.first(case=COPY), known.first(case=EAGER) or known.first(case=FOREACH)
        for row in known:
            saved = 1 - row["moved"] / most["moved"] if most and row["moved"] else None
            faster = over(by_clock_of(row, most), row["time"])
            found.append({**row, "share": of_copy(row, copy), "faster": faster, "saved": saved})
    return found


def each_element(row: Row) -> Row:
    """With bytes in units of an element; ``moved`` are those by the model, or by Inductor of what it makes."""
    known = {f"{name}_each": row[name] and row[name] / row["unit"] for name in (*WITNESSES.values(), "ncu_read")}
    return {**row, **known, "moved": known["model_each"] or known["inductor_each"]}


def off(rows: Rows, witness: str) -> float | None:
    """How far bytes are off from what they must be, at most; but not jiterator's, of which the note tells."""
    each = {row["case"]: (row[f"{witness}_each"], row["due"]) for row in rows if row["case"] != JITERATOR}
    return max((abs(found / due - 1) for found, due in each.values() if found is not None), default=None)


def more_kernels(rows: Rows) -> float | None:
    """How far squares are off, at most, from a kernel for 8 bytes."""
    ways = [row for row in rows if row["work"] in (ONCE, TWICE) and row["case"] != COPY]
    return max((abs(row["kernels"] - row["due"] // 8) for row in ways if row["kernels"] is not None), default=None)


def twice_as_long(rows: Rows) -> float | None:
    """Two rules against one."""
    one, two = (rows.first(work=TWICE, case=name) for name in (RULE, RULES))
    return over(two["time"], one["time"]) if one and two else None


def color(name: str) -> str:
    """Ours, torch's, what is compiled, another's."""
    return BLUE if "(ours)" in name else {EAGER: GRAY, BY_COMPILER: PURPLE}.get(name, ORANGE)


EACH: dict[str, Callable[[Row], str]] = {
    heading: formatted(f"{name}_each", "{:.2f}") for heading, name in WITNESSES.items()
}
TITLE = "Fused, a square of a square takes the time of a square"
PANELS = [
    Bars(title=work, unit="ms", name="case", length="time", scale=1e3, line=COPY, colors=color, where={"work": work})
    for work in (ONCE, TWICE)
]


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    columns: dict[str, Column] = {"way": "case", "kernels": "kernels", "must be": "due", **EACH,
        "ms": ms("time"), "of the copy": percent("share", "{:.0f} %"), "faster": "faster"}  # fmt: skip
    title = "{work} over {unit:,} float32 on {device}: bytes of each, {clock}"
    page.table(title, rows.where(work=TWICE), columns)
    page.picture("square", rows, PANELS, TITLE)
    for work, most in ((ONCE, 0.015), (TWICE, 0.015), (NORM, 0.03), (ADAMW, 0.03)):
        for heading, name in WITNESSES.items():
            if (work, name) != (ADAMW, "inductor"):
                page.bar(f"{work}: bytes {heading}, off from what they must be", rows.where(work=work),
                    partial(off, witness=name), f"≤ {most}")  # fmt: skip
    page.bar("square and its square: kernels, off from 1 (2 of what is not fused)", rows, more_kernels, "≤ 0")
    page.bar("one rule, of a copy", rows.where(case=RULE, device="cuda"), "share", "≥ 93 %")
    page.bar("square of square, two rules against one", rows.where(device="cuda"), twice_as_long, "≥ 1.9 x")
    page.bar("square of square, two rules against one, no more than", rows.where(device="cuda"), twice_as_long,
        "≤ 2.1 x")  # fmt: skip
    page.bar("AdamW, ours against foreach", rows.where(work=ADAMW, case=OURS, device="cuda"), "faster", "≥ 2.2 x")
