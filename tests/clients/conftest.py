"""What every test of a client starts from."""

from __future__ import annotations

from collections.abc import Iterator

import clients
import pytest
import torch


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    clients.exact()
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before
