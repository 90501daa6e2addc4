"""A device made of queues."""

from __future__ import annotations

import pytest
from fakes import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)
