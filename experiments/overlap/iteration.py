"""What does an iteration of training take with state resident, on the host and exposed, and hidden under the forward?

And what do micro-batches and a larger batch change?

The step of the hidden way is queued by ``attach()``.  An iteration is timed from its begin to that of the next one, on
the stream that computes, while the host runs ahead.  Only the first forward of a step comes behind its update.  A
larger batch has a longer forward, and hides more; its activations are computed twice, so that they fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab import Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, ORANGE, Bars
from experiments.works.hidden import (
    CALLS,
    COLUMNS,
    EXPOSED,
    FUSED,
    HIDDEN,
    MODELS,
    NEARLY,
    RESIDENT,
    TITLE,
    Plan,
    beside_resident,
    iterations,
)  # fmt: skip
from experiments.works.training import Load

ANSWERS = {"iteration": "hidden_step", "loads": "hidden_step"}
NOTE = "hiding"
NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
PLAN: tuple[Plan, ...] = tuple(
    (model, Load(), state, way)
    for model in MODELS
    for state, ways in (
        ("float32", (FUSED, RESIDENT, CALLS, EXPOSED, HIDDEN)),
        ("bfloat16", (EXPOSED, HIDDEN)),
        ("int8", (CALLS, EXPOSED, HIDDEN, NEARLY)),
    )
    for way in ways
)


MICRO, LARGE = Load(micro=4), Load(batch=32, recomputed=True)
LOADS: tuple[Plan, ...] = (
    *(("1.56 B", load, "float32", way) for load in (LARGE, MICRO) for way in (RESIDENT, EXPOSED, HIDDEN)),
    *(("1.56 B", MICRO, "int8", way) for way in (EXPOSED, HIDDEN)),
)
derive = beside_resident


def measure(run: Run) -> Iterator[Row]:
    """A row per model, load, format of state and way."""
    yield from iterations(run, PLAN if run.part == "iteration" else LOADS)


def color(name: str) -> str:
    """Blue is what this package hides."""
    return BLUE if "hidden" in name else ORANGE if EXPOSED in name else GRAY


def finding(hidden: Rows) -> str:
    """How much shorter an iteration is whose step is hidden."""
    shares = sorted(row["of_exposed"] for row in hidden if row["of_exposed"]) or [1.0]
    return (
        f"Hidden under the forward (blue), {100 * shares[0]:.0f} to {100 * shares[-1]:.0f} % of an iteration with the "
        "step exposed (orange)\ngrey: state on the device"
    )


def report(page: Page, rows: Rows) -> None:
    """A table for a model and load, a picture, and what is held to a limit."""
    main = Rows(row for row in rows.where(model="1.56 B") if row["way"] not in (CALLS, NEARLY))
    shown = main if page.section == "iteration" else rows.where(load=str(LARGE))
    page.table(TITLE, shown, COLUMNS, by=("model", "load"))
    if page.section == "loads":
        large, micro = rows.where(load=str(LARGE), way=HIDDEN), rows.where(load=str(MICRO), state="int8", way=HIDDEN)
        page.bar("1.56 B, float32, 32 sequences: hidden over resident", large, "of_resident", "≤ 1.05 x")
        page.bar("1.56 B, int8, 4 micro-batches: hidden over resident", micro, "of_resident", "≤ 1.02 x")
        return
    page.picture("iterations", rows, [Bars(title="an iteration of {model} parameters, 8 x 1,024 tokens",
        name="name", length="time", unit="ms", scale=1e3, colors=color,
        where={"model": model}) for model in MODELS],
        finding(rows.where(way=HIDDEN)))  # fmt: skip
    for model, state, what, column, most, unit in BARS:
        mine = rows.where(model=model, state=state, way=HIDDEN)
        page.bar(f"{model}, {state}{what}", mine, column, f"≤ {most} {unit}")


OVER_EXPOSED, HOST = ": hidden over exposed", ", hidden: host of step()"
OVER_RESIDENT = ": hidden over resident"
BARS = (
    ("355 M", "float32", OVER_EXPOSED, "of_exposed", 0.9, "x"),
    ("355 M", "bfloat16", OVER_EXPOSED, "of_exposed", 0.87, "x"),
    ("1.56 B", "float32", OVER_EXPOSED, "of_exposed", 0.9, "x"),
    ("1.56 B", "bfloat16", OVER_EXPOSED, "of_exposed", 0.87, "x"),
    ("355 M", "int8", OVER_RESIDENT, "of_resident", 1.10, "x"),
    ("1.56 B", "int8", OVER_RESIDENT, "of_resident", 1.06, "x"),
    ("355 M", "int8", HOST, "host_ms", 2, "ms"),
    ("355 M", "float32", HOST, "host_ms", 2, "ms"),
    ("1.56 B", "int8", HOST, "host_ms", 3, "ms"),
    ("1.56 B", "float32", HOST, "host_ms", 6, "ms"),
)
