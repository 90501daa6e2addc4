"""What does a registered operator cost a call, and at the start, by the way in which it is registered?

Answer: see notes/custom_op.md.

An operator that does nothing, over two lists of so many tensors, so that all its time is torch's.  *Tensors* are those
that it is handed, of both lists.  *Cold* is a process in which torch is imported: from the registration to the end of
the first call, with caches that are empty.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.lab import Case, Page, Row, Rows, Run, number, series
from experiments.pictures import BLUE, GRAY, Lines
from experiments.works import lines
from experiments.works.fresh import fresh

# --- an operator that does nothing to two lists, of which it writes the first, registered in every way that torch has

Operator = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
ARGUMENTS = "Tensor(a!)[] written, Tensor[] read"
DIRECT, OURS, CUSTOM_OP, TRITON_OP, EXTENSION = (
    "called directly", "Library.define (ours)", "custom_op", "triton_op", "C++ extension",
)  # fmt: skip
CPP = """
#include <torch/library.h>
static void nothing(at::TensorList written, at::TensorList read) {}
TORCH_LIBRARY_FRAGMENT(lists, m) {
    m.def("extension(Tensor(a!)[] written, Tensor[] read) -> ()");
    m.impl("extension", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(nothing)));
}
"""


def nothing(written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
    """What each of them does."""


def direct() -> Operator:
    return nothing


def ours() -> Operator:
    from pagedopt.launch.registered import define

    return define("lists_of_nothing", ARGUMENTS, nothing, nothing)


def by_custom_op() -> Operator:
    made = torch.library.custom_op("lists::custom_op", nothing, mutates_args=("written",))
    made.register_fake(nothing)
    return made


def by_triton_op() -> Operator:
    return torch.library.triton_op("lists::triton_op", nothing, mutates_args=("written",))


def by_extension() -> Operator:
    from torch.utils.cpp_extension import load_inline

    load_inline("lists_of_nothing", CPP, is_python_module=False, no_implicit_headers=True)
    torch.library.register_fake("lists::extension", nothing)
    return torch.ops.lists.extension.default


WAYS: dict[str, Callable[[], Operator]] = {
    DIRECT: direct, OURS: ours, CUSTOM_OP: by_custom_op, TRITON_OP: by_triton_op, EXTENSION: by_extension,
}  # fmt: skip


def lines_of(way: str) -> int:
    """Lines that somebody writes to register the operator, without the operator itself; of ours those of ``define``."""
    counted = lines.of_python(inspect.getsource(WAYS[way])) - 1  # without its def
    if way == OURS:
        from pagedopt.launch import registered

        counted = lines.of_python(inspect.getsource(registered), ["define"])
    return counted + (len(CPP.strip().splitlines()) if way == EXTENSION else 0)


# --- the question

MEASURES = ("launch",)
COUNTS, TOYS, LIMIT = (2, 20, 100, 200, 300, 1000), (2, 300), 300
#: µs over a direct call: of a call and of each tensor, up to 300; of each of 1,000.
A_CALL, A_TENSOR, OF_MANY = 5.0, 0.15, 0.25


def started(name: str) -> Iterator[Row]:
    """In a process of its own: seconds until the first call is done."""
    os.environ["PATH"] += f":{Path(sys.executable).parent}"  # pip puts ninja there
    begin = time.perf_counter()
    WAYS[name]()([torch.ones(1)], [torch.ones(1)])
    yield {"cold": time.perf_counter() - begin}


def cold(run: Run, name: str) -> dict[str, Any] | None:
    """Seconds of a cold start; None of toys, or if there is none."""
    if run.quick or name == DIRECT:
        return None
    found = fresh(started, name, limit=LIMIT)
    if found.ended:
        run.leave_out(f"cold start of {name}: {found.ended.strip().splitlines()[-1]}")
        return None
    return series([found.row["cold"]], "wall")


def measure(run: Run) -> Iterator[Row]:
    """A row per way and number of tensors: µs of a call."""
    run.rounds, run.seconds = run.size((60, 1.0), (5, 0.1))
    made, start = {}, {}
    for name, make in WAYS.items():
        if run.quick and name == EXTENSION:
            run.leave_out(f"{name}: takes a compiler and half a minute")
            continue
        with run.attempt(name, (Exception,)):
            made[name], start[name] = make(), cold(run, name)
    for count in run.each(run.size(COUNTS, TOYS)):
        lists = [[torch.ones(4, device=run.device) for _ in range(count // 2)] for _ in range(2)]
        cases = [Case(name, functools.partial(call, *lists), repeats=20) for name, call in made.items()]
        for name, found in run.host(cases).items():
            about = {"case": name, "device": run.device.type, "tensors": count, "lines": lines_of(name)}
            yield {**about, "time": found, "cold": start[name]}


def derive(rows: Rows) -> Rows:
    """µs over a direct call, of each tensor, and by what is allowed."""
    found = Rows()
    for row in rows:
        one = rows.first(case=DIRECT, tensors=row["tensors"], device=row["device"])
        assert one is not None, "each list is also handed over directly"
        more, count = row["time"]["median"] - one["time"]["median"], row["tensors"]
        of_allowed = more / (OF_MANY * count if count > 300 else A_CALL + A_TENSOR * count)
        known = {"clock": row["time"]["clock"], "more": more, "each": more / count, "of_allowed": of_allowed}
        found.append({**row, **known})
    return found


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    page.grid("µs a call, by tensors handed, on {device}", rows, "case", "tensors", "time", "registered by")
    page.detail.table("µs over a direct call, by tensors handed, on {device}", rows,
        {"registered by": "case", "tensors": "tensors", "µs a call": "time",
        "overhead, µs": lambda row: number(row["more"]),
        "overhead, µs a tensor": lambda row: f"{row['each']:.3f}", "lines": "lines",
        "cold start, s": "cold"})  # fmt: skip
    page.picture("ways", rows, [Lines(title="a call that does nothing", x="tensors", y="time", each="case",
        label="tensors that it is handed", colors=lambda name: BLUE if name == OURS else GRAY)],
        "What it costs to pass through torch, by how an operator is registered, {device}")  # fmt: skip
    page.bar("ours: overhead ÷ what is allowed (5 µs a call and 0.15 a tensor; of 1,000 tensors 0.25 each)",
        rows.where(case=OURS), "of_allowed", at_most=1)  # fmt: skip
