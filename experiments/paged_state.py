"""What does a step cost when its state is not on the device, and is that the price of the bytes alone?

268 M float32 parameters, 2.1 GB of AdamW state.  Parts, each selectable with ``--only``, merge into one JSON file:
``link`` (ceilings), ``sweep`` (time against share on the device), ``rivals``, ``driver`` (the driver's paging),
``hidden`` (an update behind a backward), ``memory`` (what a step takes), ``spike`` (a loop whose every 20th batch needs
the room), ``bytes`` (counted by the card), ``cpu`` (a state file under a budget of RAM).
"""

from __future__ import annotations

import functools
import importlib
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from experiments import report
from experiments.paging import bars, parts, plots, tables
from experiments.paging.problem import Run
from experiments.revision import this_revision

NAME = "paged_state"
#: Name of a part → its module, in the order in which they run: the profiler of ``bytes`` slows what comes behind it.
PARTS = {
    "link": "link", "sweep": "sweep", "rivals": "rivals", "driver": "driver_mode", "hidden": "hidden",
    "memory": "extra_memory", "spike": "spike", "bytes": "crossing", "cpu": "state_file",
}  # fmt: skip
#: Where ``--quick`` writes, unless told otherwise.
QUICK = report.ROOT / "runs" / "quick"
#: What runs without a GPU.
ON_A_CPU = ("cpu",)


def measured(name: str, device: torch.device, quick: bool, console: Console) -> dict[str, Any]:
    """One part's results, with its circumstances."""
    run = Run(device, quick, console)
    begin = time.perf_counter()
    console.print(name, style="bold")
    try:
        found = importlib.import_module(f"experiments.paging.{PARTS[name]}").part(run)
    finally:
        run.free()
    seconds = time.perf_counter() - begin
    command = f"python -m experiments {NAME} --only {name}{' --quick' if quick else ''}"
    when = report.conditions()["when"]
    source = this_revision()  # parts of several runs come together in one file
    return {**found, "left_out": run.left_out, "seconds": seconds, "command": command, "when": when, **source}


def experiment(
    names: Sequence[str], device: torch.device, options: Any, console: Console
) -> tuple[dict[str, Any], bool]:
    """Measure parts, each written as soon as it is there; returns all results and whether every part went through."""
    fine = True
    path = options.out / f"{NAME}-{report.label(device)}.json"
    result: dict[str, Any] = {
        "machine": report.conditions(), "device": device.type, "quick": options.quick, "parts": {}
    }  # fmt: skip
    old = None if options.fresh else parts.load(path)
    if old is not None and (wrong := parts.differences(old, result)):
        console.print(
            f"{path.name} is of another machine ({'; '.join(wrong)}): {parts.set_aside(path).name}", style="red"
        )
        old = None
    result = parts.merged(old, result)
    for name in names:
        try:
            result["parts"][name] = measured(name, device, options.quick, console)
            result["left_out"] = parts.left_out(result, list(PARTS), ON_A_CPU)
            verdicts = [bar.as_dict() for bar in bars.bars(result)]
            report.write(options.out, NAME, device, {**result, "verdicts": verdicts})
            for title, table in tables.of_part(name, result["parts"][name]).items():
                report.show(console, title, *table)
        except Exception:  # the other parts go on
            traceback.print_exc()
            console.print(f"part {name} FAILED", style="bold red")
            fine = False
    result["left_out"] = parts.left_out(result, list(PARTS), ON_A_CPU)
    return result, fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure parts, print, write JSON and plots; or fill the note's tables from results."""
    parser = report.options(NAME, __doc__)
    parser.add_argument(
        "--only", type=functools.partial(parts.chosen, known=list(PARTS)), metavar="PARTS",
        help=f"some of {','.join(PARTS)}; others are taken from the file of results that is there",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="begin a new file of results")
    options = parser.parse_args(arguments)
    if report.refilled(NAME, options, tables.sections):
        return 0
    if options.quick and options.out == report.RESULTS:
        options.out = QUICK  # toys may not take the place of results
    console = report.console()
    device = report.chosen_device(options.device)
    names = options.only or list(PARTS)
    if device.type == "cpu":
        names = [name for name in names if name in ON_A_CPU]
    result, fine = experiment(names, device, options, console)
    drawn = {name: draw for name, (part, draw) in plots.PLOTS.items() if part in result["parts"]}
    code = report.finish(console, options.out, NAME, device, result, bars.bars(result), drawn)
    return max(code, int(not fine))
