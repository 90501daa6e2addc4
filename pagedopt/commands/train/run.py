"""The training loop: the contenders take every step in turn, on the same batch."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...planning.sizes import parameter_count
from .. import tables
from ..errors import UsageError
from ..process import INTERRUPTED, this_python
from . import spill
from .checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from .compare import TOLERANCE, Comparison, compare
from .contender import LABELS, Contender
from .contents import WrongContents, check_contents
from .data import Corpus, load_corpus, sample_batch, to_device
from .display import Display
from .files import only_run
from .interrupt import Interrupt
from .progress_report import RESULT, report, show, summarize, table
from .schedule import learning_rate
from .train_options import AS_TORCH, OPTIMIZERS, TrainOptions, resolve, resolve_resumed

COLLECT_EVERY = {"cpu": 1, "cuda": 10}  # steps between transfers of the losses, which wait for the device
VALIDATION_BATCHES = 16
LOG_WIDTH = 120  # of the output if it is not a terminal
VALIDATION_SEED = 2**31  # far from the seeds that people choose for training


class Run:
    """The state of a training run: the contenders, the corpus and the number of steps taken."""

    def __init__(self, options: TrainOptions, corpus: Corpus, contenders: list[Contender], step: int = 0) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.corpus = corpus
        self.contenders = contenders
        self.step = step
        self.checkpoint = Path(options.out) / CHECKPOINT
        self.saved: int | None = None  # the step of the checkpoint that this run has written last

    def train(self, interrupt: Interrupt, console: Console) -> None:
        """Take the remaining steps, or stop after the step in which an interrupt arrives."""
        options = self.options
        with Display(console, self.step, options.steps, options.batch * options.block) as display:
            while self.step < options.steps and not interrupt.requested:
                with interrupt.step():
                    self.take_step()
                    shown = self.step % COLLECT_EVERY[self.device.type] == 0 or self.step == options.steps
                    for contender in self.contenders if shown else ():
                        contender.collect()
                if shown:
                    display.update(self.step, self.contenders)
                if options.checkpoint_every and self.step % options.checkpoint_every == 0:
                    self.save()

    def take_step(self) -> None:
        """Give every contender the same batch. They take turns at going first, so that none always has warm caches."""
        options = self.options
        windows = sample_batch(self.corpus.train, options.batch, options.block, options.seed, self.step)
        inputs, targets = to_device(windows, self.device)
        lr = learning_rate(self.step, options.steps, options.lr)
        for contender in self.contenders[:: -1 if self.step % 2 else 1]:
            contender.step(inputs, targets, lr)
        self.step += 1

    def save(self) -> None:
        """Write a checkpoint, unless that of this step is written; UsageError if the disk is full or fails."""
        if self.saved == self.step:
            return
        content = {
            "options": asdict(self.options),
            "step": self.step,
            "corpus": self.corpus.digest,
            "contenders": {contender.which: contender.state_dict() for contender in self.contenders},
        }
        try:
            save_checkpoint(self.checkpoint, content)
        except OSError as error:
            older = " The one before it is whole." if self.checkpoint.exists() else ""
            raise UsageError(
                f"--out {self.options.out}: the checkpoint of step {self.step} cannot be written "
                f"({error.strerror or error}).{older} Make room there, or name another folder with --out."
            ) from error
        self.saved = self.step

    def free(self) -> None:
        """Drop the contenders, for others to have their memory."""
        self.contenders.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def validate(self, contender: Contender) -> float:
        """Return the loss on held-out files, with the same batches for every contender."""
        options = self.options
        losses = []
        for step in range(VALIDATION_BATCHES):
            windows = sample_batch(self.corpus.validation, options.batch, options.block, VALIDATION_SEED, step)
            losses.append(contender.loss(*to_device(windows, self.device)))
        return float(torch.stack(losses).mean())


def start(args: argparse.Namespace, held: contextlib.ExitStack) -> Run:
    """Check the options and return a run that can take its first step. ``held`` gets the lock of its folder."""
    saved = load_checkpoint(args.resume) if args.resume else None
    options = resolve_resumed(args, saved["options"]) if saved else resolve(args)
    corpus = load_corpus(options.block)
    if saved:
        check_resumed(args.resume, saved, options, corpus)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events are recorded on the current device
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--out {options.out}: cannot be made a folder ({reason})") from error
    held.enter_context(only_run(Path(options.out)))
    contenders = [Contender(which, options) for which in OPTIMIZERS[options.optimizer]]
    if saved:
        for contender in contenders:
            contender.load_state_dict(saved["contenders"][contender.which])
    return Run(options, corpus, contenders, saved["step"] if saved else 0)


def check_resumed(path: Path, saved: dict[str, Any], options: TrainOptions, corpus: Corpus) -> None:
    """Refuse a checkpoint that this run cannot go on from, before anything is allocated."""
    if not isinstance(saved["corpus"], str) or saved["corpus"] != corpus.digest:
        raise UsageError(
            "the checkpoint was made with another version of Python, whose standard library is another text. "
            "Resume with that Python, or start a new run."
        )
    try:
        check_contents(saved, options)
    except WrongContents as error:
        raise UsageError(f"--resume {path}: not a checkpoint of this run: {error}") from error


def text_of_threads(count: int) -> str:
    """Return the CPU as text, where a GPU would be called by its name."""
    return f"CPU, {count} thread{'' if count == 1 else 's'}"


def announce(run: Run, console: Console) -> None:
    """Print what the run is about to do."""
    options, corpus = run.options, run.corpus
    where = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else text_of_threads(options.threads)
    millions = parameter_count(options.shape, options.block) / 1e6
    console.print(
        f"GPT '{options.size}', {millions:.1f} M parameters, on {where}; {options.steps} steps of {options.batch} x "
        f"{options.block} bytes of Python's standard library ({len(corpus.train) / 1e6:.1f} MB to train on, "
        f"{len(corpus.validation) / 1e6:.1f} MB held out); optimizers: {', '.join(c.label for c in run.contenders)}",
        highlight=False,
    )
    if run.step:
        console.print(f"resumed after step {run.step}", highlight=False)


def second_act(first: Run, interrupt: Interrupt, console: Console) -> int:
    """Train the twins of spill.py and report. Return 1 if they differ, 130 if interrupted, else 0."""
    twins = spill.twins(first.options)
    tables.say(console, spill.announcement(*twins), whole=True)
    contenders = [Contender("paged", options, name) for name, options in zip(spill.NAMES, twins, strict=True)]
    act = Run(twins[0], first.corpus, contenders)
    try:
        act.train(interrupt, console)
    except MemoryError as error:
        raise UsageError(f"second act: {error}. The results above are complete; --no-spill leaves it out.") from error
    if interrupt.requested:
        console.print("second act interrupted; the results above are complete", highlight=False)
        return INTERRUPTED
    return spill.report(contenders, Path(first.options.out) / RESULT, console)


def beside_torch(
    current: Run, found: Comparison, fused: list[float], interrupt: Interrupt, console: Console
) -> Comparison | None:
    """Train with torch's foreach AdamW and judge the curves by its distance from the fused one; None if interrupted."""
    text = (
        f"The losses differ by up to {found.max_difference:.2g}, more than {found.tolerance:g}. Is it rounding? "
        f"{LABELS['foreach']} takes the same {current.options.steps} steps, to compare torch with torch: half the time "
        "of the run, and half its memory, which is free by now. The checkpoint is written."
    )
    tables.say(console, text, whole=True)
    options = replace(current.options, checkpoint_every=0)
    again = Contender("foreach", options)
    Run(options, current.corpus, [again]).train(interrupt, console)
    if interrupt.requested:
        return None
    return found.beside(compare(again.curve.losses, fused, found.tolerance).max_difference)


def _interrupted(current: Run, console: Console) -> int:
    """Say how to go on from the checkpoint. Return the exit status."""
    resume = f"{this_python()} -m pagedopt train --resume {shlex.quote(str(current.checkpoint))}"
    text = f"interrupted after step {current.step} of {current.options.steps}; go on with\n  {resume}"
    tables.say(console, text, whole=True)
    return INTERRUPTED


def _train(current: Run, interrupt: Interrupt, console: Console) -> int:
    """Train, save a checkpoint, report and go on to the second act. An interrupted run ends with the checkpoint."""
    options = current.options
    announce(current, console)
    with interrupt:
        current.train(interrupt, console)
        if interrupt.requested:
            current.save()
            return _interrupted(current, console)
        results = {c.which: summarize(c, current.validate(c), options) for c in current.contenders}
        measured = list(results.values())
        show(console, table(measured), measured)  # before any file is written: the disk may be full
        current.save()
        current.free()
        comparison = None
        if len(results) == 2:
            paged, fused = (results[which]["losses"] for which in ("paged", "torch"))
            judged = options.state_format in AS_TORCH
            comparison = compare(paged, fused, TOLERANCE[current.device.type] if judged else None)
            if comparison.needs_yardstick:
                comparison = beside_torch(current, comparison, fused, interrupt, console)
                if comparison is None:
                    return _interrupted(current, console)
        status = report(options, results, comparison, console)
        return second_act(current, interrupt, console) if current.options.spill and not status else status


def run(args: argparse.Namespace, interrupt: Interrupt | None = None) -> int:
    """Train and report. Return the exit status; see command.py."""
    console = tables.console(LOG_WIDTH, markup=False)
    try:
        with contextlib.ExitStack() as held:
            return _train(start(args, held), interrupt or Interrupt(), console)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"out of device memory ({str(error).splitlines()[0]}). Any of these helps: --device-budget 0 (PagedAdamW's "
            "state stays on the host); a smaller --batch, --block or --size; --optimizer paged (one model is trained "
            "instead of two)."
        ) from error
    except MemoryError as error:
        raise UsageError(f"{error} (--device-budget and --placement say where state goes)") from error
