"""Look at this machine: driver, CUDA versions, GPUs and what they can do with host memory, free memory and disk, and
transfer rates, measured in a few seconds. Every placement of optimizer state is tried with a few MiB. The report says
which placements work, which one an optimizer with a budget gets, and why; and whether a step that repeats the last one
is one compiled call or looks in Python. Works without a GPU, and says what is missing.

examples:
  python -m pagedopt doctor
  python -m pagedopt doctor --quick                 (without measuring rates)
  python -m pagedopt doctor --json > here.json      (for `plan --rates here.json`, here or elsewhere)

Exit status 0; 1 if something that should work here does not: a package that is needed is missing, or a placement that
the machine says it supports fails when it is tried.
"""

from __future__ import annotations

import argparse
import json

from ..process import MISSING

HELP = "say what this machine can do, which placements work on it and how fast it moves bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    text = "device whose rates are measured and whose placement is chosen: cuda, cuda:N or cpu; default: a GPU if any"
    parser.add_argument("--device", metavar="NAME", help=text)
    text = "do not measure rates, which saves a few seconds; `plan` cannot use such a report"
    parser.add_argument("--quick", action="store_true", help=text)
    text = "print one JSON object and nothing else: for programs, bug reports and `plan --rates`"
    parser.add_argument("--json", action="store_true", help=text)


def main(args: argparse.Namespace) -> int:
    """Examine the machine, print the report, and return 1 if something that should work does not, else 0."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        problem = MISSING.format(package="torch", error=error)
        print(json.dumps({"problems": [problem]}) if args.json else f"problem: {problem}")
        return 1
    from rich.console import Console

    from ..device import pick_device
    from .examine import examine
    from .show import show

    device = pick_device(args.device)
    with Console(stderr=True).status("examining this machine"):
        report = examine(device, quick=args.quick)
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        show(report)
    return 1 if report["problems"] else 0
