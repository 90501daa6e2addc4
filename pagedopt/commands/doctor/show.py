"""The report of an examination, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...common.units import text_of_bytes
from ...planning.rates import Rates
from ..tables import say


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a report as :func:`examine` returns it."""
    console = console or Console()
    for table in (system(report), *map(card, report["cards"]), placements(report)):
        console.print(table)
    if report["rates"] is not None:
        console.print(rates(report["rates"]))
    for line in (*chosen(report), *remarks(report)):
        say(console, line)


def system(report: Mapping[str, Any]) -> Table:
    """Return a table of versions, free memory, free disk and the look of a step."""
    table = _facts("this machine")
    about = report["system"]
    table.add_row("system", f"{about['platform']}, Python {about['python']}")
    table.add_row("processor", f"{escape(about['processor'])}, {about['cores']} cores")
    table.add_row("host memory", f"{text_of_bytes(report['host']['available'])} may be taken")
    for room in report["host"]["limits"]:
        text = f"{text_of_bytes(max(room['free'], 0))} of {text_of_bytes(room['limit'])} free"
        table.add_row("", f"{text} of {escape(room['owner'])}")
    folder = report["state_folder"]
    found = f"{folder['path']}, {text_of_bytes(folder['free'])} free" if folder["path"] else folder["reason"]
    table.add_row("state files", escape(found))
    table.add_row("NVIDIA driver", report["driver"] or "none found")
    cuda = {"supported by the driver": "driver_supports", "torch built for": "torch", "NVRTC": "nvrtc"}
    table.add_row("CUDA", ", ".join(f"{text} {report['cuda'][key] or '-'}" for text, key in cuda.items()))
    found = [f"{name} {version}" for name, version in report["packages"].items() if version]
    table.add_row("packages", ", ".join(found))
    table.add_row("look of a step", f"{report['look']['used']} ({report['look']['reason']})")
    return table


def card(about: Mapping[str, Any]) -> Table:
    """Return a table of a GPU and what it can do with memory."""
    table = _facts(f"cuda:{about['index']}, {escape(about['name'])}")
    table.add_row("memory", f"{text_of_bytes(about['memory_free'])} free of {text_of_bytes(about['memory_total'])}")
    table.add_row("compute capability", f"{about['compute_capability']}, {about['multiprocessors']} multiprocessors")
    known = [f"{name} {'?' if value is None else value}" for name, value in about["attributes"].items()]
    table.add_row("attributes", ", ".join(known))
    return table


def placements(report: Mapping[str, Any]) -> Table:
    """Return a table of the placements and whether they work."""
    table = Table("placement", "parameters on", "works", "host access, or why not", title="placements, each tried")
    for tried in report["placements"]:
        works = "[green]yes[/green]" if tried["works"] else "[red]NO[/red]" if tried["promised"] else "no"
        said = ", ".join(tried["ways"]) if tried["works"] else tried["reason"]
        table.add_row(tried["placement"], tried["device"], works, escape(said))
    return table


def rates(measured: Mapping[str, Any]) -> Table:
    """Return a table of the transfer rates."""
    found = Rates.from_dict(measured)
    table = Table("way", title="rates")
    table.add_column("rate", justify="right")
    for text, rate in found.facts()[1]:
        table.add_row(text, rate)
    return table


def chosen(report: Mapping[str, Any]) -> list[str]:
    """Return sentences about the placement that an optimizer gets on the examined device."""
    out = []
    for choice in report["choices"]:
        asked = "device_budget=None" if choice["device_budget"] is None else "device_budget='2GiB', say"
        access = f", host_access={choice['host_access']!r}" if choice["host_access"] else ""
        got = f"placement={choice['placement']!r}{access}" if choice["placement"] else "nothing"
        out.append(f"On {report['device']}, {asked}: [bold]{got}[/bold] ({escape(choice['why'])}).")
    return out


def remarks(report: Mapping[str, Any]) -> list[str]:
    """Return notes, problems, or that there are none."""
    out = [f"note: {escape(note)}" for note in report["notes"]]
    out += [f"[red]problem:[/red] {escape(problem)}" for problem in report["problems"]]
    if not report["problems"]:
        out.append("[green]Everything that should work here does.[/green]")
    return out


def _facts(title: str) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table
