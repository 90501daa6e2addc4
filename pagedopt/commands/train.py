"""Train a small GPT with torch's optimizer, with ours, and with ours on a budget."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..optim.registry import OPTIMIZERS
from .parser import BUDGET, PARAM_FORMAT, STATE_FORMAT, any_of

HELP = "train a GPT with torch's optimizer, with ours, and with ours on a budget, and compare"
NAMES = [entry.module for entry in OPTIMIZERS]
#: Options of version 0.1.0 that are gone, and what to write instead.
GONE = {
    "--size --block": "leave it out: the model has 3.3 M parameters on a CPU, and 124 M (GPT-2) on a GPU",
    "--seed": "leave it out: every run has the same weights and batches",
    "--lr --weight-decay": "leave it out, each optimizer has its own; examples/loop.py is a loop to change",
    "--placement": "write --device-budget 0, and all state goes to a file (from a GPU to the host)",
    "--spill --no-spill": "write --device-budget for how much state stays; one contender always spills the rest",
    "--overlap": "write optimizer.attach(model) in a loop of your own, as examples/overlap.py does",
    "--resume --checkpoint-every": "run it anew, it takes a minute; examples/loop.py saves a run and goes on with it",
}


class Gone(argparse.Action):
    """An option that ends the command with the sentence in ``const``."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option} is gone: {self.const}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--optimizer", choices=NAMES, default="adamw", metavar="NAME", help=f"{any_of(NAMES)}; default: %(default)s")
    add("--device-budget", "--budget", default="25%", metavar="BYTES", help=f"{BUDGET}; default: 25%%")
    add("--state-format", metavar="NAME", help=f"{STATE_FORMAT}; default: as the parameters, float32")
    add("--param-format", metavar="NAME", help=f"{PARAM_FORMAT}; torch's stay float32; default: float32")
    add("--steps", type=int, metavar="N", help="of the training; default: 125 on a CPU, 300 on a GPU")
    add("--batch", type=int, metavar="N", help="sequences a step; default: 4 on a CPU, 8 on a GPU")
    add("--threads", type=int, metavar="N", help="of torch on the CPU; another number, other bits; default: torch's")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: cuda if there is a GPU")
    text = "folder of the picture, train.png; default: %(default)s"
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help=text)
    for options, instead in GONE.items():
        add(*options.split(), action=Gone, nargs="?", const=instead, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Train and report. Return 0; 1 if curves or bits differ; 130 after Ctrl-C."""
    from .contest import run  # imports torch

    return run(args)
