"""How many kernels are tanh, an operator and relu, by how much a compiler sees of the operator?

Answer: see notes/custom_op.md.

The operator is the lecture's ``mymuladd`` (``works/muladd.py``): opaque, as torch's own operators, in Triton that is
shown to the compiler (``triton_op``), and all three as rules, composed to one.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Bar, Row, Rows, Run, Table, formatted, on_one_clock
from experiments.works.opaque_ways import OPAQUE, RULES, SEEN, SHOWN, WORKS
from experiments.works.witnesses import witnessed

MEASURES = ("clock", "kernels", "launch")


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


TABLES = [
    Table("{work} on {device}, {clock}", by=("work",), columns={
        "way": "case", "kernels": "all", "µs": "time",
        "ncu: bytes ÷ the tensor's": formatted(lambda row: row["ncu"] and row["ncu"] / row["unit"], "{:.2f}"),
    })
]  # fmt: skip
BARS = [
    Bar("composed rules: launches", "all", at_most=1, case=RULES),
    Bar("compiled, what it sees: kernels", "all", at_most=1, case=SEEN),
    Bar("compiled, opaque: kernels", "all", at_least=3, case=OPAQUE),
]
