"""The long tests in twenty slices: a night runs one, and ``PAGEDOPT_SLICE=n make test-long`` runs it again."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

import pytest

VARIABLE = "PAGEDOPT_SLICE"
SLICES = 20


def slice_of(nodeid: str) -> int:
    """By the name alone: a test stays in its slice whatever comes and goes around it."""
    return zlib.crc32(nodeid.encode()) % SLICES


@dataclass(frozen=True)
class Slice:
    """A plugin that leaves one slice of the long tests, and no others."""

    number: int

    @classmethod
    def asked_for(cls) -> Slice | None:
        """By the variable of the environment; None: there is none.

        Raises:
            pytest.UsageError: it is no number of a slice.
        """
        if (text := os.environ.get(VARIABLE)) is None:
            return None
        if text not in map(str, range(SLICES)):
            raise pytest.UsageError(f"{VARIABLE} is {text!r}; give a number from 0 to {SLICES - 1}")
        return cls(int(text))

    def pytest_report_header(self) -> str:
        return f"long tests, slice {self.number} of 0 to {SLICES - 1}: {VARIABLE}={self.number} make test-long"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        here = [item.get_closest_marker("long") and slice_of(item.nodeid) == self.number for item in items]
        config.hook.pytest_deselected(items=[item for item, stays in zip(items, here, strict=True) if not stays])
        items[:] = [item for item, stays in zip(items, here, strict=True) if stays]
