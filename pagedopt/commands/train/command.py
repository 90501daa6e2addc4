"""Train a byte-level GPT on the source text of Python's own standard library, with pagedopt's PagedAdamW and with
torch.optim.AdamW side by side: same seed, same batches, step by step in turn. It ends with a table, a plot of both
loss curves, a JSON file and a checkpoint, and says whether the curves agree (exit status 1 if they do not). If they are
further apart than rounding takes them in a short run, torch's AdamW then takes the steps once more in its foreach
implementation: if that is as far from the fused one, PagedAdamW is not to blame. With state in fewer bits
(--state-format int8 or bfloat16) the curves are shown beside each other, and the exit status is 1 only if PagedAdamW's
loss ends above its start while torch's fell. A loss that is not finite always means exit status 1.

With --spill, which is the default on a CPU, a short second act follows: the same training from its start, once with
all optimizer state resident and once with most of it spilled to a file (on a GPU: to the host). It shows where the
bytes are, what spilling costs in time, and that it does not change the losses.

Without a GPU the default is --size small (3.3 M parameters, about two minutes on two cores); with one it is
--size gpt2 (124 M parameters, bfloat16 autocast). The text is bytes, so an embedding of 256 rows would do; the gpt2
sizes have GPT-2's 50,304 rows so that the optimizer meets the tensors of the real model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...planning.sizes import SIZES, parameter_count
from ..parser import BUDGET, PLACEMENT, STATE_FORMAT

HELP = "train a GPT with PagedAdamW beside torch's AdamW and compare the two"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Those without a default take the size's, or on --resume the checkpoint's."""
    model = parser.add_argument_group("model and data")
    sizes = ", ".join(f"{name} ({parameter_count(size, size.block) / 1e6:,.1f} M)" for name, size in SIZES.items())
    text = f"model, with its number of parameters: {sizes}; default: gpt2 on a GPU, else small"
    model.add_argument("--size", choices=SIZES, metavar="NAME", help=text)
    text = "sequences per step; a smaller batch needs less memory for activations; default: the size's"
    model.add_argument("--batch", type=int, metavar="N", help=text)
    model.add_argument("--block", type=int, metavar="N", help="tokens (bytes) per sequence; default: the size's")
    model.add_argument("--steps", type=int, metavar="N", help="optimizer steps of the run; default: the size's")
    model.add_argument("--seed", type=int, metavar="N", help="seed of initial weights and batches; default: 0")

    optimizer = parser.add_argument_group("optimizer")
    text = "train with both in turn, or with one alone, which takes half the memory and time; default: both"
    optimizer.add_argument("--optimizer", choices=("both", "paged", "torch"), help=text)
    text = "peak learning rate, reached after a tenth of the steps; default: the size's"
    optimizer.add_argument("--lr", type=float, metavar="X", help=text)
    text = "weight decay of matrices and embeddings (norms and biases have none); default: 0.1"
    optimizer.add_argument("--weight-decay", type=float, metavar="X", help=text)
    text = f"{STATE_FORMAT} (PagedAdamW alone; below 32 bits its losses are shown beside torch's and not judged)"
    optimizer.add_argument("--state-format", metavar="NAME", help=f"{text}; default: float32, as the parameters")

    state = parser.add_argument_group("where PagedAdamW puts its state (changes no loss, so it may change on --resume)")
    state.add_argument("--device-budget", "--budget", metavar="BYTES", help=f"{BUDGET}; all (default): nothing spills")
    state.add_argument("--placement", metavar="NAME", help=f"{PLACEMENT}; default without a budget: device")
    text = (
        "end with the second act that shows spilling, with --device-budget or else a quarter of the state in RAM (half "
        "of it on a GPU); default: on a CPU, unless a placement or budget is given"
    )
    state.add_argument("--spill", action=argparse.BooleanOptionalAction, default=None, help=text)

    text = "hide the update of state that is away under the next forward (optimizer.attach); default: no"
    state.add_argument("--overlap", choices=("forward",), help=text)

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: cuda if there is a GPU")
    text = "CPU threads of torch; fix it to get the same bits in another run; default: torch's choice"
    machine.add_argument("--threads", type=int, metavar="N", help=text)

    output = parser.add_argument_group("output")
    text = "folder for results and checkpoints, of one run at a time; default: runs/train, on --resume the checkpoint's"
    output.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "steps between checkpoints, written to DIR/checkpoint.pt; 0: only when the run ends; default: 100"
    output.add_argument("--checkpoint-every", type=int, metavar="N", help=text)
    text = (
        "go on from this checkpoint, with its options. The losses are those of an uninterrupted run (bit for bit on a "
        "CPU with the same number of threads)"
    )
    output.add_argument("--resume", type=Path, metavar="FILE", help=text)


def main(args: argparse.Namespace) -> int:
    """Train, report, and return the exit status: 0, 1 if the curves differ or show a fault, 130 if interrupted."""
    from .run import run  # imports torch

    return run(args)
