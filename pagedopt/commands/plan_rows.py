"""The rows of a plan: by shares of the state, and by the options that ask for a budget."""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..common.units import parse_bytes, parse_count, parse_seconds, text_of_bytes, text_of_count, text_of_seconds
from ..formats.names import full_name
from ..paging.budget import Budget
from ..placements.choose import ARENAS
from ..planning.estimate import Estimate, estimate
from ..planning.model import read_parameters
from ..planning.rates import ASSUMED, Rates
from ..system import host
from .examine import folder
from .parser import UsageError
from .tables import FittingTable, numbers, say

#: Shares of the state for which there are rows; and what budgets that are looked for are multiples of.
SHARES, MIB = (0.0, 0.25, 0.5, 0.75, 1.0), 1 << 20
#: Formats that take least, and the call with which gradients take least.
NARROW: dict[str, Any] = {"param_dtype": "bfloat16", "state_format": "int8"}
LIMITS = "(no clipping, one backward a step)"
WITHIN = "optimizer.attach(model, overlap='backward')"
#: An option in a message of the library.
OPTIONS = "budget|host_access|state_format|param_dtype|param_format|placement|rule"
OPTION = re.compile(rf"\b(?:device_)?({OPTIONS})(?: is |=)")


class Plan(NamedTuple):
    """What a plan says.

    Attributes:
        rows: estimates, by budget; the last has all state near.
        asked: by its bytes the option that asked for a budget.
        room: free bytes by where state can be; empty if they are not known.
        narrow: of --card, the least that a model in 16 bits with state in 8 takes.
    """

    rows: list[Estimate]
    asked: dict[Any, str]
    room: dict[str, int]
    narrow: Estimate | None = None


@contextlib.contextmanager
def refusing(option: str = "") -> Iterator[None]:
    """Raise errors of the library as UsageError, which begins with ``option``, or has the command line's names."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option}{error.filename}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        text = OPTION.sub(lambda found: f"--{found[1].replace('_', '-')} ", str(error))
        raise UsageError(option + text.replace("model is ", "--params ")) from error


@refusing()
def plan(args: argparse.Namespace, rates: Rates, room: dict[str, int]) -> Plan:
    """Return an estimate for each budget, smallest first; only one if the placement does not keep budgets.

    ``room`` is what is free here; with --card it is that card's instead.
    """
    planned = functools.partial(
        estimate, model(args), rule=args.rule, param_dtype=_dtype(args), state_format=args.state_format,
        param_format=args.param_format, placement=args.placement, host_access=args.host_access, device=args.device,
        rates=rates,
    )  # fmt: skip
    if args.card is not None:
        room = {"host" if args.device == "cpu" else "device": parse_bytes(args.card, "--card")}
    kind = ARENAS[args.device].get(args.placement or "")  # ``estimate`` refuses unknown names
    if kind is not None and not (kind.paged and kind.keeps_budget) and args.time is None:
        return Plan([planned(device_budget=args.budget)], {}, room)
    # A budget puts state into pages, whose bytes all shares refer to. So the first estimate must have one.
    first = planned(device_budget=0 if args.budget in (None, "all") else args.budget)
    state, asked = first.state_bytes, dict[Any, str]()

    def least(holds: Callable[[Estimate], bool]) -> int:
        """Return the smallest budget that ``holds``, as all larger ones do; more than the state if none does."""
        return bisect_left(range(state + 1), True, key=lambda n: holds(planned(device_budget=Budget(n))))

    if args.budget is not None:
        asked[state if args.budget == "all" else first.budget] = f"--budget {args.budget}"
    if args.time is not None:
        near, longest = planned(device_budget=Budget(state)), parse_seconds(args.time, "--time")
        if lacking := planned(device_budget=0).unknown_rates or near.unknown_rates:
            raise UsageError(
                f"--time {args.time}: {rates.machine} has no rates {', '.join(lacking)}; give --rates FILE"
            )
        nbytes = least(lambda row: row.seconds - near.seconds <= longest)  # type: ignore[operator]
        asked[min(-(-nbytes // MIB) * MIB, state)] = f"--time {args.time}"
    if args.card is not None and (nbytes := least(lambda row: row.near_bytes > room[row.near]) - 1) >= 0:
        asked[nbytes if nbytes == state else nbytes // MIB * MIB] = f"--card {args.card}"
    budgets = sorted({*(int(share * state) for share in SHARES), *asked})
    narrow = planned(device_budget=0, **NARROW) if args.card is not None else None
    return Plan([planned(device_budget=Budget(nbytes)) for nbytes in budgets], asked, room, narrow)


def _dtype(args: argparse.Namespace) -> str | None:
    """Return the parameters' dtype; None: that of files, or float32."""
    found: str | None = args.param_dtype or ("bfloat16" if args.param_format else None)
    return found


def model(args: argparse.Namespace) -> Any:
    """Return the model as ``estimate`` takes it: a number of parameters, a name, or tensors without memory."""
    if args.model is None:
        return args.size or parse_count(args.params, "model")
    with refusing("--model "):
        return [tensor for path in args.model for tensor in read_parameters(path).values()]


def find_rates(args: argparse.Namespace) -> Rates:
    """Return the rates of the file if one is given; else measure this machine, or assume rates if it has no GPU."""
    if args.rates is None:
        return ASSUMED if args.device == "cuda" and not torch.cuda.is_available() else Rates.measured(args.device)
    with refusing("--rates "):
        return Rates.load(args.rates)


def find_room(device: str) -> dict[str, int]:
    """Return the free bytes of ``device`` and ``host``, or of ``host`` and ``file`` for a CPU. Empty without a GPU."""
    if device == "cpu":
        return {"host": host.available(), "file": folder()["free"] or 0}
    return {"device": torch.cuda.mem_get_info()[0], "host": host.available()} if torch.cuda.is_available() else {}


def short(row: Estimate, room: dict[str, int]) -> dict[str, int]:
    """Return how many bytes are missing in ``device``, ``host`` or ``file``, for those that have too few."""
    needed = {row.near: row.near_bytes, "file" if row.device == "cpu" else "host": row.away_bytes}
    return {where: n - room[where] for where, n in needed.items() if n > room.get(where, n)}


def row_dict(row: Estimate, plan: Plan) -> dict[str, Any]:
    """Return a row as JSON values. ``fits`` is None if it is not known what has room."""
    values, missing = row.as_dict(), short(row, plan.room)
    del values["rates"]
    return {**values, "fits": not missing if plan.room else None, "short": missing, "asked": plan.asked.get(row.budget)}


def show(plan: Plan, args: argparse.Namespace) -> None:
    """Print a plan."""
    console, row = Console(), plan.rows[0]
    dtype = args.param_format or args.param_dtype or ("their own dtypes" if args.model else "float32")
    size, way = f"{args.size}, " if args.size else "", f", reached {row.host_access}" if row.host_access else ""
    about = f"parameters in {dtype}: {text_of_bytes(row.param_bytes)}, gradients {text_of_bytes(row.grad_bytes)}"
    stored = full_name(args.state_format or ("float32" if args.param_format else dtype))
    state = f"{args.rule} state {text_of_bytes(row.state_bytes)} in {stored}"
    say(console, f"{size}[bold]{text_of_count(row.parameters)}[/bold] {about}")
    say(console, f"{state}; placement {row.placement}{way}")
    console.print(table(plan))
    for line in (*answers(plan, args.card), *footing(plan)):
        say(console, line)


def table(plan: Plan) -> Table:
    """Return a table with a line for each budget; an arrow marks those that were asked for."""
    headings = ["budget", "in the file" if plan.rows[0].device == "cpu" else "on host", "in all", "moved", "step"]
    shown = FittingTable(*numbers(headings + ["fits"] * bool(plan.room)))
    for row in plan.rows:
        mark, missing = "→ " * (row.budget in plan.asked), short(row, plan.room)
        cells = [mark + ("none" if row.budget is None else text_of_bytes(row.budget))]
        cells += [*map(text_of_bytes, (row.away_bytes, row.near_bytes, row.moved)), text_of_seconds(row.seconds)]
        cells += [f"no: {' '.join(missing)}" if missing else "yes"] * bool(plan.room)
        shown.add_row(*cells, style="bold" if mark else None)
    return shown


def answers(plan: Plan, card: str | None) -> Iterator[str]:
    """Yield for each budget that was asked for what to write, and how much longer a step takes."""
    near = plan.rows[-1].seconds
    for row in plan.rows:
        if (option := plan.asked.get(nbytes := row.budget)) is not None and nbytes is not None:
            budget = "all" if nbytes == row.state_bytes else nbytes if nbytes % MIB else f"{nbytes // MIB}MiB"
            longer = text_of_seconds(None if row.seconds is None or near is None else row.seconds - near)
            yield f"→ {option}: device_budget={budget!r}; a step is {longer} longer than with all state on {row.near}."
    if card and plan.narrow:
        yield from fitting(plan, plan.narrow, card)


def fitting(plan: Plan, narrow: Estimate, card: str) -> Iterator[str]:
    """Yield how many bytes three ways take, and what to write for the first that fits on the card."""
    least, room = plan.rows[0], plan.room[narrow.near]
    resident, away, within = plan.rows[-1].near_bytes, least.near_bytes, least.backward_bytes
    shown = [text_of_bytes(nbytes) for nbytes in (resident, away, within)]
    yield (
        f"--card {card}: without activations it takes {shown[0]} with all state on {narrow.near}, {shown[1]} with "
        f"device_budget=0, and {shown[2]} if it is also updated within the backward, which frees gradients."
    )
    ways = {
        "no device_budget": resident,
        "this device_budget, then optimizer.attach(model), which hides the update under the forward": away,
        f"device_budget=0, then {WITHIN} {LIMITS}": within,
        f"bfloat16 parameters, device_budget=0, state_format='int8', {WITHIN} {LIMITS}": narrow.backward_bytes,
    }
    fits = next((f"→ {way}: {text_of_bytes(nbytes)}." for way, nbytes in ways.items() if nbytes <= room), None)
    yield fits or f"Nothing fits: in bfloat16, with state in 8 bits, it takes {text_of_bytes(narrow.backward_bytes)}."


def footing(plan: Plan) -> Iterator[str]:
    """Yield lines that explain the columns, and say where the rates come from and what has room here."""
    row, rates = plan.rows[0], plan.rows[0].rates
    slots, path = ("pages in use", "to and from the file") if row.device == "cpu" else ("the ring", "over the link")
    ring = f" and {slots} of {text_of_bytes(row.ring)}" if row.ring else ""
    yield (
        f"budget: state that stays on {row.near}. in all: what {row.near} memory holds: parameters, gradients, that "
        f"state{ring}; activations come on top. moved: bytes {path} in a step, both directions."
    )
    yield f"Rates of {escape(rates.machine)}."
    if row.unknown_rates:
        yield f"Times are unknown: they have no {', '.join(row.unknown_rates)}, which parameters on {row.device} need."
    if rates.assumed or row.unknown_rates:
        yield "For a machine's own: `python -m pagedopt doctor --json > FILE` there, then --rates FILE."
    if "host" in plan.room:
        free = ", ".join(f"{text_of_bytes(n)} on {where}" for where, n in sorted(plan.room.items()))
        yield f"Free here, now: {free}."
