"""Functions in processes of their own, with caches of compilers that are empty, or what another process left there.

with empty_caches() as folder:
    cold = fresh(first_step, 100, limit=300, caches=folder)
    warm = fresh(first_step, 100, limit=300, caches=folder)
cold.rows, cold.seconds, cold.ended      # ended: None, "not ended in 300 s", "ended with -11: …"
"""

from __future__ import annotations

import compileall
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.child import ROOT, Child
from experiments.clock import series

#: Where compilers keep what they made: Inductor, Triton, ours, CuPy, CUDA (driver and NVRTC), torch's extensions.
FOLDERS = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PAGEDOPT_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH",
    "TORCH_EXTENSIONS_DIR",
)  # fmt: skip


@dataclass(frozen=True)
class Fresh:
    """What came of a process.

    Attributes:
        rows: what its function yielded, as far as it got.
        seconds: from its start to its end, Python and torch included.
        ended: None if it ended well; else "not ended in 300 s", or its exit status with its last words.
    """

    rows: list[dict[str, Any]]
    seconds: float
    ended: str | None

    @property
    def row(self) -> dict[str, Any]:
        """Its first row, empty if there is none."""
        return self.rows[0] if self.rows else {}

    def as_dict(self) -> dict[str, Any]:
        """Its first row, with ``process_s`` and ``ended``: a limit that was reached is a result."""
        return {**self.row, "process_s": series([self.seconds], "wall"), "ended": self.ended}


@functools.cache
def compile_as_pip() -> None:
    """Write the bytecode of this checkout's sources, as pip does for every package that it installs.

    Where Python is told to write no bytecode, each process would compile these sources anew, and only these.
    """
    for package in ("pagedopt", "experiments"):
        compileall.compile_dir(ROOT / package, quiet=1)


@contextmanager
def empty_caches() -> Iterator[Path]:
    """A folder for the caches of all compilers, which goes with what they put there."""
    with tempfile.TemporaryDirectory(prefix="pagedopt-caches-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def fresh(
    function: Callable[..., Iterator[dict[str, Any]]], *arguments: Any, limit: float, caches: Path | None = None
) -> Fresh:
    """Call a function as :class:`~experiments.child.Child` does; it never raises.

    Compilers' caches are empty, or else in the folder ``caches``, as the last call left them.  After ``limit`` seconds
    the process is killed, and that is what it says.
    """
    compile_as_pip()
    if caches is None:
        with empty_caches() as caches:
            return fresh(function, *arguments, limit=limit, caches=caches)
    folders = {name: caches / name.lower() for name in FOLDERS}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    begin = time.perf_counter()
    child = Child(function, *arguments, limit=limit, environment={name: str(path) for name, path in folders.items()})
    rows = list(child)
    seconds = time.perf_counter() - begin
    late = child.ended and child.ended.startswith("was stopped after")
    return Fresh(rows, seconds, f"not ended in {limit:g} s" if late else child.ended)
