"""Commands, as they are typed."""

from __future__ import annotations

import pytest
from command_line import Program

from pagedopt.planning.sizes import DEFAULT_SIZE


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys, "plan")


@pytest.fixture
def train_tiny(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs that take a second."""
    monkeypatch.setitem(DEFAULT_SIZE, "cpu", "tiny")
    monkeypatch.delenv("COLUMNS", raising=False)
    return Program(capsys, "train", "--device", "cpu", "--threads", "1")
