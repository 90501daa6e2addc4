"""Wheels for every machine that there may be, with nothing in them, and what pip's resolver makes of them.

A wheel's tag names the Python and the system.  It cannot name the torch: a requirement does.  Nor the CUDA: an index
does, as torch's own, one for each.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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


def pip(*arguments: object, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What pip says, without a network; for another Python than this, if one is named."""
    where = ["--python", python] if python else []
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", *where, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def built_wheel(project: Path, into: Path) -> Path:
    """Build a project's wheel with what is installed.

    Raises:
        RuntimeError: it cannot be built.
    """
    done = pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", into, project)
    if done.returncode:
        raise RuntimeError(f"pip wheel: {(done.stdout + done.stderr).strip()[-600:]}")
    return next(into.glob("*.whl"))


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
