"""How many wheels does each kind of code need, for every Python, CUDA, torch and system that there is?

Answer: see notes/jit_or_aot.md.

All wheels of every kind are made, with nothing in them but their tags and requirements, and ours is built as it is.
For each machine pip's resolver says which it would install, from the index of its CUDA; counted are those that it takes
for some machine.
"""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from experiments.harness.revision import ROOT
from experiments.lab import Bar, Row, Rows, Run, Table
from experiments.works import wheels

TOYS: wheels.Axes = {"python": ("3.11",), "cuda": ("13.0",), "torch": ("2.10", "2.13"), "system": ("win_amd64",)}
OURS = "pagedopt"
SAYS = {
    wheels.LATE: "Python and text that is compiled late (ours)",
    wheels.ANY_TORCH: "C++ by torch's stable ABI, Python's limited API",
    wheels.ANY_PYTHON: "C++ by torch's headers, Python's limited API",
    wheels.FULL: "C++ by torch's headers",
}


def put_ours(index: Path) -> None:
    """Our wheel, and what it needs but torch."""
    archive = zipfile.ZipFile(wheels.built_wheel(ROOT, index))
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    for name, rest in re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", archive.read(metadata).decode(), re.MULTILINE):
        if "extra ==" not in rest and name != "torch":
            wheels.put(index, name, "99.0")


def measure(run: Run) -> Iterator[Row]:
    """A row per kind: wheels that pip takes, those reckoned, machines that are served."""
    axes = run.size(wheels.AXES, TOYS)
    with tempfile.TemporaryDirectory() as folder:
        index, names = Path(folder), {kind: kind for kind in wheels.KINDS if kind != wheels.LATE}
        with run.attempt("our wheel"):
            put_ours(index)
            names = {wheels.LATE: OURS, **names}
        for torch in axes["torch"]:
            wheels.put(index, "torch", f"{torch}.0")
        for kind in names:
            if kind != wheels.LATE:
                wheels.put_all(index, kind, axes)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(partial(wheels.chosen, index, names=list(names.values())), wheels.machines(axes)))
    for kind, name in names.items():
        taken = [them[name] for them in found if name in them]
        yield {
            "kind": kind,
            "says": SAYS[kind],
            "over": " x ".join(wheels.KINDS[kind]) or "nothing",
            "wheels": len(set(taken)),
            "reckoned": wheels.reckoned(kind, axes),
            "served": len(taken),
            "machines": len(found),
            "tag": "-".join(min(taken, default="").removesuffix(".whl").split("-")[-3:]),
        }


def derive(rows: Rows) -> Rows:
    """How far what pip took is from what was reckoned, and how many machines have none."""
    return Rows(
        {**row, "off": abs(row["wheels"] - row["reckoned"]), "without": row["machines"] - row["served"]} for row in rows
    )


TABLES = [
    Table("{machines} machines, asked of pip one by one", {
        "what is shipped": "says", "compiled for each": "over", "wheels": "wheels", "machines served": "served",
        "the first tag": "tag",
    })
]  # fmt: skip
BARS = [
    Bar("wheels that pip takes of a kind, against those reckoned, off by", "off", at_most=0),
    Bar("machines without a wheel of some kind", "without", at_most=0),
    Bar("wheels of ours", "wheels", at_most=1, kind=wheels.LATE),
]
