"""Find out what this machine can do by trying it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ..common.facts_table import facts_table
from ..common.units import text_of_bytes

HELP = "say what this machine can do, which placements work on it and how fast it moves bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--device", metavar="NAME", help="what to examine: cuda, cuda:N or cpu; default: a GPU if any")
    parser.add_argument("--quick", action="store_true", help="do not measure rates; `plan` cannot use such a report")
    text = "print one JSON object and nothing else: for programs, bug reports and `plan --rates`"
    parser.add_argument("--json", action="store_true", help=text)


def main(args: argparse.Namespace) -> int:
    """Examine the machine, print the report, and return 1 if something that should work does not, else 0."""
    from rich.console import Console

    from .examine import examine
    from .parser import pick_device

    device = pick_device(args.device)
    with Console(stderr=True).status("examining this machine"):
        report = examine(device, quick=args.quick)
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        show(report)
    return 1 if report["problems"] else 0


def show(report: Mapping[str, Any]) -> None:
    """Print a report as :func:`examine` returns it."""
    from rich.console import Console
    from rich.markup import escape

    from ..planning.rates import Rates
    from .tables import say

    console, placements = Console(), map(about_placement, report["placements"])
    console.print(facts_table("this machine", about_machine(report)))
    for card in report["cards"]:
        console.print(facts_table(f"cuda:{card['index']}, {card['name']}", about_card(card)))
    console.print(facts_table(f"placements on {report['device']}, each tried", placements))
    if report["rates"] is not None:
        console.print(Rates.from_dict(report["rates"]))
    problems = [f"[red]problem:[/red] {escape(problem)}" for problem in report["problems"]]
    well = "[green]Everything that should work here does.[/green]"
    for line in (*(f"note: {escape(note)}" for note in report["notes"]), *(problems or [well])):
        say(console, line)


def about_machine(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return versions, free memory, free disk and the look of a step."""
    about, folder, cuda = report["system"], report["state_folder"], report["cuda"]
    rooms = [(room["owner"], max(room["free"], 0), room["limit"]) for room in report["host"]["limits"]]
    files = f"{folder['path']}, {text_of_bytes(folder['free'])} free" if folder["path"] else folder["reason"]
    names = {"supported by the driver": "driver_supports", "torch built for": "torch", "NVRTC": "nvrtc"}
    return [
        ("system", f"{about['platform']}, Python {about['python']}"),
        ("processor", f"{about['processor']}, {about['cores']} cores"),
        ("host memory", f"{text_of_bytes(report['host']['available'])} may be taken"),
        *(("", f"{text_of_bytes(free)} of {text_of_bytes(limit)} free of {owner}") for owner, free, limit in rooms),
        ("state files", files),
        ("NVIDIA driver", report["driver"] or "none found"),
        ("CUDA", ", ".join(f"{text} {cuda[name] or '-'}" for text, name in names.items())),
        ("packages", ", ".join(f"{name} {found}" for name, found in report["packages"].items() if found)),
        ("change detection", f"{report['look']['used']} ({report['look']['reason']})"),
    ]


def about_card(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a GPU has, and what it can do with memory."""
    can = ", ".join(f"{name.replace('_', ' ')} {'yes' if able else 'no'}" for name, able in card["can"].items())
    return [
        ("memory", f"{text_of_bytes(card['memory_free'])} free of {text_of_bytes(card['memory_total'])}"),
        ("compute capability", f"{card['compute_capability']}, {card['multiprocessors']} multiprocessors"),
        ("memory of the host", can or "not known without cuda-bindings"),
    ]


def about_placement(tried: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a placement, and how a step reaches state that is away, or why it does not work."""
    default = " (what an optimizer with a budget gets)" if tried["default"] else ""
    works = f"works{', '.join(['', *tried['ways']])}{default}"
    broken = f"{'BROKEN' if tried['promised'] else 'no'}: {tried['reason']}"
    return tried["placement"], works if tried["works"] else broken
