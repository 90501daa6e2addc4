"""What works with an operator, by how much torch is told of it?

Answer: see notes/custom_op.md.

The lecture's ``mymuladd`` (``works/muladd.py``) as a bare function, as an operator, with a fake, with a gradient, and
registered by ``custom_op``; each is called, differentiated, compiled, exported, captured into a CUDA graph and batched.
*Right* has the values and gradients of the same in torch's own operators; *wrong* has others, without an error.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works.fresh import rows_of
from experiments.works.muladd import LEVELS, NOTHING, NOW, Operator, told
from experiments.works.muladd_used import CAPTURED, DIFFERENTIATED, TRAINED, USES, between, plainly, used

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
            "first_word": next(iter(row["said"].values()), ""),
        }
        for row in rows
    )


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("mymuladd between cos and relu on {device}", rows,
        {"torch is told": "told", "graphs (2: a break)": "graphs", **{use: use for use in USES},
        "first error, or warning of autograd": lambda row: row["first_word"][:160]})  # fmt: skip
    page.bar("all by custom_op: uses that are wrong or refused", rows.where(told=NOW), "missing", at_most=0)
    page.bar("graphs of a bare function between two operators", rows.where(told=NOTHING), "graphs", at_least=2)
