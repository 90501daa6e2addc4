"""The command line: ``python -m pagedopt COMMAND``.

A command is a module with ``HELP`` (one line), ``add_arguments(parser)`` and ``main(args)``, which returns the exit
status. It is entered in COMMANDS and imports torch only inside ``main``, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from .errors import UsageError

COMMANDS = {
    "doctor": "pagedopt.commands.doctor.command",
    "plan": "pagedopt.commands.plan",
    "train": "pagedopt.commands.train.command",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m pagedopt", description="Paged optimizers for PyTorch.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, path in COMMANDS.items():
        module = import_module(path)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a request that cannot be met, else the command's own."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.main(args)
    except UsageError as error:
        print(f"pagedopt {args.command}: {error}", file=sys.stderr)
        return 2
    return status
