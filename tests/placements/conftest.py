"""A card whose pages behave as CUDA's do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import fake_pages
import pytest
from fake_pages import FakePages


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePages]:
    fake = fake_pages.install(monkeypatch)
    yield fake
    gc.collect()
    assert not fake.handles, "memory that nobody has given back"
    fake.close()
