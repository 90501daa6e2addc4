"""What every command line knows of slips: a near name for an option that is not there, quotes that a shell wants."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..common.similar_names import near

#: What a shell parts from its number.
UNIT = re.compile(r"unrecognized arguments: (%|[kmgt]i?b?|b|[mµ]?s)(?: |$)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the usage of the command that it is wrong with, and what may have been meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take every argument: what is left over would be told by the outermost parser, whose usage is another."""
        self._given = sys.argv[1:] if args is None else args
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """End with exit status 2."""
        super().error(self.told(message))

    def told(self, message: str) -> str:
        """A message with what may have been meant."""
        if found := UNIT.search(message):
            return f"{message} (a value with a space needs quotes, as '8 {found[1]}')"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        names = [word.partition("=")[0] for word in self._given if word.startswith("--") and word != "--"]
        unknown = [name for name in names if not any(option.startswith(name) for option in known)]
        return message + "".join(near(name, known) for name in dict.fromkeys(unknown))


__all__ = ["Parser"]
