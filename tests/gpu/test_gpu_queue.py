"""A CUDA state dict through a ``torch.multiprocessing`` queue; torch's own goes first, as not every system shares."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FOLDER = Path(__file__).parent


@functools.cache
def sent(options: str) -> tuple[list[Any] | None, str]:
    """What ``queue_apart`` printed, or None, and its errors."""
    command = [sys.executable, str(FOLDER / "queue_apart.py"), options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=FOLDER.parent.parent, check=False)
    return (json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else None), run.stderr


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": 0}, {"device_budget": "6MiB"}, {"placement": "managed"}, {"placement": "host"}],
    ids=["resident", "mapped", "half", "managed", "host"],
)
def test_a_state_dict_goes_through_a_queue_and_back(options: dict[str, Any]) -> None:
    theirs, errors = sent("null")
    if theirs is None:
        pytest.skip(f"torch's own state cannot be sent here: {errors.strip().splitlines()[-1]}")
    ours, errors = sent(json.dumps(options))
    assert ours == theirs == [True, True, True, True, 0], errors
