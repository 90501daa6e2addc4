"""What a running training shows: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagedopt.train.contender import Contender

RECENT = 20  # steps the shown speed is the median of
LINES = 10  # lines in a whole run where there is no terminal
PATIENCE = 30.0  # seconds, the longest silence where there is no terminal


class Display:
    """Shows loss and speed of every contender. Use as a context manager around the loop."""

    def __init__(self, console: Console, step: int, steps: int, tokens: int) -> None:
        self.console = console
        self.first = step
        self.steps = steps
        self.tokens = tokens
        self.started = self.last_line = time.monotonic()
        self.progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=6),  # all of it fits 80 columns
            TextColumn("{task.fields[status]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=steps, completed=step, status="")

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, step: int, contenders: Sequence[Contender]) -> None:
        """Show the state after `step` steps."""
        status = "  ".join(self._status(contender) for contender in contenders)
        self.progress.update(self.task, completed=step, status=status)
        if self.console.is_terminal:
            return
        now = time.monotonic()
        every = max(1, self.steps // LINES)
        if step % every == 0 or step == self.steps or now - self.last_line > PATIENCE:
            self.last_line = now
            left = (now - self.started) / (step - self.first) * (self.steps - step)
            self.console.print(f"step {step}/{self.steps}  {status}  ETA {left:.0f} s", highlight=False, soft_wrap=True)

    def _status(self, contender: Contender) -> str:
        """Return loss and speed, in thousands of tokens per second."""
        curve = contender.curve
        speed = self.tokens / statistics.median(curve.step_ms[-RECENT:]) * 1e3
        return f"{contender.kind} loss {curve.losses[-1]:.3f} {speed / 1e3:.1f}k/s"
