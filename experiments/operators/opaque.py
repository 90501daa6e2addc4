"""How many kernels are tanh, an operator and relu, by how much a compiler sees of the operator?

Answer: see notes/custom_op.md.

The operator is the lecture's ``mymuladd`` (``works/muladd.py``): opaque, as torch's own operators, in Triton that is
shown to the compiler (``triton_op``), and all three as rules, composed to one.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from experiments.columns import formatted
from experiments.comparing import on_one_clock
from experiments.lab import Page, Row, Rows, Run
from experiments.works.muladd import FAKE, told
from experiments.works.witnesses import EAGER, Call, Way, Works, witnessed
from pagedopt import compose, multi_tensor_apply, rule

# --- tanh, the lecture's ``mymuladd`` and relu, by how much a compiler sees of the one in the middle

WORK, C = "tanh, mymuladd, relu", 0.5
OPAQUE, SEEN, SHOWN = "compiled, opaque", "compiled, torch's operators", "compiled, triton_op"
RULES = "rules, composed (ours)"


@rule
def tanh_of(x, b):
    x = math.tanh(x)
    return x


@rule
def muladd(x, b, *, c):
    x = x * b + c
    return x


@rule
def relu(x, b):
    x = max(x, 0.0)
    return x


def plain(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """In torch's own operators."""
    return a * b + c


def between(operator: Callable[..., torch.Tensor], x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The operator between two of torch's own."""
    return torch.relu(operator(torch.tanh(x), b, C))


def ruled(x: torch.Tensor, b: torch.Tensor) -> Call:
    """One launch of ours."""
    one, out = compose(tanh_of, muladd, relu), torch.empty_like(x)

    def run() -> torch.Tensor:
        multi_tensor_apply(one, [[x], [b]], {"c": C}, out=[[out]])
        return out

    return run


def triple(device: torch.device, quick: bool) -> tuple[int, dict[str, Way]]:
    """The ways; bytes are told in units of the tensor's."""
    x, b = torch.rand(2, 1 << (12 if quick else 26 if device.type == "cuda" else 22), device=device).unbind()

    def compiled(operator: Callable[..., torch.Tensor]) -> Call:
        return partial(torch.compile(between, dynamic=False), operator, x, b)

    ways = {
        EAGER: Way(lambda: partial(between, plain, x, b)),
        OPAQUE: Way(lambda: compiled(told(FAKE)), compiled=True),
        SEEN: Way(lambda: compiled(plain), compiled=True),
        RULES: Way(lambda: ruled(x, b), 3, seen=False),
    }
    if device.type == "cuda":
        shown = importlib.import_module("experiments.works.triton_kernels").muladd
        ways[SHOWN] = Way(lambda: compiled(shown), compiled=True)
    return x.nbytes, ways


WORKS: Works = {WORK: triple}


# --- the question

ANSWERS = {"opaque": "black_boxes"}
NOTE = "custom_op"
MEASURES = ("kernels", "launch", "tables")


def measure(run: Run) -> Iterator[Row]:
    """A row per way (:func:`experiments.works.witnesses.witnessed`)."""
    run.rounds, run.seconds = run.size((20, 1.0), (3, 0.1))
    if run.device.type == "cpu":
        run.leave_out(f"{SHOWN}: Triton needs a GPU")
    yield from witnessed(run, __name__, WORKS)


def derive(rows: Rows) -> Rows:
    """All kernels: on a CPU Inductor counts its own, and the opaque operator is one more."""
    found = Rows()
    for row in on_one_clock(rows):
        more = int(row["case"] == OPAQUE and row["device"] == "cpu")
        found.append({**row, "all": None if row["kernels"] is None else row["kernels"] + more})
    return found


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("{work} on {device}, {clock}", rows, {"way": "case", "kernels": "all", "µs": "time",
        "ncu: bytes ÷ the tensor's": formatted(lambda row: row["ncu"] and row["ncu"] / row["unit"],
        "{:.2f}")}, by=("work", ))  # fmt: skip
    page.bar("composed rules: launches", rows.where(case=RULES), "all", "≤ 1")
    page.bar("compiled, what it sees: kernels", rows.where(case=SEEN), "all", "≤ 1")
    page.bar("compiled, opaque: kernels", rows.where(case=OPAQUE), "all", "≥ 3")
