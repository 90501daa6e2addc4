"""Functions in processes of their own, with caches of compilers that are empty or that an earlier one filled.

with Caches() as caches:
    cold = fresh(first_step, 100, caches=caches, limit=300)
    warm = fresh(first_step, 100, caches=caches, limit=300)
cold.rows, cold.seconds, cold.ended      # ended: None, "not ended in 300 s", "ended with -11: …"
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.child import Child
from experiments.harness.time import series

#: Where compilers keep what they made: Inductor, Triton, ours, CuPy, CUDA's own.
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PAGEDOPT_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")


class Caches:
    """Empty folders for the caches of all compilers, gone at the end of the ``with`` block.

    Attributes:
        environment: variables that name them.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pagedopt-caches-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self.environment = {name: str(self.path / name.lower()) for name in FOLDERS}
        for folder in self.environment.values():
            Path(folder).mkdir()

    def __enter__(self) -> Caches:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


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


def fresh(
    function: Callable[..., Iterator[dict[str, Any]]],
    *arguments: Any,
    limit: float,
    caches: Caches | None = None,
    environment: Mapping[str, str] | None = None,
) -> Fresh:
    """Call a function in a process of its own, as :class:`~experiments.harness.child.Child` does; it never raises.

    Args:
        function: of a module, a generator of plain dicts.
        arguments: plain values.
        limit: seconds after which it is killed, and that is what it says.
        caches: where its compilers look and leave what they made; by default in empty folders of its own.
        environment: further variables.
    """
    if caches is None:
        with Caches() as caches:
            return fresh(function, *arguments, limit=limit, caches=caches, environment=environment)
    begin = time.perf_counter()
    child = Child(function, *arguments, limit=limit, environment={**caches.environment, **(environment or {})})
    rows = list(child)
    ended = child.ended
    if ended and ended.startswith("was stopped after"):
        ended = f"not ended in {limit:g} s"
    return Fresh(rows, time.perf_counter() - begin, ended)
