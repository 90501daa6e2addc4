"""Commands, as they are typed."""

from __future__ import annotations

import pytest
from command_line import Program
from tiny_training import TINY


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys, "plan")


@pytest.fixture
def train_tiny(capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs that take a second."""
    return Program(capsys, *TINY)
