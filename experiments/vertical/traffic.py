"""How many bytes does each way move, fused or not, by three witnesses?

Answer: see notes/vertical_fusion.md.

Unfused, what lies between two operators is written and read again.  A square of a square is 16 bytes of each float32 in
two kernels and 8 in one; so are LayerNorm and tanh; AdamW is 80 operator by operator and 28 in one kernel.  The
witnesses are a model (the operands of each kernel), Inductor's own count of what it compiles, and the GPU's counters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from experiments import lab
from experiments.harness.machine import chosen_device
from experiments.lab import Bar, Bars, Case, Plot, Row, Rows, Run, Table, formatted, ms, on_one_clock, over, percent
from experiments.works import witnesses
from experiments.works.contenders import COPY, FOREACH, OURS
from experiments.works.dispatch import dispatched, operands
from experiments.works.fusible import ADAMW, BY_COMPILER, EAGER, NORM, ONCE, RULE, RULES, TWICE, WORKS, Call, Way
from experiments.works.trace import counted


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way: bytes by each witness, kernels, times (µs)."""
    run.rounds, run.seconds = run.size((20, 2.0), (3, 0.1))
    hardware = witnesses.of_hardware(run, works, run.quick)
    for work, prepare in run.each(WORKS.items()):
        numel, ways = prepare(run.device, run.quick)
        calls: dict[str, Call] = {}
        seen: dict[str, Row] = {}
        for name, way in ways.items():
            if way.compiled and run.quick and run.device.type == "cpu":
                run.left_out.append(f"{work}, {name}: takes a compiler and tens of seconds")
                continue
            with run.attempt(f"{work}, {name}", (Exception,)):
                call, seen[name] = witnessed(way, numel, run.device)
                if name not in (COPY, EAGER) and EAGER in calls:
                    torch.testing.assert_close(call().flatten()[:4096], calls[EAGER]().flatten()[:4096])
                calls[name] = call
        for row in run.time([Case(name, call) for name, call in calls.items()], work=work, numel=numel):
            name = row["case"]
            found = hardware.get(f"{work}, {name}", {})
            about = {"device": run.device.type, "due": ways[name].due}
            yield {**row, **about, **seen[name], "ncu": found.get("bytes"), "in_dram": found.get("in_dram")}


def witnessed(way: Way, numel: int, device: torch.device) -> tuple[Call, Row]:
    """A way, called a few times; its bytes by the model, where it is not the compiler's choice, and by Inductor; its
    kernels, on a CPU operators."""
    with witnesses.inductor() if way.compiled else contextlib.nullcontext(Row()) as found:
        call = way.make()
        for _ in range(3):
            call()
    model = None if way.compiled else operands(call) if way.seen else way.due * numel
    operators = dispatched(call).total() if way.seen and not way.compiled else found.get("kernels")
    kernels = counted(call).kernels if device.type == "cuda" else operators
    return call, {"model": model, "inductor": found.get("bytes"), "kernels": kernels}


def works(device: str, quick: bool) -> witnesses.Works:
    """In the process whose kernels are counted."""
    for work, prepare in WORKS.items():
        for name, way in prepare(chosen_device(device), quick)[1].items():
            if way.counters:
                yield f"{work}, {name}", way.make


def derive(rows: Rows) -> Rows:
    """Bytes of each element by each witness, and how far they are off from what they must be; what is saved of the
    bytes of what is not fused; the share of a copy."""
    found = Rows()
    for group in rows.groups("work"):
        known = on_one_clock(group)
        copy, most = known.first(case=COPY), known.first(case=EAGER) or known.first(case=FOREACH)
        for row in known:
            more: Row = {}
            for name in ("model", "inductor", "ncu"):
                each = None if row[name] is None else row[name] / row["numel"]
                more |= {f"{name}_each": each, f"off_{name}": None if each is None else abs(each / row["due"] - 1)}
            of_copy = over(lab.by_clock_of(row, copy), row["time"])
            more |= {"share": of_copy and 100 * of_copy, "faster": over(lab.by_clock_of(row, most), row["time"])}
            squared = row["work"] in (ONCE, TWICE) and row["case"] != COPY and row["kernels"] is not None
            more["off_kernels"] = abs(row["kernels"] - row["due"] // 8) if squared else None
            found.append({**row, **more, "moved": more["model_each"] or more["inductor_each"]})
    for row in found:
        most = found.first(work=row["work"], case=EAGER) or found.first(work=row["work"], case=FOREACH) or {}
        row["saved"] = 1 - row["moved"] / most["moved"] if row["moved"] and most.get("moved") else None
    return found


def twice_as_long(rows: Rows) -> float | None:
    """Two rules against one."""
    one, two = (rows.first(work=TWICE, case=name, device="cuda") for name in (RULE, RULES))
    return over(two["time"], one["time"]) if one and two else None


def color(name: str) -> str:
    """Ours, torch's, what is compiled, another's."""
    return lab.BLUE if "(ours)" in name else {EAGER: lab.GRAY, BY_COMPILER: lab.PURPLE}.get(name, lab.ORANGE)


WITNESSES = {"by the model": "model", "by Inductor": "inductor", "by ncu": "ncu"}
EACH = {heading: formatted(f"{name}_each", "{:.2f}") for heading, name in WITNESSES.items()}
TABLES = [
    Table("{work} over {numel:,} float32 on {device}: bytes of each, {clock}", by=("work",), columns={
        "way": "case", "kernels": "kernels", "must be": "due", **EACH, "ms": ms("time"),
        "of the copy": percent("share", "{:.0f} %"), "faster": "faster",
    })
]  # fmt: skip
BARS = [
    *(Bar(f"{work}: bytes {heading}, off from what they must be", f"off_{name}", at_most=most, work=work)
      for work, most in ((ONCE, 0.015), (TWICE, 0.015), (NORM, 0.03), (ADAMW, 0.03))
      for heading, name in WITNESSES.items() if (work, name) != (ADAMW, "inductor")),
    Bar("square and its square: kernels, off from 1 (2 of what is not fused)", "off_kernels", at_most=0),
    Bar("one rule, of a copy", "share", at_least=93, unit="%", case=RULE, device="cuda"),
    Bar("square of square, two rules against one", twice_as_long, at_least=1.9, unit="x"),
    Bar("square of square, two rules against one, no more than", twice_as_long, at_most=2.1, unit="x"),
    Bar("AdamW, ours against foreach", "faster", at_least=2.2, unit="x", work=ADAMW, case=OURS, device="cuda"),
]  # fmt: skip
TITLE = "Fused, a square of a square takes the time of a square"
PANELS = [
    Bars(
        title="{work}", unit="ms", name="case", length="time", scale=1e3, line=COPY, colors=color, where={"work": work}
    )
    for work in (ONCE, TWICE)
]
PLOTS = [Plot("square", PANELS, TITLE)]
