"""Look at this machine: driver, CUDA versions, cards and what they can do with memory of the host, memory and disk that
are free, rates measured in a few seconds, and every placement of optimizer state tried with a few MiB. It says which of
them work, which is chosen when state is given a budget, and why. Works without a GPU, and says what is missing.

examples:
  python -m pagedopt doctor
  python -m pagedopt doctor --quick                 (without measuring rates)
  python -m pagedopt doctor --json > here.json      (for `plan --rates here.json`, here or elsewhere)

Exit status 0; 1 if something that should work here does not: a package that is needed is missing, or a placement that
the machine says it supports fails when it is tried.
"""

from __future__ import annotations

import argparse

HELP = "say what this machine can do, which placements work on it and how fast it moves bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--device", metavar="NAME", help="cuda:N or cpu; default: the GPU where there is one")
    parser.add_argument("--quick", action="store_true", help="do not measure rates")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> int:
    """Examine, show, and return 1 if something that should work does not."""
    import json

    try:
        import torch  # noqa: F401
    except ImportError as error:
        return without_torch(error, args.json)
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


def without_torch(error: ImportError, as_json: bool) -> int:
    """Say the one thing that can be said."""
    import json

    from ..process import MISSING

    problem = MISSING.format(package="torch", error=error)
    print(json.dumps({"problems": [problem]}) if as_json else f"problem: {problem}")
    return 1
