"""Runs of the command `train` that take a second, and what they write."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import from_json

from pagedopt.commands.main import main
from pagedopt.commands.train.run import Run

TINY = ("train", "--size", "tiny", "--device", "cpu", "--threads", "1")


def train(out: Path, *options: object) -> int:
    """Run the command in this process."""
    return main([*TINY, "--out", str(out), *map(str, options)])


def result(out: Path) -> Any:
    """Read what a run wrote."""
    return from_json((out / "result.json").read_text())


def losses(out: Path, kind: str = "paged") -> list[float]:
    return result(out)["optimizers"][kind]["losses"]


@contextlib.contextmanager
def behind_each_step(act: Callable[[Run], None]) -> Iterator[None]:
    """``act`` is called behind each step of any run, in a block."""
    take_step = Run.take_step

    def step_and_act(run: Run) -> None:
        take_step(run)
        act(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "take_step", step_and_act)
        yield


def interrupted_behind(step: int, name: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C comes behind that step, of runs with a contender of that name."""

    def interrupt(run: Run) -> None:
        if run.step == step and name in (None, run.contenders[-1].name):
            signal.raise_signal(signal.SIGINT)

    return behind_each_step(interrupt)
