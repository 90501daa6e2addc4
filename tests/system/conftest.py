"""What tests of the kernel cache share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_support import a_place


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach."""
    with a_place() as folder:
        yield folder
