"""Who catches an operator that lies to torch: opcheck, a compiler, gradcheck, or nobody?

Answer: see notes/custom_op.md.

Seven operators (``works/planted_lies.py``).  Each is checked by ``torch.library.opcheck``, called in an eager function
and in the same compiled, and its gradient by ``torch.autograd.gradcheck``.  *Wrong* is a result that is not the right
one, without an error; *caught* is an error before a wrong result is used.  Each lie has a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works.fresh import fresh
from experiments.works.judged_lies import CAUGHT, checked, compiled
from experiments.works.planted_lies import LIES

DIED, NOBODY = "the process died", "nobody"
LIMIT = 300


def of_lie(name: str, device: str, backends: list[str]) -> Iterator[Row]:
    """A row, and the same again with each backend: a lie may end the process."""
    where = torch.device(device)
    row = {"lie": name, "device": where.type, **checked(name, where)}
    yield row
    for backend in backends:
        found, said = compiled(name, where, backend)
        row = {**row, backend: found, "said": row["said"] or said}
        yield row


def measure(run: Run) -> Iterator[Row]:
    """A row per lie; each is told in a process of its own."""
    for name in run.each(LIES):
        if run.quick:
            yield [*of_lie(name, str(run.device), ["aot_eager"])][-1]
            continue
        done = fresh(of_lie, name, str(run.device), ["aot_eager", "inductor"], limit=LIMIT)
        died = {"inductor": DIED, "said": done.ended.strip().splitlines()[-1]} if done.ended else {}
        yield {**done.rows[-1], **died}


def derive(rows: Rows) -> Rows:
    """Who catches it."""
    found = Rows()
    for row in rows:
        by = ["opcheck"] * bool(row["opcheck"]) + ["gradcheck"] * row["gradcheck"]
        compilers = [name for name in ("aot_eager", "inductor") if row.get(name) == CAUGHT]
        by += compilers + ["the call"] * (row["eager"] == CAUGHT)
        found.append(
            {**row, "caught": ", ".join(by) or NOBODY, "unseen": int(not by), "by_opcheck": bool(row["opcheck"])}
        )
    return found


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("operators that lie, on {device}", rows,
        {"the lie": "lie", "opcheck: what fails": "opcheck", "eager": "eager", "aot_eager": "aot_eager",
        "inductor": lambda row: row.get("inductor", ""), "caught by": "caught", "in words": "said"})  # fmt: skip
    page.bar("lies that somebody catches", rows, lambda rows: sum(not row["unseen"] for row in rows), at_least=4)
    page.bar("lies that opcheck catches", rows, lambda rows: sum(row["by_opcheck"] for row in rows), at_least=3)
