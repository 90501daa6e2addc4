"""The run of ``train``: contenders take each step in turn on one batch; what they measure, and whether they agree."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from ..common.units import text_of_bytes
from ..formats.names import full_name
from ..optim.registry import OPTIMIZERS, Entry
from ..planning.sizes import DEFAULT_SIZE, SIZES, Size
from ..system import machine
from .gpt import build_model, learning_rate, load_corpus, sample_batch, to_device
from .parser import UsageError, pick_device
from .process import INTERRUPTED
from .tables import console, new_figure, results_table, say

# --- contenders -------------------------------------------------------------------------------------------------------

SEED = 0  # of weights and batches
CLIP_NORM = 1.0
#: By optimizer: its peak learning rate as a multiple of AdamW's, which comes with the model's size; other arguments.
RECIPES: dict[str, tuple[float, dict[str, Any]]] = {
    "adamw": (1.0, {"betas": (0.9, 0.95), "weight_decay": 0.1}),  # the betas of GPT-3
    "sgd": (30.0, {"momentum": 0.9}),
    "lion": (0.2, {"weight_decay": 0.5}),
    "radam": (10.0, {}),  # its first steps divide by no root
    "adadelta": (300.0, {}),  # whose own default is 1
}


class Contender:
    """An optimizer with a model of its own. It notes each step's loss, time, and time of the optimizer."""

    def __init__(self, name: str, kind: Any, given: dict[str, Any], size: Size, device: torch.device) -> None:
        self.name, self.device = name, device
        self.model = build_model(size, SEED, device)
        if given.get("param_format"):
            self.model.bfloat16()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]  # norms and biases, which do not decay
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer = kind(groups, **given)
        self.losses, self.step_ms, self.optimizer_ms = (list[float]() for _ in range(3))

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> None:
        """Take a step at ``rate`` times the peak learning rate. On a GPU matrix products are in bfloat16."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.optimizer.defaults["lr"]
        start = self._now()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        before = self._now()
        self.optimizer.step()
        end = self._now()
        self.optimizer.zero_grad()
        self.step_ms.append(1e3 * (end - start))
        self.optimizer_ms.append(1e3 * (end - before))
        self.losses.append(loss.item())  # at last: of each loss that an interrupt leaves, the times are there

    def _now(self) -> float:
        """Return the time in seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def state_bytes(self) -> Counter[str]:
        """Return the bytes of optimizer state by place: ``device``, ``host``, ``file``."""
        if report := getattr(self.optimizer, "memory_report", None):
            return Counter(report().by_place) + Counter(device=report().ring)  # slots that pages pass through
        tensors = [value for state in self.optimizer.state.values() for value in state.values() if value is not None]
        return sum((Counter({"device" if t.is_cuda else "host": t.nbytes}) for t in tensors), Counter[str]())


def line_up(
    entry: Entry, budget: str, formats: dict[str, str | None], size: Size, device: torch.device
) -> list[Contender]:
    """Return the contenders: torch's, if it has this optimizer, ours with these formats, and ours with the budget.

    Raises:
        UsageError: our optimizer refuses the budget or a format.
    """
    factor, arguments = RECIPES.get(entry.module, (1.0, {}))
    given: dict[str, Any] = {"lr": factor * size.lr, **arguments}
    ours = {**given, **formats, "preallocate": True}
    lined_up: list[tuple[str, Any, dict[str, Any]]] = [
        (entry.name, entry.optimizer, ours),
        (f"{entry.name}, {budget}", entry.optimizer, {**ours, "device_budget": budget}),
    ]
    if theirs := entry.torch:
        fused = {"fused": True} if "fused" in inspect.signature(theirs).parameters else {}
        lined_up.insert(0, (f"torch {theirs.__name__}", theirs, {**given, **fused}))
    try:
        return [Contender(*each, size, device) for each in lined_up]
    except ValueError as error:  # it names the option
        raise UsageError(str(error)) from error


# --- do they agree? each answer is whether they do, and a sentence ----------------------------------------------------


def tolerance(device: torch.device, stored: str | None, steps: int) -> float:
    """Return how far ours and torch's losses may be apart at any step, in nats per byte.

    Training amplifies rounding. In float32, AdamWs that round otherwise were 5e-7 to 8e-5 apart within 60 steps, and
    2e-5 to 5e-4 within 1,000; one that forgets weight decay 3e-3 and 5e-2 (notes/raw/train-yardstick-cpu.txt). A GPU
    multiplies in bfloat16, and a step at which the loss jumps amplifies more: on an H200 torch's fused and foreach
    AdamW were 0.003 apart within 200 steps, ours 0.008, and once 0.084 within 300 (notes/raw/train-yardstick-h200.txt).
    State or parameters of fewer bits train otherwise: their curve has to stay in sight of torch's. ``stored`` is the
    format of one of them.
    """
    if full_name(stored or "float32") not in ("float32", "float64"):
        return 1.0
    return 0.25 if device.type == "cuda" else min(0.05, max(5e-4, 1e-5 * steps))


def curves_agree(theirs: Contender | None, ours: Contender, allowed: float) -> tuple[bool, str]:
    """Compare the losses of every step. Losses that are not finite never agree."""
    if theirs is None:
        first, last = ours.losses[0], ours.losses[-1]
        return math.isfinite(last), f"torch has no such optimizer; the loss went from {first:.3f} to {last:.3f}."
    apart = [d if math.isfinite(d := abs(a - b)) else math.inf for a, b in zip(theirs.losses, ours.losses, strict=True)]
    agree = (most := max(apart)) <= allowed
    where = f"{most:.2g} (step {apart.index(most) + 1} of {len(apart)})"
    reason = ", as state or parameters of fewer bits may" if allowed == 1 else ""
    return agree, (
        f"The curves {'agree' if agree else 'DO NOT AGREE'}: the losses of {ours.name} and {theirs.name} differ by at "
        f"most {where}{reason}; the tolerance is {allowed:.2g}."
    )


def bits_equal(resident: Contender, spilled: Contender) -> tuple[bool, str]:
    """Compare the bits of all losses, and of the weights after the last step."""
    equal = all(map(torch.equal, _bits(resident), _bits(spilled)))
    changed = "has changed no bit" if equal else "HAS CHANGED BITS"
    return equal, f"The budget {changed} of {len(resident.losses)} losses and of the weights they led to."


def _bits(contender: Contender) -> list[torch.Tensor]:
    values = [torch.tensor(contender.losses), *(p.detach().flatten() for p in contender.model.parameters())]
    return [value.view(torch.uint8) for value in values]


# --- a table and a picture --------------------------------------------------------------------------------------------

FINAL_STEPS = 10  # the loss in the table is their mean, since batches differ
PLACES = {"device": "black", "host": "dimgray", "file": "lightgray"}  # and their colours


def table(contenders: Sequence[Contender], tokens: int) -> Table:
    """Return a row for each contender, after steps of ``tokens`` tokens; losses are of steps that all have taken."""
    state = [contender.state_bytes() for contender in contenders]
    places = [place for place in PLACES if any(by_place[place] for by_place in state)]
    rows = [
        {
            "optimizer": contender.name,
            "loss": f"{fmean(contender.losses[: len(contenders[-1].losses)][-FINAL_STEPS:]):.4f}",
            "tokens/s": f"{1e3 * tokens / median(contender.step_ms):,.0f}",
            "optimizer ms (median)": f"{median(contender.optimizer_ms):.2f}",
            **{f"state on {place}": text_of_bytes(by_place[place]) for place in places},
        }
        for contender, by_place in zip(contenders, state, strict=True)
    ]
    return results_table(rows)


def draw(path: Path, contenders: Sequence[Contender]) -> str:
    """Draw the loss curves, and the bytes of state by place. Return a line that says where, or why not."""
    if (figure := new_figure(11, 4.5)) is None:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    state = [contender.state_bytes() for contender in contenders]
    for contender, width in zip(contenders, (7, 4, 1), strict=False):  # the curves lie on each other
        curves.plot(range(1, len(contender.losses) + 1), contender.losses, linewidth=width, label=contender.name)
    beneath = [0.0] * len(state)
    for place, color in PLACES.items():
        heights = [by_place[place] / 2**20 for by_place in state]
        if any(heights):
            bars.bar([c.name for c in contenders], heights, bottom=beneath, color=color, label=f"on {place}")
            beneath = [low + high for low, high in zip(beneath, heights, strict=True)]
    curves.set(xlabel="step", ylabel="training loss (nats per byte)")
    bars.set(ylabel="optimizer state (MiB)", ylim=(0, 1.25 * max(beneath)))  # the legend stands above the bars
    for axes in (curves, bars):
        axes.legend()
    figure.savefig(path, dpi=150)
    return f"picture: {path}"


# --- the run ----------------------------------------------------------------------------------------------------------

LIMITS = {"steps": 10**6, "batch": 4096, "threads": machine.MAX_THREADS}
WIDTH = 120  # of the output if it is not a terminal
LINES = 10  # of progress if it is not a terminal


def run(args: argparse.Namespace) -> int:
    """Check the options, train and report. Return the exit status; see train.py."""
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
    screen = console(WIDTH, markup=False)
    try:
        formats = {"state_format": args.state_format, "param_format": args.param_format}
        contenders = line_up(entry, args.device_budget, formats, size, device)
        train(contenders, size, device, screen)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UsageError(f"{str(error) or 'out of memory'}; use a smaller --batch or another --device") from error
    if done := len(contenders[-1].losses):
        screen.print(table(contenders, size.batch * size.block))
    if done < size.steps:
        say(screen, f"interrupted after step {done} of {size.steps}")
        return INTERRUPTED
    *theirs, ours, spilled = contenders
    allowed = tolerance(device, args.param_format or args.state_format, size.steps)
    answers = curves_agree(theirs[0] if theirs else None, ours, allowed), bits_equal(ours, spilled)
    for _, sentence in answers:
        say(screen, sentence)
    with writing(args.out):
        where = draw(args.out / "train.png", contenders)
    say(screen, where, whole=True)
    return 0 if all(agree for agree, _ in answers) else 1


def train(contenders: Sequence[Contender], size: Size, device: torch.device, screen: Console) -> None:
    """Give each step's batch to every contender, until the last step or Ctrl-C."""
    steps = f"{size.steps} steps of {size.batch} x {size.block} bytes"
    say(screen, f"{steps}, each taken in turn by {len(contenders)} contenders on {machine.name(device)}")
    text = load_corpus(size.block)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TextColumn("ETA"))
    bar = Progress(*columns, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal)
    task = bar.add_task("", total=size.steps)
    with contextlib.suppress(KeyboardInterrupt), bar:
        for step in range(size.steps):
            batch = to_device(sample_batch(text, size.batch, size.block, SEED, step), device)
            for contender in contenders:
                contender.step(*batch, learning_rate(step, size.steps, peak=1.0))
            said = f"loss {contenders[-1].losses[-1]:.3f}"
            bar.update(task, advance=1, description=said)
            if not screen.is_terminal and (step + 1) % max(1, size.steps // LINES) == 0:
                say(screen, f"step {step + 1} of {size.steps}, {said}")


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an OSError into a UsageError that names the folder of the picture."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written to ({error.strerror}); name another folder") from error
