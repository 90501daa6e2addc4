"""The command line: ``pagedopt COMMAND``, or ``python -m pagedopt COMMAND``.

A command is a module beside this one, listed in COMMANDS, with ``HELP`` (one line), ``add_arguments(parser)`` and
``main(args)``, which returns the exit status. Its docstring is its description in --help. --help imports all of these
modules and should answer at once, so they import torch only inside of ``main``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from .parser import Parser, UsageError
from .process import interrupted, process

NAME = "pagedopt"
COMMANDS = ("doctor", "plan", "train")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the terminal. A paragraph with an indented line is printed as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if "\n " in part else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in text.strip().split("\n\n")
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Without a command, its ``main`` prints the help and returns 2."""
    parser = Parser(prog=NAME, description="Paged optimizers for PyTorch.")
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(main=print_help)
    for name in COMMANDS:
        module = import_module(f".{name}", __package__)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=Formatter)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 2 if the request cannot be met, 130 after Ctrl-C, else its own."""
    return run(build_parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments; see :func:`main`."""
    name = f"{NAME} {args.command}"
    try:
        status: int = args.main(args)
    except (UsageError, ImportError) as error:
        if isinstance(error, ImportError) and error.name != NAME:  # pagedopt raises its own on an unsupported system
            raise
        print(f"{name}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return interrupted(name)
    return status


def program() -> int:
    """Run :func:`main` as the main program of a process."""
    return process(NAME, _load, run)


def _load() -> argparse.Namespace:
    args = build_parser().parse_args()
    if args.command is not None:
        with contextlib.suppress(ImportError):  # the command reports a missing torch itself
            import torch  # noqa: F401
    return args
