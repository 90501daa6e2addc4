"""A card whose pages behave as CUDA's do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.card.card import install_pages
from tests.card.driver import Driver


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = install_pages(monkeypatch)
    yield fake
    gc.collect()
    assert not fake.handles, "memory that nobody has given back"
    assert not fake.files, "a descriptor that nobody has closed"
