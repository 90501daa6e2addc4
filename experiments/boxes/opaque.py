"""How many kernels are tanh, an operator and relu, by how much a compiler sees of the operator?

Answer: see notes/custom_op.md.

The operator is the lecture's ``mymuladd`` (``works/muladd.py``): opaque, as torch's own operators, in Triton that is
shown to the compiler (``triton_op``), and all three as rules, composed to one.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Page, Row, Rows, Run, formatted, on_one_clock
from experiments.works.opaque_ways import OPAQUE, RULES, SEEN, SHOWN, WORKS
from experiments.works.witnesses import witnessed

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
    page.bar("composed rules: launches", rows.where(case=RULES), "all", at_most=1)
    page.bar("compiled, what it sees: kernels", rows.where(case=SEEN), "all", at_most=1)
    page.bar("compiled, opaque: kernels", rows.where(case=OPAQUE), "all", at_least=3)
