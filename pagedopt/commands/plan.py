"""Say what a configuration will take before anything is allocated: where optimizer state lies at several budgets, how
many bytes cross the link in a step, and how long the step lasts at this machine's rates. Needs no GPU.

examples:
  python -m pagedopt plan --params 7B --param-dtype bfloat16
        seven billion parameters: how long is a step if a quarter, a half, all of the state stays on the GPU?
  python -m pagedopt plan --params 7B --budget 2GiB --state-format bfloat16
        the same with a budget of one's own beside the others, and state of half the size
  python -m pagedopt plan --size gpt2-xl --host-access in_place
        one of `train`'s models, with state that the kernel reads over the link
  python -m pagedopt plan --model model-*.safetensors --my-step 350ms
        shapes from the headers of files; the last column says how much longer a training step of 350 ms becomes
  python -m pagedopt doctor --json > there.json       (on the machine that will do the work)
  python -m pagedopt plan --params 70B --rates there.json

Without --rates this machine is measured, which takes two seconds; where there is no GPU to measure, the rates of an
H200 are assumed, and the table says so. Activations and torch's own caches are not counted: leave room for them.
"""

from __future__ import annotations

import argparse
import bisect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optim.registry import RULE_NAMES
from .errors import UsageError
from .plan_rows import row_dict, short, table, text_of_fitting
from .train.sizes import SIZES

if TYPE_CHECKING:
    import torch

    from ..paging.budget import Budget
    from ..planning.estimate import Estimate
    from ..planning.rates import Rates

HELP = "say what a configuration takes and how long a step lasts, before anything is allocated"
#: What to do where rates do not tell times, by where the parameters are.
UNKNOWN = {
    "cuda": "They come from a machine on which no GPU was measured: run `pagedopt doctor --json` where one is, leave "
    "--rates out, or plan for its CPU with --device cpu.",
    "cpu": "Run `pagedopt doctor --json` where a folder for state files can be written.",
}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what to train").add_mutually_exclusive_group(required=True)
    what.add_argument("--params", metavar="N", help="parameters: 7B, 124M, 7e9 or 7000000000")
    what.add_argument("--size", choices=SIZES, metavar="NAME", help=f"a model of `train`: {', '.join(SIZES)}")
    what.add_argument(
        "--model", type=Path, nargs="+", metavar="FILE", help="safetensors files, or a folder of them; headers are read"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--my-step", metavar="TIME", help="a whole training step of yours, as 350ms, to compare with")
    how.add_argument(
        "--budget", "--device-budget", metavar="BYTES",
        help="device budget to show beside the others: 2GiB, 10%%, 0, 20ms, auto",
    )  # fmt: skip
    how.add_argument("--placement", metavar="NAME", help="mapped (default on cuda), managed, host, device, file, …")
    how.add_argument("--host-access", metavar="WAY", help="staged or in_place; default: the placement's")
    how.add_argument("--rule", metavar="NAME", default="adamw", help=f"{', '.join(RULE_NAMES)}; default: adamw")
    how.add_argument("--param-dtype", metavar="NAME", help="float32 (default), bfloat16, float16 or float64")
    how.add_argument("--state-format", metavar="NAME", help="float32 or bfloat16; default: as the parameters")
    how.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where parameters are; default: cuda")
    output = parser.add_argument_group("machine and output")
    output.add_argument("--rates", type=Path, metavar="FILE", help="rates of the machine, from `doctor --json`")
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Print the plan; always 0."""
    from rich.console import Console

    from ..common.units import text_of_bytes
    from ..planning.rates import ASSUMED
    from .tables import say

    my_step(args)
    spared = spare(args) if args.budget == "auto" else None
    if spared is not None:
        args.budget = spared

    plan(args, ASSUMED)  # what cannot be is refused before anything is measured
    with Console(stderr=True).status("measuring this machine"):
        rows = plan(args, find_rates(args))
    room = find_room(args.device)
    if args.json:
        import json

        from .. import __version__

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
    console.print(table(rows, room, asked(args, rows[0].rates), my_step(args)))
    for line in footing(rows, room, args):
        say(console, line)
    if spared is not None:
        say(console, f"--budget auto: {text_of_bytes(spared)} here, now, beside parameters and gradients.")
    return 0


def find_rates(args: argparse.Namespace) -> Rates:
    """Those of the file, else this machine's where it has the device, else the assumed ones."""
    import torch

    from ..planning.rates import ASSUMED, Rates, measure

    if args.rates is not None:
        try:
            return Rates.load(args.rates)
        except OSError as error:
            reason = f"{error.strerror}; make it with `python -m pagedopt doctor --json`"
            raise UsageError(f"--rates {args.rates}: {reason}") from error
        except ValueError as error:
            raise UsageError(f"--rates {error}") from error
    if args.device == "cuda" and not torch.cuda.is_available():
        return ASSUMED
    return measure(args.device)


def plan(args: argparse.Namespace, rates: Rates) -> list[Estimate]:
    """An estimate for each budget, smallest first; for a placement that keeps none, one."""
    try:
        own = own_budget(args)
        if not takes_budgets(args.placement, args.device):
            return [planned(args, own, rates)]
        some = 0 if own is None or own.everything else own  # so that state is in pages, and as large as in all rows
        first = planned(args, some, rates)
        budgets = {int(share * first.state_bytes) for share in SHARES}
        if own is not None:
            budgets.add(first.state_bytes if own.everything or first.budget is None else first.budget)
        return [planned(args, b, rates) for b in sorted(budgets)]
    except (ValueError, TypeError) as error:
        raise UsageError(in_options(str(error))) from error


def spare(args: argparse.Namespace) -> int:
    """Bytes that ``auto`` would give to state here, now, once parameters and gradients are there.

    Raises:
        UsageError: there is no such device here; an option has a value that cannot be.
    """
    import torch

    from ..paging import policy
    from ..planning.rates import ASSUMED

    try:
        row = planned(args, None, ASSUMED)
    except (ValueError, TypeError) as error:
        raise UsageError(in_options(str(error))) from error
    if not (room := find_room(args.device)):
        raise UsageError("--budget auto: it is read from the device, and there is no GPU here; give bytes or a share")
    limit = torch.cuda.mem_get_info()[1] if row.near == "device" else room[row.near]
    return policy.spare_bytes(limit, 0, max(0, room[row.near] - row.param_bytes - row.grad_bytes), 0, 0)


def planned(args: argparse.Namespace, budget: Budget | int | None, rates: Rates) -> Estimate:
    """The estimate for a budget.

    Raises:
        ValueError, TypeError: an option has a value that cannot be.
    """
    from ..planning.estimate import estimate

    return estimate(
        model(args), rule=args.rule, param_dtype=args.param_dtype, state_format=args.state_format, device=args.device,
        placement=args.placement, host_access=args.host_access, device_budget=budget, rates=rates,
    )  # fmt: skip


def model(args: argparse.Namespace) -> Any:
    """What is to be trained, as ``estimate`` takes it.

    Raises:
        UsageError: a file cannot be read, or a tensor in it not be trained.
    """
    from ..formats.floating import of_dtype, real_dtype
    from ..planning.safetensors import read_parameters

    if args.model is None:
        return args.params if args.params is not None else parameters(args.size)
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


def my_step(args: argparse.Namespace) -> float | None:
    """Seconds of the step to compare with.

    Raises:
        UsageError: it is no time.
    """
    from ..common.units import parse_seconds

    try:
        return None if args.my_step is None else parse_seconds(args.my_step, "--my-step")
    except ValueError as error:
        raise UsageError(str(error).replace(" is ", " ", 1)) from error


def fitting(rows: list[Estimate], room: dict[str, int], args: argparse.Namespace) -> tuple[int, int] | None:
    """The smallest and the largest budget, in bytes, with which everything has room here, now; None: there is none, or
    nothing to choose."""
    if not room or len(rows) < 2:
        return None
    state, near = rows[-1].state_bytes, rows[0].near
    if not short(rows[-1], room):
        most = state
    else:  # what stays grows with the budget, what goes away shrinks
        most = (
            bisect.bisect_left(
                range(state), True, key=lambda budget: near in short(planned(args, budget, rows[0].rates), room)
            )
            - 1
        )
    least = bisect.bisect_left(
        range(state),
        True,
        key=lambda budget: set() == short(planned(args, budget, rows[0].rates), room).keys() - {near},
    )
    return (least, most) if least <= most else None


def own_budget(args: argparse.Namespace) -> Budget | None:
    """The budget asked for; None: none was.

    Raises:
        ValueError: the text is no budget.
    """
    from ..paging.budget import Budget

    return None if args.budget is None else Budget(args.budget)


def asked(args: argparse.Namespace, rates: Rates) -> int | None:
    """The budget asked for, in bytes; None: none was."""
    if (own := own_budget(args)) is None:
        return None
    row = planned(args, own, rates)
    return row.state_bytes if row.budget is None else row.budget


def parameters(size: str) -> list[torch.Tensor]:
    """The parameters of a named model, without memory."""
    import torch

    from .train.gpt import GPT

    with torch.device("meta"):
        return list(GPT(SIZES[size], SIZES[size].block).parameters())


def takes_budgets(placement: str | None, device: str) -> bool:
    """Whether it makes sense to show several budgets; names that are unknown are left to ``estimate``."""
    from ..placements.choose import ARENAS

    kind = ARENAS[device].get(placement or "")
    return kind is None or (kind.paged and kind.keeps_budget)


def in_options(text: str) -> str:
    """A message of the library in the words of the command line."""
    for name in ("device_budget", "host_access", "state_format", "param_dtype", "placement", "rule"):
        option = "--budget" if name == "device_budget" else "--" + name.replace("_", "-")
        text = text.replace(f"{name} is ", f"{option} ").replace(f"{name}=", f"{option} ")
    return text.replace("model is ", "--params ")


def find_room(device: str) -> dict[str, int]:
    """Free bytes by where state can be: ``device`` and ``host``, or ``host`` and ``file``; {} where there is no GPU."""
    import shutil

    import torch

    from ..system.files import host
    from ..system.files.state_file import state_folder

    if device == "cuda" and not torch.cuda.is_available():
        return {}
    room = {"host": host.available()}
    if device == "cuda":
        return {"device": torch.cuda.mem_get_info()[0], **room}
    try:
        return {**room, "file": shutil.disk_usage(state_folder()).free}
    except (OSError, ValueError):
        return {**room, "file": 0}


def heading(row: Estimate, args: argparse.Namespace) -> str:
    """What the table is about."""
    from ..common.units import text_of_bytes, text_of_count

    model = args.size or text_of_count(row.parameters)
    dtype = args.param_dtype or (own_dtypes(args) if args.model else "float32")
    state = f"{args.rule} state {text_of_bytes(row.state_bytes)} in {args.state_format or dtype}"
    ways = f", reached {row.host_access}" if row.host_access else ""
    return (
        f"[bold]{model}[/bold] parameters in {dtype}: {text_of_bytes(row.param_bytes)}, gradients as much again\n"
        f"{state}; placement {row.placement}{ways}"
    )


def own_dtypes(args: argparse.Namespace) -> str:
    """Dtypes of files that are to be trained in these."""
    trained = [p.dtype for p in model(args) if p.is_floating_point() or p.is_complex()]
    names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in trained)
    return f"their own dtype{'s' if len(names) > 1 else ''} ({', '.join(names) or 'none that can be trained'})"


def footing(rows: list[Estimate], room: dict[str, int], args: argparse.Namespace) -> list[str]:
    """On what the numbers rest, and what they leave out."""
    from rich.markup import escape

    from ..common.units import text_of_bytes

    row = rows[0]
    rates = row.rates
    slots = "pages in use" if row.device == "cpu" else "the ring"
    ring = f" and {slots} of {text_of_bytes(row.ring)}" if row.ring else ""
    free = ", ".join(f"{text_of_bytes(n)} on {place}" for place, n in sorted(room.items()))
    way = "to and from the file" if row.device == "cpu" else "over the link"
    lines = [
        f"on {row.near}: state. in all: what {row.near} memory holds: parameters, gradients, state there{ring}; "
        f"activations come on top. moved: bytes {way} in a step, both directions.",
        f"Rates of {'[yellow]' if rates.assumed else ''}{escape(rates.machine)}{'[/yellow]' if rates.assumed else ''}.",
    ]
    if row.unknown_rates:
        lines.append(
            f"Times are unknown: these rates have no {', '.join(row.unknown_rates)}, which parameters on {row.device} "
            f"need. {UNKNOWN[row.device]}"
        )
    if rates.assumed:
        lines.append("For your machine's own: `python -m pagedopt doctor --json > FILE` there, then --rates FILE.")
    if free:
        lines.append(f"Free here, now: {free}.")
    if room and len(rows) > 1:
        lines.append(f"Budgets that fit here, now: {text_of_fitting(fitting(rows, room, args), row.state_bytes)}.")
    return lines
