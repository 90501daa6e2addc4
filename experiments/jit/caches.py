"""What becomes of compiled kernels that are stale, damaged, of another machine, or not ours?

Answer: see notes/jit_or_aot.md.

A process compiles two kernels that differ in one sign (x + 3, x * 3) and keeps them.  Something is done to a copy of
the folder, and another process uses it: did it compute what it should, and which files did it leave, make anew, put
beside?  The files are Numba's code, which is run, and cubins, which are run where there is a GPU.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from experiments import child
from experiments.lab import Page, Row, Rows, Run
from pagedopt import multi_tensor_apply
from pagedopt.formats.floating import of_dtype
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES

MEASURES = ("kernels/nvrtc.py", "system")
LIMIT = 120.0
#: The GPU's architecture, the version of NVRTC if it is another, and variables.
Place = tuple[str, str, dict[str, str]]
#: Rules, and what they make of 2 with the scalar 3.
KERNELS = {"add_scalar": 5.0, "mul_scalar": 6.0}


def used(device: str, arch: str, version: str) -> Iterator[Row]:
    """In a process of its own: whether kernels compute what they should.

    By another NVRTC, if a version is named; cubins for an architecture are looked for, and not run.
    """
    if version:
        nvrtc._nvrtc_version = lambda: version  # type: ignore[assignment]
    right = True
    for name, due in KERNELS.items():
        for place in {"cpu", device}:
            x = torch.full((8,), 2.0, device=place)
            multi_tensor_apply(RULES[name], [[x]], {"scalar": 3.0})
            right &= x.tolist() == [due] * 8
        instance = source.instance(RULES[name], (of_dtype(torch.float32),), 512, "TableAt")
        cubin, symbol = nvrtc.cached_cubin(source.text(RULES[name]), instance, arch)
        right &= symbol.encode() in cubin and name in symbol
    yield {"right": right}


def flip(folder: Path) -> None:
    """One bit in the middle of each file."""
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def exchange(folder: Path) -> None:
    """Each file's content under the name of another kernel's: it is whole, and would run."""
    for suffix in {path.suffix for path in folder.iterdir()}:
        paths = sorted(folder.glob(f"*{suffix}"))
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(content)


def open_to_all(folder: Path) -> None:
    """Somebody else may have written into the files."""
    for path in folder.iterdir():
        path.chmod(0o666)


ALTERED = {
    "a bit flipped in each file": flip,
    "whole kernels planted under each other's names": exchange,
    "files that others may write": open_to_all,
}
HERE: Place = ("sm_90", "", {})
ELSEWHERE: dict[str, Place] = {
    "by another NVRTC": ("sm_90", "99.9", {}),
    "for another GPU and another processor": ("sm_80", "", {"NUMBA_CPU_NAME": "generic"}),
}
EMPTY = "nothing kept yet"


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file, with what says whether it is still the same."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def looked_at(name: str, folder: Path, device: str) -> Row:
    """What the process of a case computed, and what became of the files."""
    alter = ALTERED.get(name)
    if alter:
        alter(folder)
    arch, version, more = ELSEWHERE.get(name, HERE)
    environment = {"PAGEDOPT_CACHE_DIR": str(folder), **more}
    before = files(folder)
    found = child.only(used, device, arch, version, limit=LIMIT, environment=environment)
    after = files(folder)
    left = sum(after.get(name) == before[name] for name in before)
    return {
        "case": name,
        "device": device,
        "wrong": int(not found["right"]),
        "found": len(before),
        "left": left,
        "believed": left if alter else 0,
        "anew": len(before) - left,
        "beside": len(after.keys() - before.keys()),
    }


def measure(run: Run) -> Iterator[Row]:
    """A row per case; of toys the first, whose files the others get."""
    device = str(run.device)
    with tempfile.TemporaryDirectory() as place:
        kept = Path(place) / EMPTY
        kept.mkdir(mode=0o700)
        yield looked_at(EMPTY, kept, device)
        names = run.size(["as it was left", *ALTERED, *ELSEWHERE], [])
        copies = [shutil.copytree(kept, Path(place) / name) for name in names]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from pool.map(looked_at, names, copies, [device] * len(names))


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("two kernels, and what is done to their folder, {device}", rows,
        {"case": "case", "wrong results": "wrong", "files found": "found", "left as they were": "left",
        "made anew": "anew", "made beside": "beside"})  # fmt: skip
    page.bar("files that are damaged, planted or open to others, and were believed", rows, "believed", at_most=0)
    page.bar("processes that computed something else", rows, "wrong", at_most=0)
