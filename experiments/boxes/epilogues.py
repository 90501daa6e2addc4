"""What does torch.compile fuse into a Triton kernel of the user's own: which epilogues, and are they right?

Answer: see notes/custom_op.md.

A kernel that squares its input, and what follows it in one compiled function (``works/triton_epilogues.py``).  Kernels
are counted in a trace, with Inductor's ``epilogue_fusion_user_defined_triton_kernel`` off, as it is, and on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run, yes_or_no
from experiments.works.trace import counted

NEEDS_GPU = True
SETTING = "epilogue_fusion_user_defined_triton_kernel"
OFF, ON = "off", "on"


def settings(run: Run) -> dict[str, dict[str, Any]]:
    """Options of the compiler by name; a torch without the setting has one."""
    from torch._inductor import config

    if hasattr(config, SETTING):
        return {OFF: {SETTING: False}, ON: {SETTING: True}}
    run.leave_out(f"{SETTING}: torch {torch.__version__} has no such setting")
    return {OFF: {}}


def measure(run: Run) -> Iterator[Row]:
    """A row per epilogue and setting: kernels, and whether the values are those of the eager function."""
    epilogues = importlib.import_module("experiments.works.triton_epilogues").EPILOGUES
    size = run.size(2048, 64)
    x, y = torch.randn(2, size, size, device=run.device).unbind()
    known = settings(run)
    for name, function in run.each(epilogues.items()):
        want = function(x, y)
        for setting, options in known.items():
            with run.attempt(f"{name}, {setting}", (Exception,)):
                torch._dynamo.reset()
                call = partial(torch.compile(function, fullgraph=True, dynamic=False, options=options), x, y)
                right = torch.allclose(call(), want, rtol=1e-3)
                yield {"epilogue": name, "setting": setting, "kernels": counted(call).kernels, "right": right}


def derive(rows: Rows) -> Rows:
    """Kernels that the setting saves, and whether what is wrong is wrong with it alone."""
    found = Rows()
    for row in rows:
        off = rows.number("kernels", epilogue=row["epilogue"], setting=OFF)
        saved = None if off is None else int(off) - row["kernels"]
        found.append({**row, "saved": saved, "wrong": int(not row["right"])})
    return found


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("kernels of a compiled function, by what follows a Triton kernel of the user's own", rows,
        {"what follows": "epilogue", SETTING: "setting", "kernels": "kernels",
        "right": yes_or_no("right")})  # fmt: skip
    page.bar("epilogues that are wrong with the default setting", rows.where(setting=OFF),
        lambda rows: sum(row["wrong"] for row in rows), at_most=0)  # fmt: skip
    page.bar("epilogues that the setting fuses", rows.where(setting=ON),
        lambda rows: sum(row["saved"] > 0 for row in rows), at_least=1)  # fmt: skip
