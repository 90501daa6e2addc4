"""How many wheels does each kind of code need, for every Python, CUDA, torch and system that there is?

Answer: see notes/jit_or_aot.md.

All wheels of every kind are made, with nothing in them but their tags and requirements, and ours is built as it is.
For each machine pip's resolver says which it would install, from the index of its CUDA; counted are those that it takes
for some machine.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from experiments.child import ROOT
from experiments.lab import Page, Row, Rows, Run
from experiments.works import wheels

CPU_ONLY = True
TOYS: wheels.Axes = {"python": ("3.11",), "cuda": ("13.0",), "torch": ("2.10", "2.13"), "system": ("win_amd64",)}
OURS = "pagedopt"
SAYS = {
    OURS: "Python and text that is compiled late (ours)",
    "any_torch": "C++ by torch's stable ABI, Python's limited API",
    "any_python": "C++ by torch's headers, Python's limited API",
    "full": "C++ by torch's headers",
}


def measure(run: Run) -> Iterator[Row]:
    """A row per kind: wheels that pip takes, and machines that have one."""
    axes = run.size(wheels.AXES, TOYS)
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder)
        wheels.built_wheel(ROOT, index)
        for need in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
            wheels.put(index, need.partition(">")[0], "99.0")
        for torch in axes["torch"]:
            wheels.put(index, "torch", f"{torch}.0")
        for kind in wheels.KINDS:
            wheels.put_all(index, kind, axes)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(partial(wheels.chosen, index, list(SAYS)), wheels.machines(axes)))
    for kind, says in SAYS.items():
        taken = [them[kind] for them in found if kind in them]
        yield {
            "kind": kind,
            "says": says,
            "over": " x ".join(wheels.KINDS.get(kind, ())) or "nothing",
            "wheels": len(set(taken)),
            "served": len(taken),
            "machines": len(found),
            "tag": "-".join(min(taken, default="").removesuffix(".whl").split("-")[-3:]),
        }


def counted(rows: Rows) -> str:
    """Wheels of each kind, and how many machines they serve."""
    kinds = "; ".join("{says}: {wheels} (for {served})".format(**row) for row in rows)
    return f"Wheels that pip takes, asked for each of {rows[0]['machines']} machines, and how many they serve: {kinds}."


def report(page: Page, rows: Rows) -> None:
    """What follows and what is held to a limit."""
    page.say(counted(rows))
    page.bar("wheels of ours", rows.where(kind=OURS), "wheels", at_most=1)
