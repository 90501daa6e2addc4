"""How many bytes does each way move, fused or not, by three witnesses?

Answer: see notes/vertical_fusion.md.

Unfused, what lies between two operators is written and read again.  A square of a square is 16 bytes of each float32 in
two kernels and 8 in one; so are LayerNorm and tanh; AdamW is 80 operator by operator and 28 in one kernel.  The
witnesses are a model (the operands of each kernel), Inductor's own count of what it compiles, and the GPU's counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from experiments.lab import Column, Page, Row, Rows, Run, by_clock_of, formatted, ms, on_one_clock, over, percent
from experiments.pictures import BLUE, GRAY, ORANGE, PURPLE, Bars
from experiments.works.contenders import COPY, FOREACH, OURS, of_copy
from experiments.works.fusible import ADAMW, BY_COMPILER, EAGER, JITERATOR, NORM, ONCE, RULE, RULES, TWICE, WORKS
from experiments.works.witnesses import witnessed

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
    heading: formatted(f"{name}_each", "{:.2f}") for heading, name in {**WITNESSES, "of these read": "ncu_read"}.items()
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
    page.detail.table(title, Rows(row for row in rows if row["work"] != TWICE), columns, by=("work",))
    page.picture("square", rows, PANELS, TITLE)
    for work, most in ((ONCE, 0.015), (TWICE, 0.015), (NORM, 0.03), (ADAMW, 0.03)):
        for heading, name in WITNESSES.items():
            if (work, name) != (ADAMW, "inductor"):
                page.bar(f"{work}: bytes {heading}, off from what they must be", rows.where(work=work),
                    partial(off, witness=name), at_most=most)  # fmt: skip
    page.bar("square and its square: kernels, off from 1 (2 of what is not fused)", rows, more_kernels, at_most=0)
    page.bar("one rule, of a copy", rows.where(case=RULE, device="cuda"), "share", at_least=93, unit="%")
    page.bar("square of square, two rules against one", rows.where(device="cuda"), twice_as_long,
        at_least=1.9, unit="x")  # fmt: skip
    page.bar("square of square, two rules against one, no more than", rows.where(device="cuda"),
        twice_as_long, at_most=2.1, unit="x")  # fmt: skip
    page.bar("AdamW, ours against foreach", rows.where(work=ADAMW, case=OURS, device="cuda"), "faster",
        at_least=2.2, unit="x")  # fmt: skip
