"""Where int8 state is, where it has been, and in which process it goes on change no bit of it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import int8_training as training
import pytest
import torch
from children import start
from int8_support import same
from int8_training import LONG, PLACES, STEPS, bits, made, train
from often import long_but
from support import threads

from pagedopt import PagedAdamW

pytestmark = pytest.mark.usefixtures("folder")
#: After which steps state is in a file.
AWAY = {"file": "11111111", "part": "11111111", "spill()": "00111100", "budgets": "11000111"}


@pytest.mark.parametrize("kind", ["stochastic", "nearest"])
def test_budgets_files_and_spills_change_no_bit(kind: str) -> None:
    """In each place state moves, or nothing would be shown."""
    with threads(1):
        for own in (False, True):
            whole, theirs = made({"kind": kind, "place": "resident", "seed": 7, "own": own})
            train(whole, theirs, range(STEPS))
            for place in list(PLACES)[1:]:
                opt, params = made({"kind": kind, "place": place, "seed": 7, "own": own})
                away = []
                for step in range(STEPS):
                    train(opt, params, range(step, step + 1), True, place)
                    away.append(opt.memory_report().by_place.get("file", 0) > 0)
                assert away == [bool(int(each)) for each in AWAY[place]], place
                assert same(bits(opt, params), bits(whole, theirs)), place


@pytest.mark.parametrize("stored", training.STORED)
def test_the_number_of_threads_changes_no_bit(stored: str) -> None:
    dtype, options = training.STORED[stored]
    results = []
    for count in (1, 5):
        with threads(count):
            params = training.parameters(dtype)
            opt = PagedAdamW(params, lr=1e-2, **options, **PLACES["part"])
            train(opt, params, range(3))
            results.append(bits(opt, params))
    assert same(*results)


def kill_at_work(folder: Path, stored: str) -> None:
    """Begin the long training in a process, and kill that once its checkpoint is there and it goes on."""
    code = f"import int8_training; int8_training.train_until_killed({str(folder)!r}, {stored!r})"
    child = start("-c", code)
    try:
        until = time.monotonic() + 90
        while not (folder / "half.pt").exists():
            assert child.exitcode is None, "it ended before its checkpoint"
            assert time.monotonic() < until, "no checkpoint yet"
            time.sleep(0.02)
        time.sleep(0.1)
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("stored", long_but(training.STORED, {"int8", "+8 and int8"}.__contains__))
def test_200_steps_killed_and_resumed_are_200_steps(tmp_path: Path, stored: str) -> None:
    """In this process, which has not taken the steps before the checkpoint."""
    kill_at_work(tmp_path, stored)
    with threads(1):
        opt, params = training.long_training("part", stored)
        training.load(opt, params, torch.load(tmp_path / "half.pt", weights_only=True))
        train(opt, params, range(LONG // 2, LONG))
        whole, theirs = training.long_training("resident", stored)
        train(whole, theirs, range(LONG))
    assert same(bits(opt, params), bits(whole, theirs))
    assert float(opt.state[params[0]]["step"]) == LONG
