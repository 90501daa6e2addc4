"""How close is a step to a copy of its bytes where parameters, gradients and state are bfloat16?

Answer (H200, 2026-11): 85 % of a copy, where torch's fused step has 61 %.  At half the bytes of float32 the conversions
and the reading of the table weigh twice as much.

A conversion is one instruction, and a chunk 128 KiB of each list; arithmetic is that of float32, exactly rounded.  What
else was tried is in notes/raw/bf16-h200.txt.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.step.close_to_a_copy import PANELS, derive, shown, steps
from experiments.works.contenders import FOREACH, FUSED, OURS
from experiments.works.models import Work, gpt2_shapes

#: The name of the experiment's note.
NOTE = "int8"
MEASURES = ("kernels", "launch", "tables", "optim")
__all__ = ["derive", "measure", "report"]


def measure(run: Run) -> Iterator[Row]:
    """A row per contender: host, gpu and wall times (µs), the error of its update, the bytes it must move."""
    shapes = gpt2_shapes(500, 16, 32, 2) if run.quick or run.device.type == "cpu" else gpt2_shapes()
    work = Work("AdamW bf16 with bf16 state, GPT-2", shapes, torch.bfloat16, 14, 2e-1)
    yield from steps(run, "all-bf16", work, (OURS, FUSED, FOREACH), run.device)


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    shown(page, rows)
    page.picture("in-16-bits", rows, PANELS, "A step of AdamW takes little longer than a copy of its bytes (dashed)")
    page.bar("bf16, bf16 state, GPT-2, share of HBM copy", rows.where(device="cuda", case=OURS), "share",
        at_least=85, unit="%")  # fmt: skip
