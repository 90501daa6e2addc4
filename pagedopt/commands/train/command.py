"""Train a byte-level GPT on the source text of Python's own standard library, with pagedopt's PagedAdamW and with
torch.optim.AdamW side by side: same seed, same batches, step by step in turn. It ends with a table, a plot of both
loss curves and a JSON file, and says whether the curves lie on each other (exit status 1 if they do not).

With --spill a short second act follows, on a CPU by default: the same training from its start, once with all optimizer
state at hand and once with most of it spilled, to a file (on a GPU: to the host). It shows where the bytes are and what
the detour costs, and that the losses do not change.

Without a GPU the default is --size small (3.3 M parameters, about two minutes on two cores); with one it is
--size gpt2 (124 M parameters, bfloat16 autocast). The text is bytes, so 256 rows of an embedding would do; the gpt2
sizes keep GPT-2's 50,304 rows so that the optimizer meets the tensors of the real model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .sizes import SIZES, parameter_count

HELP = "train a GPT with PagedAdamW beside torch's AdamW and compare the two"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Those without a default take the size's, or on --resume the checkpoint's."""
    model = parser.add_argument_group("model and data")
    sizes = ", ".join(f"{name} ({parameter_count(size, size.block) / 1e6:,.1f} M)" for name, size in SIZES.items())
    model.add_argument("--size", choices=SIZES, metavar="NAME", help=f"{sizes}; default: gpt2 on a GPU, small without")
    model.add_argument("--batch", type=int, metavar="N", help="sequences per step; default: the size's")
    model.add_argument("--block", type=int, metavar="N", help="tokens per sequence; default: the size's")
    model.add_argument("--steps", type=int, metavar="N", help="optimizer steps; default: the size's")
    model.add_argument("--seed", type=int, metavar="N", help="of the weights and the batches; default: 0")

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--optimizer", choices=("both", "paged", "torch"), help="which to train; default: both")
    optimizer.add_argument("--lr", type=float, metavar="X", help="peak learning rate; default: the size's")
    optimizer.add_argument("--weight-decay", type=float, metavar="X", help="of matrices and embeddings; default: 0.1")

    _add_state_arguments(parser.add_argument_group("where PagedAdamW keeps its state"))

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: cuda where there is a GPU")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch; default: torch's choice")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="of one run at a time; default: runs/train, or the checkpoint's on --resume",
    )
    output.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="steps between checkpoints, written to DIR/checkpoint.pt; 0: only when interrupted; default: 100",
    )
    output.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="go on from this checkpoint, with its options; the same losses follow as without the interruption "
        "(bit for bit on a CPU with the same number of threads)",
    )


def _add_state_arguments(state: argparse._ArgumentGroup) -> None:
    """Declare the options that change no loss, and so may change on --resume too."""
    state.add_argument(
        "--device-budget",
        "--budget",
        metavar="BYTES",
        help="how much of it stays on the device (on a CPU: in RAM), as 2GiB, 500MB, 25%% or 0; the rest is spilled to "
        "the host (on a CPU: to a file). '20 ms': as much is spilled as a step may take longer for; all: nothing is "
        "spilled; auto: what the machine can spare; default: all",
    )
    state.add_argument(
        "--placement",
        metavar="NAME",
        help="device, mapped, managed, managed-driver or host; on a CPU device, host or file; default: device, or with "
        "a budget mapped, on a CPU file",
    )
    state.add_argument(
        "--spill",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end with a second act that shows spilling, with --device-budget or, without, a quarter of the state in "
        "RAM (half on a GPU); default: on a CPU, unless a placement or budget is given",
    )


def main(args: argparse.Namespace) -> int:
    """Train, report, and return the exit status: 0, 1 if the curves part, 130 if interrupted."""
    from .run import run  # imports torch

    return run(args)
