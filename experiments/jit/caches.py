"""What becomes of compiled kernels that are stale, damaged, of another machine, or not ours?

Answer: see notes/jit_or_aot.md.

A process compiles two kernels that differ in one sign (x + 3, x * 3) and keeps them.  Something is done to the folder;
other processes use it: did they compute what they should, and which files did they leave, make anew, put beside?  On a
GPU the kernels are cubins, on a CPU Numba's code, and beside it cubins that are compiled and not run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.harness import child
from experiments.lab import Bar, Row, Run, Table
from pagedopt import multi_tensor_apply
from pagedopt.formats.floating import of_dtype
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES

LIMIT, TOGETHER = 120.0, 4
#: Rules, and what they make of 2 with the scalar 3.
KERNELS = {"add_scalar": 5.0, "mul_scalar": 6.0}


def used(device: str, arch: str, version: str) -> Iterator[Row]:
    """In a process of its own: whether kernels compute what they should, and what was said; by another NVRTC, if named.

    Cubins are looked for, for an architecture, as far as there is an NVRTC.
    """
    if version:
        nvrtc._nvrtc_version = lambda: version  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        right, cubins = True, True
        for name, due in KERNELS.items():
            x = torch.full((8,), 2.0, device=device)
            multi_tensor_apply(RULES[name], [[x]], {"scalar": 3.0})
            right &= x.tolist() == [due] * 8
            instance = source.instance(RULES[name], (of_dtype(torch.float32),), 512, "TableAt")
            try:
                path, symbol = nvrtc.cached_cubin(source.text(RULES[name]), instance, arch)
                right &= symbol.encode() in path.read_bytes() and name in symbol
            except (ImportError, OSError, RuntimeError):
                cubins = False
    yield {"right": right, "cubins": cubins, "warnings": len(told), "says": str(told[0].message) if told else ""}


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


class Case(NamedTuple):
    """Something that may be so with a cache.

    Attributes:
        alter: what is done to all files that were kept, none of which may be used after that.
        empty: whether nothing was kept.
        arch, version: of the GPU and of NVRTC, where they are not those that kept it.
        environment: of the processes, as many as start together.
    """

    alter: Callable[[Path], object] | None = None
    empty: bool = False
    arch: str = "sm_90"
    version: str = ""
    environment: Mapping[str, str] = {}
    processes: int = 1


CASES = {
    "as it was left": Case(),
    "a bit flipped in each file": Case(flip),
    "whole kernels planted under each other's names": Case(exchange),
    "files that others may write": Case(open_to_all),
    "cubins for another architecture": Case(arch="sm_80"),
    "cubins by another NVRTC": Case(version="99.9"),
    "Numba's code for another processor": Case(environment={"NUMBA_CPU_NAME": "generic"}),
    "no home": Case(empty=True, environment={"PAGEDOPT_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": os.devnull}),
    "a folder that cannot be written": Case(empty=True, environment={"PAGEDOPT_CACHE_DIR": "/proc/pagedopt"}),
    "processes that start together": Case(empty=True, processes=TOGETHER),
}
TOYS = ["no home"]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file, with what says whether it is still the same."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def looked_at(device: str, filled: Path, name: str) -> Row:
    """What the processes of a case computed, and what became of the files."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cache"
        if case.empty:
            folder.mkdir(mode=0o700)
        else:
            shutil.copytree(filled, folder)
        if case.alter:
            case.alter(folder)
        before = files(folder)
        environment = {"PAGEDOPT_CACHE_DIR": str(folder), "TMPDIR": place, **case.environment}
        begin = partial(child.only, used, device, case.arch, case.version, limit=LIMIT, environment=environment)
        with ThreadPoolExecutor(case.processes) as pool:
            found = [one.result() for one in [pool.submit(begin) for _ in range(case.processes)]]
        after = files(folder)
    left = sum(after.get(name) == before[name] for name in before)
    return {
        "case": name,
        "device": device,
        "processes": case.processes,
        "wrong": sum(not row["right"] for row in found),
        "found": len(before),
        "left": left,
        "believed": left if case.alter else 0,
        "anew": len(before) - left,
        "beside": len(after.keys() - before.keys()),
        "warnings": sum(row["warnings"] for row in found),
        "says": next((row["says"].replace(place, "…") for row in found if row["says"]), ""),
    }


def measure(run: Run) -> Iterator[Row]:
    """A row per case."""
    device, names = str(run.device), run.size(list(CASES), TOYS)
    with tempfile.TemporaryDirectory() as place:
        filled = Path(place) / "cache"
        if not run.quick:
            kept = {"PAGEDOPT_CACHE_DIR": str(filled)}
            if not child.only(used, device, "sm_90", "", limit=LIMIT, environment=kept)["cubins"]:
                run.left_out.append("cubins that are not run: there is no NVRTC")
        with ThreadPoolExecutor(min(2 * TOGETHER, os.cpu_count() or 1)) as pool:
            waiting = {name: pool.submit(looked_at, device, filled, name) for name in names}
            for name, row in waiting.items():
                with run.attempt(name):
                    yield row.result()


TABLES = [
    Table("two kernels, and what is done to their folder, {device}", {
        "case": "case", "processes": "processes", "of them wrong": "wrong", "files found": "found",
        "left as they were": "left", "made anew": "anew", "made beside": "beside", "warnings": "warnings",
    })
]  # fmt: skip
BARS = [
    Bar("files that are damaged, planted or open to others, and were believed", "believed", at_most=0),
    Bar("processes that computed something else", "wrong", at_most=0),
]
