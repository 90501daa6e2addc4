"""Say what a configuration will take before anything is allocated: where optimizer state lies at several budgets, how
many bytes cross the link between GPU and host in a step, and how long the step lasts at this machine's rates. Needs no
GPU.

examples:
  python -m pagedopt plan --params 7B --param-dtype bfloat16
        seven billion parameters: how long is a step if a quarter, a half, all of the state stays on the GPU?
  python -m pagedopt plan --params 7B --budget 2GiB --state-format int8
        float32 parameters, a row for a budget of 2 GiB, and state in 8 bits
  python -m pagedopt plan --size gpt2-xl --host-access in_place
        one of `train`'s models, with state that the kernel reads and writes over the link
  python -m pagedopt plan --model model-*.safetensors --my-step 350ms
        shapes from the headers of files; a column says how much longer a training step of 350 ms becomes
  python -m pagedopt doctor --json > there.json       (on the machine that will do the work)
  python -m pagedopt plan --params 70B --rates there.json

Without --rates this machine is measured, which takes two seconds; where there is no GPU to measure, the rates of an
H200 are assumed, and the table says so. Activations and torch's own caches are not counted: leave room for them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..common.units import parse_count, parse_seconds, text_of_bytes, text_of_count
from ..formats.names import NUMBER_NAMES, full_name
from ..optim.registry import RULE_NAMES
from ..paging.budget import NOTHING, Budget
from ..planning.sizes import SIZES
from .errors import UsageError
from .parser import BUDGET, PLACEMENT, STATE_FORMAT, any_of
from .plan_rows import row_dict, short, table, text_of_fitting

if TYPE_CHECKING:
    from ..planning.estimate import Estimate
    from ..planning.rates import Rates

HELP = "say what a configuration takes and how long a step lasts, before anything is allocated"
#: What to do if the rates give no times, by the type of the parameters' device.
UNKNOWN = {
    "cuda": "They come from a machine on which no GPU was measured: run `pagedopt doctor --json` where one is, leave "
    "--rates out, or plan for its CPU with --device cpu.",
    "cpu": "Run `pagedopt doctor --json` where a folder for state files can be written.",
}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what to train (one of these)").add_mutually_exclusive_group(required=True)
    what.add_argument("--params", metavar="N", help="number of parameters: 7B, 124M, 7e9 or 7000000000")
    what.add_argument("--size", choices=SIZES, metavar="NAME", help=f"a model of `train`: {', '.join(SIZES)}")
    text = "safetensors files, or a folder of them; only headers are read, for shapes and dtypes"
    what.add_argument("--model", type=Path, nargs="+", metavar="FILE", help=text)
    how = parser.add_argument_group("how to train it")
    rules = f"update rule, which says how much state there is: {', '.join(RULE_NAMES)}; default: adamw"
    how.add_argument("--rule", metavar="NAME", default="adamw", help=rules)
    text = f"dtype of parameters and gradients: {any_of(NUMBER_NAMES)}; default: the files' own, else float32"
    how.add_argument("--param-dtype", metavar="NAME", help=text)
    how.add_argument("--state-format", metavar="NAME", help=f"{STATE_FORMAT}; default: as the parameters")
    how.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where parameters are; default: cuda")
    where = parser.add_argument_group("where to put the state")
    where.add_argument("--budget", "--device-budget", metavar="BYTES", help=f"add a row for a budget: {BUDGET}")
    where.add_argument("--placement", metavar="NAME", help=PLACEMENT)
    text = (
        "how a step reaches state on the host: staged copies it through buffers on the device, in_place lets the "
        "kernel read and write it over the link; default: the placement's"
    )
    where.add_argument("--host-access", metavar="WAY", help=text)
    output = parser.add_argument_group("machine and output")
    text = "rates of the machine that will train, as `doctor --json` wrote them there; default: measure this machine"
    output.add_argument("--rates", type=Path, metavar="FILE", help=text)
    text = "how long your whole training step takes now, as 350ms; adds a column with the slowdown of each budget"
    output.add_argument("--my-step", metavar="TIME", help=text)
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else, for programs")


def main(args: argparse.Namespace) -> int:
    """Print the plan and return 0."""
    from rich.console import Console

    from ..planning.rates import ASSUMED
    from .tables import say

    with option_names():
        whole = None if args.my_step is None else parse_seconds(args.my_step, "my_step")
    spared = spare(args) if args.budget == "auto" else None
    if spared is not None:
        args.budget = Budget(spared)
    plan(args, ASSUMED)  # refuses wrong options before two seconds go into measuring
    with Console(stderr=True).status("measuring this machine"):
        rows, own = plan(args, find_rates(args))
    room = find_room(args.device)
    if args.json:
        content = {
            "pagedopt": __version__,
            "room": room,
            "rows": [row_dict(row, room) for row in rows],
            "fitting_budgets": fitting(rows, room, args),
            "rates": rows[0].rates.as_dict(),
        }
        print(json.dumps(content, indent=1, allow_nan=False))
        return 0
    console = Console()
    say(console, heading(rows[0], args))
    console.print(table(rows, room, own, whole))
    for line in footing(rows, room, args):
        say(console, line)
    if spared is not None:
        say(console, f"--budget auto: {text_of_bytes(spared)} here, now, beside parameters and gradients.")
    return 0


@contextlib.contextmanager
def option_names() -> Iterator[None]:
    """Raise a ValueError or TypeError of the library as UsageError, with the command line's names of the options."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error).replace("model is ", "--params ")
        for name in ("device_budget", "host_access", "state_format", "param_dtype", "placement", "rule", "my_step"):
            option = "--budget" if name == "device_budget" else "--" + name.replace("_", "-")
            text = text.replace(f"{name} is ", f"{option} ").replace(f"{name}=", f"{option} ")
        raise UsageError(text) from error


def find_rates(args: argparse.Namespace) -> Rates:
    """Return the rates of the file if one is given; else measure this machine, or assume rates if it has no GPU."""
    import torch

    from ..planning.rates import ASSUMED, Rates, measure

    if args.rates is None:
        return ASSUMED if args.device == "cuda" and not torch.cuda.is_available() else measure(args.device)
    try:
        return Rates.load(args.rates)
    except OSError as error:
        reason = f"{error.strerror}; make it with `python -m pagedopt doctor --json`"
        raise UsageError(f"--rates {args.rates}: {reason}") from error
    except ValueError as error:
        raise UsageError(f"--rates {error}") from error


@option_names()
def plan(args: argparse.Namespace, rates: Rates) -> tuple[list[Estimate], int | None]:
    """Return (an estimate for each budget, smallest first; the budget in bytes that was asked for, or None).

    There is only one estimate if the placement does not keep budgets.
    """
    from ..placements.choose import ARENAS

    own = None if args.budget is None else Budget.parse(args.budget)
    if own is not None and own is not args.budget:
        own.check_unit()
    kind = ARENAS[args.device].get(args.placement or "")  # ``estimate`` refuses unknown names
    if kind is not None and not (kind.paged and kind.keeps_budget):
        row = planned(args, own, rates)
        return [row], row.budget
    # A budget puts state into pages, whose bytes all shares refer to. So the first estimate must have one.
    first = planned(args, NOTHING if own is None or own.everything else own, rates)
    budgets = {int(share * first.state_bytes) for share in SHARES}
    asked = None
    if own is not None:
        asked = first.state_bytes if own.everything or first.budget is None else first.budget
        budgets.add(asked)
    return [planned(args, Budget(budget), rates) for budget in sorted(budgets)], asked


@option_names()
def spare(args: argparse.Namespace) -> int:
    """Return the bytes that ``auto`` would give to state here and now, beside parameters and gradients."""
    import torch

    from ..paging import policy
    from ..planning.rates import ASSUMED

    row = planned(args, None, ASSUMED)
    if not (room := find_room(args.device)):
        raise UsageError("--budget auto: it is read from the device, and there is no GPU here; give bytes or a share")
    limit = torch.cuda.mem_get_info()[1] if row.near == "device" else room[row.near]
    return policy.spare_bytes(limit, 0, max(0, room[row.near] - row.param_bytes - row.grad_bytes), 0, 0)


def planned(args: argparse.Namespace, budget: Budget | None, rates: Rates) -> Estimate:
    """Return the estimate for one budget; ValueError or TypeError if an option has a wrong value."""
    from ..planning.estimate import estimate

    return estimate(
        model(args), rule=args.rule, param_dtype=args.param_dtype, state_format=args.state_format, device=args.device,
        placement=args.placement, host_access=args.host_access, device_budget=budget, rates=rates,
    )  # fmt: skip


def model(args: argparse.Namespace) -> Any:
    """Return the model as ``estimate`` takes it: a number of parameters, or tensors without memory.

    Raises:
        UsageError: a file cannot be read, or holds a tensor that cannot be trained.
    """

    from ..formats.floating import of_dtype, real_dtype
    from ..planning.safetensors import read_parameters

    if args.params is not None:
        return parse_count(args.params, "model")
    if args.size is not None:
        return args.size
    try:
        found = [(path, *one) for path in args.model for one in read_parameters(path).items()]
    except OSError as error:
        raise UsageError(f"--model {error.filename or args.model[-1]}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--model {error}") from error
    for path, name, tensor in found:
        if (tensor.is_floating_point() or tensor.is_complex()) and args.param_dtype is None:
            try:
                of_dtype(real_dtype(tensor.dtype), f"tensor {name!r}")
            except TypeError as error:
                raise UsageError(f"--model {path}: {error}; --param-dtype says as what it is trained") from error
    return [tensor for *_, tensor in found]


def fitting(rows: list[Estimate], room: dict[str, int], args: argparse.Namespace) -> tuple[int, int] | None:
    """Return the smallest and the largest budget, in bytes, for which this machine has room now.

    Return None if there is none, if the room is not known, or if there is only one row.
    """
    if not room or len(rows) < 2:
        return None
    state, near = rows[-1].state_bytes, rows[0].near

    def lacking(budget: int) -> set[str]:
        return set(short(planned(args, Budget(budget), rows[0].rates), room))

    # A larger budget needs more memory near the parameters and less away from them, so each bound can be bisected.
    most = state
    if short(rows[-1], room):
        most = bisect_left(range(state), True, key=lambda budget: near in lacking(budget)) - 1
    least = bisect_left(range(state), True, key=lambda budget: not lacking(budget) - {near})
    return (least, most) if least <= most else None


def find_room(device: str) -> dict[str, int]:
    """Return the free bytes of ``device`` and ``host``, or of ``host`` and ``file`` for a CPU. Empty without a GPU."""
    import torch

    from ..system.files import host
    from ..system.files.state_file import state_folder

    if device == "cuda":
        if not torch.cuda.is_available():
            return {}
        return {"device": torch.cuda.mem_get_info()[0], "host": host.available()}
    try:
        free = shutil.disk_usage(state_folder()).free
    except (OSError, ValueError):
        free = 0
    return {"host": host.available(), "file": free}


def heading(row: Estimate, args: argparse.Namespace) -> str:
    """Return two lines that say what is planned."""
    dtype = args.param_dtype or (own_dtypes(args) if args.model else "float32")
    state = f"{args.rule} state {text_of_bytes(row.state_bytes)} in {full_name(args.state_format or dtype)}"
    access = f", reached {row.host_access}" if row.host_access else ""
    return (
        f"{f'{args.size}, ' if args.size else ''}[bold]{text_of_count(row.parameters)}[/bold] parameters in {dtype}: "
        f"{text_of_bytes(row.param_bytes)}, gradients as much again\n{state}; placement {row.placement}{access}"
    )


def own_dtypes(args: argparse.Namespace) -> str:
    """Return the dtypes of the trained tensors in the files of --model, in words."""
    trained = [p.dtype for p in model(args) if p.is_floating_point() or p.is_complex()]
    names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in trained)
    return f"their own dtype{'s' if len(names) > 1 else ''} ({', '.join(names) or 'none that can be trained'})"


def footing(rows: list[Estimate], room: dict[str, int], args: argparse.Namespace) -> list[str]:
    """Return lines that explain the columns, and say where the rates come from and what has room here."""
    from rich.markup import escape

    row = rows[0]
    rates = row.rates
    slots = "pages in use" if row.device == "cpu" else "the ring"
    ring = f" and {slots} of {text_of_bytes(row.ring)}" if row.ring else ""
    path = "to and from the file" if row.device == "cpu" else "over the link"
    lines = [
        f"on {row.near}: state. in all: what {row.near} memory holds: parameters, gradients, state there{ring}; "
        f"activations come on top. moved: bytes {path} in a step, both directions.",
        f"Rates of {'[yellow]' if rates.assumed else ''}{escape(rates.machine)}{'[/yellow]' if rates.assumed else ''}.",
    ]
    if row.unknown_rates:
        lines.append(
            f"Times are unknown: these rates have no {', '.join(row.unknown_rates)}, which parameters on {row.device} "
            f"need. {UNKNOWN[row.device]}"
        )
    if rates.assumed:
        lines.append("For your machine's own: `python -m pagedopt doctor --json > FILE` there, then --rates FILE.")
    if room:
        free = ", ".join(f"{text_of_bytes(n)} on {where}" for where, n in sorted(room.items()))
        lines.append(f"Free here, now: {free}.")
    if room and len(rows) > 1:
        lines.append(f"Budgets that fit here, now: {text_of_fitting(fitting(rows, room, args), row.state_bytes)}.")
    return lines
