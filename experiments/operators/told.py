"""What works with an operator, by how much torch is told of it?

Answer: see notes/custom_op.md.

The lecture's ``mymuladd`` (``works/muladd.py``) as a bare function, as an operator, with a fake, with a gradient, and
registered by ``custom_op``; each is called, differentiated, compiled, exported, captured into a CUDA graph and batched.
*Right* has the values and gradients of the same in torch's own operators; *wrong* has others, without an error.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works.apart import rows_of
from experiments.works.graph import captured
from experiments.works.muladd import LEVELS, NOTHING, NOW, Operator, told

# --- an operator between two of torch's own, in every use that torch has for it

C = 0.5
CALLED, DIFFERENTIATED, COMPILED, TRAINED, EXPORTED, CAPTURED, BATCHED = USES = (
    "called", "differentiated", "compiled", "compiled and differentiated", "exported", "captured", "batched by vmap",
)  # fmt: skip


class Exported(torch.nn.Module):
    """A module around an operator."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Call it between two operators of torch's."""
        return between(self.operator, a, b)


def between(operator: Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The operator between two of torch's own."""
    return torch.relu(operator(torch.cos(a), b, C))


def used(use: str, op: Operator, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """What comes of a use: values, or gradients."""
    if use == CALLED:
        return [between(op, a, b)]
    if use == EXPORTED:
        return [torch.export.export(Exported(op), (a, b)).module()(a, b)]
    if use == CAPTURED:
        replay = captured(lambda: between(op, a, b))
        return [replay().clone()]
    if use == BATCHED:
        return [torch.vmap(lambda a, b: op(a, b, C), in_dims=(0, None))(a, b[0])]
    call: Callable[..., torch.Tensor] = between
    if use in (COMPILED, TRAINED):
        call = torch.compile(between, fullgraph=True, backend="aot_eager")
    if use == COMPILED:
        return [call(op, a, b)]
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    call(op, a, b).square().sum().backward()
    return [t.grad if t.grad is not None else torch.zeros_like(t) for t in (a, b)]


def plainly(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """The same in torch's own operators."""
    return a * b + c


# --- the question

ANSWERS = {"told": "custom_op"}
RIGHT, WRONG, REFUSED, NOT_HERE = "right", "wrong", "refused", "needs a GPU"
LIMIT = 300


def found(use: str, operator: Operator, device: torch.device) -> tuple[str, str]:
    """What became of a use, and what was said."""
    if use == CAPTURED and device.type != "cuda":
        return NOT_HERE, ""
    a, b = (torch.linspace(1, 2, 12, device=device).view(3, 4) * k for k in (1, -1.5))
    want = used(DIFFERENTIATED if use == TRAINED else use, plainly, a, b)
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings(record=True) as heard, redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            got = used(use, operator, a, b)
    except Exception as error:  # a compiler's may be anything
        return REFUSED, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300]
    right = all(torch.allclose(x, y, rtol=1e-6) for x, y in zip(got, want, strict=True))
    said = next((str(w.message).splitlines()[0] for w in heard if "autograd" in str(w.message)), "")
    return RIGHT if right else WRONG, said[:300]


def graphs(operator: Operator, device: torch.device) -> int | None:
    """How many graphs the operator between two of torch's is compiled to; None: none."""
    torch._dynamo.reset()
    try:
        explained: Any = torch._dynamo.explain(between)(operator, *torch.ones(2, 4, device=device))
        return int(explained.graph_count)
    except Exception:  # as above
        return None


def levels(device: str) -> Iterator[Row]:
    """The rows, of a process of its own."""
    where = torch.device(device)
    for level in LEVELS:
        results = {use: found(use, told(level), where) for use in USES}
        said = {use: words for use, (_, words) in results.items() if words}
        uses = {use: what for use, (what, _) in results.items()}
        yield {"told": level, "device": where.type, "graphs": graphs(told(level), where), **uses, "said": said}


def measure(run: Run) -> Iterator[Row]:
    """A row per level: what became of each use."""
    yield from rows_of(run, levels, str(run.device), limit=LIMIT)


def derive(rows: Rows) -> Rows:
    """How many uses are wrong without an error, and how many are not right."""
    return Rows(
        {
            **row,
            "wrong": sum(row[use] == WRONG for use in USES),
            "missing": sum(row[use] in (WRONG, REFUSED) for use in USES),
        }
        for row in rows
    )


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    columns = {"declared": "told", "graphs (2: a break)": "graphs", **{use: use for use in USES}}
    page.table("mymuladd between cos and relu on {device}", rows, columns)
    page.bar("all by custom_op: uses that are wrong or refused", rows.where(told=NOW), "missing", "≤ 0")
    page.bar("graphs of a bare function between two operators", rows.where(told=NOTHING), "graphs", "≥ 2")
