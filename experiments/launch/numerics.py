"""Does fusion change the numbers, and are they less exact then?

Answer (H200, 2026-11): compiled, the result differs by 5.1e-7, and its error against float64 is 1.01 times eager's;
combined has split_stack's bits in 20 of 20 seeds.

Input and weights of 20 seeds; every way against split_stack, and all against float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from experiments.columns import error
from experiments.lab import Page, Row, Rows, Run
from experiments.works.slices import COMBINED, COMPILED, LIST, SPLIT, Slices, made

MEASURES = ("launch", "tables")
UNCOMPILED = (SPLIT, COMBINED, LIST)
WAYS = (*UNCOMPILED, *COMPILED.values())


def measure(run: Run) -> Iterator[Row]:
    """A row per way: its largest difference from split_stack and from float64; and sums in two orders."""
    work = Slices(run.size(1024, 4), run.device)
    ways = {name: way for name, way, _ in made(work, run, UNCOMPILED if run.quick else WAYS)}
    seeds = run.size(20, 3)
    differences: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in ways}
    for seed in range(seeds):
        work.fill(seed)
        exact, first = work.exact(), work.split_stack(work.x)
        for name, way in ways.items():
            found = way()
            differences[name].append(float((found - first).abs().max()))
            errors[name].append((found - exact).abs().flatten())
    for name in ways:
        off, alike = torch.cat(errors[name]), differences[name].count(0)
        most = {"error": float(off.max()), "rms": float(off.square().mean().sqrt())}
        about = {"of": "way", "case": name, "device": run.device.type, "seeds": seeds, "alike": alike}
        yield {**about, "difference": max(differences[name]), **most}
    tenths = ((0.1 + 0.2) + 0.3) - (0.1 + (0.2 + 0.3))
    yield {"of": "sum", "sum": "(0.1 + 0.2) + 0.3 and 0.1 + (0.2 + 0.3), float64", "difference": tenths}
    values = np.random.default_rng(0).random((run.size(16384, 64), 256), np.float32)
    in_turn, in_pairs = np.add.accumulate(values, axis=1)[:, -1], values.sum(axis=1, dtype=np.float32)
    relative = float(np.abs(in_turn / in_pairs - 1).max())
    yield {"of": "sum", "sum": "256 floats one after the other and in pairs, float32, relative", "difference": relative}


def derive(rows: Rows) -> Rows:
    """The error in units of split_stack's."""
    eager = rows.number("error", case=SPLIT)
    return Rows({**row, "of_eager": row["error"] / eager if eager and "error" in row else None} for row in rows)


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    page.table("{seeds} seeds, {device}", rows.where(of="way"),
        {"way": "case", "largest difference from split_stack": error("difference"),
        "seeds without any": "alike", "largest error against float64": error(),
        "error ÷ split_stack's": "of_eager"})  # fmt: skip
    page.bar("combined against split_stack, largest difference", rows.where(case=COMBINED), "difference", "≤ 0")
    for name in COMPILED.values():
        mine = rows.where(case=name)
        page.bar(f"{name}: largest difference from eager", mine, "difference", "≤ 1e-06")
        page.bar(f"{name}: error against float64 ÷ eager's", mine, "of_eager", "≤ 1.5 x")
