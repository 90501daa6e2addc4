"""What children of tests do; only a light module is started fast."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def count(to: int) -> Iterator[Row]:
    """Numbers, with noise on what a child may write to, too."""
    for n in range(to):
        print("noise", end="")
        yield {"n": n, "pid": os.getpid()}


def crash() -> Iterator[Row]:
    """One row, and the end of the process."""
    yield {"n": 0}
    os.abort()


def fail() -> Iterator[Row]:
    """One row, and an error."""
    yield {"n": 0}
    raise ValueError("of no use")


def hang() -> Iterator[Row]:
    """One row, and no more."""
    yield {"n": 0}
    time.sleep(600)


def seen() -> Iterator[Row]:
    """Which checkout is imported, and a variable."""
    import pagedopt

    yield {"tree": str(Path(pagedopt.__file__).parents[1]), "variable": os.environ.get("TOY")}
