"""The command line: ``pagedopt COMMAND``, or ``python -m pagedopt COMMAND``.

A command is a module with ``HELP`` (one line), ``add_arguments(parser)`` and ``main(args)``, which returns the exit
status. It is entered in COMMANDS and imports torch only inside ``main``, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from .errors import UsageError
from .parser import Parser
from .process import interrupted, process

NAME = "pagedopt"
COMMANDS = {
    "doctor": "pagedopt.commands.doctor.doctor_command",
    "plan": "pagedopt.commands.plan",
    "train": "pagedopt.commands.train.command",
}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the terminal, and leaves those as they are in which a line is indented."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            part if "\n " in part else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in paragraphs
        )


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands, and of none: that prints the help."""
    parser = Parser(prog=NAME, description="Paged optimizers for PyTorch.")
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(main=print_help)
    for name, path in COMMANDS.items():
        module = import_module(path)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=Formatter,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a request that cannot be met, 130 for one that was
    interrupted, else the command's own."""
    return run(build_parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """See :func:`main`."""
    name = f"{NAME} {args.command}"
    try:
        status: int = args.main(args)
    except UsageError as error:
        print(f"{name}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except ImportError as error:
        if error.name != NAME:
            raise
        print(f"{name}: {error}", file=sys.stderr)  # this system is none that it is for
        return 2
    except KeyboardInterrupt:
        return interrupted(name)
    return status


def program() -> int:
    """:func:`main` of a process of its own."""
    return process(NAME, _load, run)


def _load() -> argparse.Namespace:
    args = build_parser().parse_args()
    if args.command is not None:
        with contextlib.suppress(ImportError):  # which the command says in its own words
            import torch  # noqa: F401
    return args
