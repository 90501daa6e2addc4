"""How many wheels does each kind of code need, for every Python, CUDA, torch and system that there is?

Answer: see notes/jit_or_aot.md.

All wheels of every kind are made, with nothing in them but their tags and requirements, and ours is built as it is.
A wheel's tag names the Python and the system.  It cannot name the torch: a requirement does.  Nor the CUDA: an index
does, as torch's own, one for each.  For each machine pip's resolver says which it would install, from the index of its
CUDA; counted are those that it takes for some machine.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from experiments.child import ROOT
from experiments.lab import Page, Row, Rows, Run
from experiments.works.wheels import built_wheel, pip

Axes = Mapping[str, Sequence[str]]
Machine = Mapping[str, str]
#: Pythons that are maintained in November 2026, and torch since it has macros for its stable ABI.
AXES: Axes = {
    "python": ("3.11", "3.12", "3.13", "3.14", "3.15"),
    "cuda": ("12.6", "12.8", "13.0"),
    "torch": ("2.10", "2.11", "2.12", "2.13", "2.14"),
    "system": ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "win_amd64"),
}
#: A name for what is compiled ahead, and the axes of which each value needs a wheel of its own.
KINDS: Mapping[str, Sequence[str]] = {
    "any_torch": ("cuda", "system"),
    "any_python": ("cuda", "torch", "system"),
    "full": ("python", "cuda", "torch", "system"),
}


TOYS: Axes = {"python": ("3.11",), "cuda": ("13.0",), "torch": ("2.10", "2.13"), "system": ("win_amd64",)}
OURS = "pagedopt"
SAYS = {
    OURS: "Python and text that is compiled late (ours)",
    "any_torch": "C++ by torch's stable ABI, Python's limited API",
    "any_python": "C++ by torch's headers, Python's limited API",
    "full": "C++ by torch's headers",
}


def machines(axes: Axes) -> Iterator[Machine]:
    """Every combination."""
    yield from (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def put(folder: Path, name: str, version: str, tag: str = "py3-none-any", needs: str = "") -> None:
    """Write a wheel with nothing but its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {needs}"] if needs else []
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{info}/{file},,\n" for file in ("METADATA", "WHEEL", "RECORD")))


def put_all(index: Path, kind: str, axes: Axes) -> None:
    """Write all wheels of a kind, into a folder for each CUDA."""
    for machine in machines(axes):
        python = "cp" + machine["python"].replace(".", "")
        tag = f"{python}-{python}" if "python" in KINDS[kind] else "cp311-abi3"
        bound = f"=={machine['torch']}.*" if "torch" in KINDS[kind] else ">=2.10"
        version = f"1.0+torch{machine['torch']}" if "torch" in KINDS[kind] else "1.0"
        put(index / machine["cuda"], kind, version, f"{tag}-{machine['system']}", f"torch{bound}")


def chosen(index: Path, names: Sequence[str], machine: Machine) -> dict[str, str]:
    """The wheel (with its folder) that pip would install of each package on a machine; nothing if it cannot."""
    done = pip(
        "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--target", index / "none",
        "--python-version", machine["python"], "--implementation", "cp", "--platform", machine["system"],
        "--only-binary=:all:", "--no-index", "--find-links", index, "--find-links", index / machine["cuda"],
        f"torch=={machine['torch']}.0", *names,
    )  # fmt: skip
    items = [] if done.returncode else json.loads(done.stdout)["install"]
    return {item["metadata"]["name"]: "/".join(item["download_info"]["url"].split("/")[-2:]) for item in items}


def measure(run: Run) -> Iterator[Row]:
    """A row per kind: wheels that pip takes, and machines that have one."""
    axes = run.size(AXES, TOYS)
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder)
        built_wheel(ROOT, index)
        for need in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
            put(index, need.partition(">")[0], "99.0")
        for torch in axes["torch"]:
            put(index, "torch", f"{torch}.0")
        for kind in KINDS:
            put_all(index, kind, axes)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(partial(chosen, index, list(SAYS)), machines(axes)))
    for kind, says in SAYS.items():
        taken = [them[kind] for them in found if kind in them]
        yield {
            "kind": kind,
            "says": says,
            "over": " x ".join(KINDS.get(kind, ())) or "nothing",
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
    page.bar("wheels of ours", rows.where(kind=OURS), "wheels", "≤ 1")
