"""Say what a configuration will take before anything is allocated: where optimizer state lies at several budgets, how
many bytes cross the link between GPU and host in a step, and how long the step lasts at this machine's rates. Needs no
GPU.

examples:
  python -m pagedopt plan --params 7B --param-dtype bfloat16
        seven billion parameters: how long is a step if a quarter, a half, all of the state stays on the GPU?
  python -m pagedopt plan --params 7B --param-dtype bfloat16 --card 48GB
        which budget fits on a card of this size, beside parameters and gradients, and what is to be written?
  python -m pagedopt plan --params 7B --param-dtype bfloat16 --time 20ms
        with which budget is a step at most 20 ms longer than with all state on the GPU?
  python -m pagedopt plan --params 7B --budget 2GiB --state-format int8
        float32 parameters, a row for a budget of 2 GiB, and state in 8 bits
  python -m pagedopt plan --size gpt2-xl --host-access in_place
        one of `train`'s models, with state that the kernel reads and writes over the link
  python -m pagedopt plan --model model-*.safetensors
        shapes and dtypes from the headers of files
  python -m pagedopt doctor --json > there.json       (on the machine that will do the work)
  python -m pagedopt plan --params 70B --rates there.json

Without --rates this machine is measured, which takes two seconds; where there is no GPU to measure, the rates of an
H200 are assumed, and the table says so. Activations and torch's own caches are not counted: leave room for them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import __version__
from ..formats.names import NUMBER_NAMES
from ..optim.registry import RULE_NAMES
from ..planning.sizes import SIZES
from .parser import BUDGET, PARAM_FORMAT, PLACEMENT, STATE_FORMAT, UsageError, any_of

HELP = "say what a configuration takes and how long a step lasts, before anything is allocated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what to train (one of these)").add_mutually_exclusive_group(required=True)
    what.add_argument("--params", metavar="N", help="number of parameters: 7B, 124M, 7e9 or 7000000000")
    what.add_argument("--size", choices=SIZES, metavar="NAME", help=f"a GPT of one of these sizes: {', '.join(SIZES)}")
    text = "safetensors files, or a folder of them; only headers are read, for shapes and dtypes"
    what.add_argument("--model", type=Path, nargs="+", metavar="FILE", help=text)
    how = parser.add_argument_group("how to train it")
    rules = f"update rule, which says how much state there is: {', '.join(RULE_NAMES)}; default: adamw"
    how.add_argument("--rule", metavar="NAME", default="adamw", help=rules)
    text = f"dtype of parameters and gradients: {any_of(NUMBER_NAMES)}; default: the files' own, else float32"
    how.add_argument("--param-dtype", metavar="NAME", help=text)
    how.add_argument("--state-format", metavar="NAME", help=f"{STATE_FORMAT}; default: as the parameters")
    how.add_argument("--param-format", metavar="NAME", help=f"{PARAM_FORMAT}; default: --param-dtype alone")
    how.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where parameters are; default: cuda")
    ask = parser.add_argument_group("which budgets to add to the table (each of these adds a row, which is marked)")
    ask.add_argument("--budget", "--device-budget", metavar="BYTES", help=BUDGET)
    text = (
        "the largest budget that fits on a GPU with so much memory, as 24GB (on a CPU: into so much RAM), and the call"
    )
    ask.add_argument("--card", metavar="BYTES", help=text)
    text = "the smallest budget with which a step is at most so much longer than with all state on the GPU, as 20ms"
    ask.add_argument("--time", metavar="TIME", help=text)
    where = parser.add_argument_group("where to put the state")
    where.add_argument("--placement", metavar="NAME", help=PLACEMENT)
    text = "staged: state on the host passes through buffers on the GPU; in_place: the kernel reads and writes it there"
    where.add_argument("--host-access", metavar="WAY", help=f"{text}; default: the placement's")
    output = parser.add_argument_group("machine and output")
    text = "rates of the machine that will train, as `doctor --json` wrote them there; default: measure this machine"
    output.add_argument("--rates", type=Path, metavar="FILE", help=text)
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else, for programs")
    output.add_argument("--my-step", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Print the plan and return 0."""
    from rich.console import Console

    from ..planning.rates import ASSUMED
    from .plan_rows import find_rates, find_room, plan, row_dict, show

    if args.my_step is not None:
        raise UsageError("--my-step is gone; --time 20ms finds the budget with which a step is at most 20 ms longer")
    plan(args, ASSUMED, {})  # refuses wrong options before two seconds go into measuring
    with Console(stderr=True).status("measuring this machine"):
        rates = find_rates(args)
    found = plan(args, rates, find_room(args.device))
    if args.json:
        rows = [row_dict(row, found) for row in found.rows]
        about = {"pagedopt": __version__, "room": found.room, "rows": rows, "rates": rates.as_dict()}
        print(json.dumps(about, indent=1, allow_nan=False))
    else:
        show(found, args)
    return 0
