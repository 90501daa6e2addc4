"""The run: the contenders take each step in turn, on the same batch."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...optim.registry import OPTIMIZERS
from ...planning.sizes import DEFAULT_SIZE, SIZES, Size
from ...system import machine
from .. import tables
from ..device import pick_device
from ..errors import UsageError
from ..process import INTERRUPTED
from .contender import SEED, Contender, line_up
from .data import load_corpus, sample_batch, to_device
from .report import draw, table
from .schedule import learning_rate
from .verdict import bits_equal, curves_agree, tolerance

LIMITS = {"steps": 10**6, "batch": 4096, "threads": machine.MAX_THREADS}
WIDTH = 120  # of the output if it is not a terminal
LINES = 10  # of progress if it is not a terminal


def run(args: argparse.Namespace) -> int:
    """Check the options, train and report. Return the exit status; see command.py."""
    for name, most in LIMITS.items():
        if (value := getattr(args, name)) is not None and not 1 <= value <= most:
            raise UsageError(f"--{name} {value}: must be from 1 to {most:,}")
    device = pick_device(args.device)
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if device.type == "cuda":  # equal weights have equal gradients if these add up in one order, as on a CPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    size = SIZES[DEFAULT_SIZE[device.type]]
    size = replace(size, batch=args.batch or size.batch, steps=args.steps or size.steps)
    entry = next(entry for entry in OPTIMIZERS if entry.module == args.optimizer)
    console = tables.console(WIDTH, markup=False)
    try:
        formats = {"state_format": args.state_format, "param_format": args.param_format}
        contenders = line_up(entry, args.device_budget, formats, size, device)
        train(contenders, size, device, console)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UsageError(f"{str(error) or 'out of memory'}; use a smaller --batch or another --device") from error
    if done := len(contenders[-1].losses):
        console.print(table(contenders, size.batch * size.block))
    if done < size.steps:
        tables.say(console, f"interrupted after step {done} of {size.steps}")
        return INTERRUPTED
    *theirs, ours, spilled = contenders
    allowed = tolerance(device, args.param_format or args.state_format, size.steps)
    answers = curves_agree(theirs[0] if theirs else None, ours, allowed), bits_equal(ours, spilled)
    for _, sentence in answers:
        tables.say(console, sentence)
    with writing(args.out):
        where = draw(args.out / "train.png", contenders)
    tables.say(console, where, whole=True)
    return 0 if all(agree for agree, _ in answers) else 1


def train(contenders: Sequence[Contender], size: Size, device: torch.device, console: Console) -> None:
    """Give each step's batch to every contender, until the last step or Ctrl-C."""
    steps = f"{size.steps} steps of {size.batch} x {size.block} bytes"
    tables.say(console, f"{steps}, each taken in turn by {len(contenders)} contenders on {machine.name(device)}")
    text = load_corpus(size.block)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TextColumn("ETA"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=size.steps)
    with contextlib.suppress(KeyboardInterrupt), bar:
        for step in range(size.steps):
            batch = to_device(sample_batch(text, size.batch, size.block, SEED, step), device)
            for contender in contenders:
                contender.step(*batch, learning_rate(step, size.steps, peak=1.0))
            said = f"loss {contenders[-1].losses[-1]:.3f}"
            bar.update(task, advance=1, description=said)
            if not console.is_terminal and (step + 1) % max(1, size.steps // LINES) == 0:
                tables.say(console, f"step {step + 1} of {size.steps}, {said}")


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an OSError into a UsageError that names the folder of the picture."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written to ({error.strerror}); name another folder") from error
