"""Progress of a run: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .contender import Contender

RECENT = 20  # the speed shown is the median of so many steps
LINES = 10  # in a whole run without a terminal
PATIENCE = 30.0  # seconds; the longest silence without a terminal


class Display:
    """A context manager around the training loop that shows loss and speed of every contender."""

    def __init__(self, console: Console, step: int, steps: int, tokens: int) -> None:
        self.console = console
        self.first = step
        self.steps = steps
        self.tokens = tokens
        self.said_equal = False
        self.next_line = min(steps, step + max(1, steps // LINES))
        self.started = self.last_line = time.monotonic()
        self.progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=6),  # so that the line fits 80 columns
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
        """Show the state after ``step`` steps."""
        names = [contender.name for contender in contenders]
        losses = [f"{contender.curve.losses[-1]:.3f}" for contender in contenders]
        speeds = [f"{self._speed(contender) / 1e3:.1f}k" for contender in contenders]
        if len({*losses}) > 1:  # names stand once, so that the line fits
            status = f"loss {_named(names, losses)}  {' '.join(speeds)} tokens/s"
        else:
            status = f"loss {losses[0]}  {_named(names, speeds)} tokens/s"
            if len(names) > 1 and not self.said_equal:
                self.said_equal = True
                both = " and ".join(names)
                text = f"while {both} have the same loss, to 3 digits, it is shown once; speeds are in the same order"
                self.console.print(text, soft_wrap=True)
        self.progress.update(self.task, completed=step, status=status)
        now = time.monotonic()
        if self.console.is_terminal or (step < self.next_line and now - self.last_line < PATIENCE):
            return
        self.last_line = now
        self.next_line = min(self.steps, step + max(1, self.steps // LINES))
        left = (now - self.started) / (step - self.first) * (self.steps - step)
        self.console.print(f"step {step}/{self.steps}  {status}  ETA {left:.0f} s", highlight=False, soft_wrap=True)

    def _speed(self, contender: Contender) -> float:
        """Return tokens per second of the whole step: forward, backward and optimizer."""
        return self.tokens / statistics.median(contender.curve.step_ms[-RECENT:]) * 1e3


def _named(names: Sequence[str], values: Sequence[str]) -> str:
    """Return each value behind its name; of one alone, the value."""
    return values[0] if len(names) == 1 else " ".join(map(" ".join, zip(names, values, strict=True)))
