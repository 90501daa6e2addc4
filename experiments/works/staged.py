"""Which way staged steps of optimizers go: as one CUDA graph, or call by call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from pagedopt.placements.store import VARIABLE


@contextlib.contextmanager
def staged(way: str) -> Iterator[None]:
    """A block in which optimizers are made whose staged steps go so: ``graph`` or ``calls``."""
    with mock.patch.dict(os.environ, {VARIABLE: way}):
        yield
