"""Functions in processes of their own, with caches of compilers that are empty.

cold = fresh(first_step, 100, limit=300)
cold.rows, cold.seconds, cold.ended      # ended: None, "not ended in 300 s", "ended with -11: …"
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.child import Child
from experiments.harness.time import series

#: Where compilers keep what they made: Inductor, Triton, ours, CuPy, CUDA's own.
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PAGEDOPT_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")


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


def fresh(function: Callable[..., Iterator[dict[str, Any]]], *arguments: Any, limit: float) -> Fresh:
    """Call a function as :class:`~experiments.harness.child.Child` does, its compilers' caches empty; it never raises.

    After ``limit`` seconds it is killed, and that is what it says.
    """
    with tempfile.TemporaryDirectory(prefix="pagedopt-caches-", ignore_cleanup_errors=True) as folder:
        caches = {name: str(Path(folder, name.lower())) for name in FOLDERS}
        for cache in caches.values():
            Path(cache).mkdir()
        begin = time.perf_counter()
        child = Child(function, *arguments, limit=limit, environment=caches)
        rows = list(child)
        seconds = time.perf_counter() - begin
    late = child.ended and child.ended.startswith("was stopped after")
    return Fresh(rows, seconds, f"not ended in {limit:g} s" if late else child.ended)
