"""What the options of commands share: a parser that explains slips, help texts, and the devices that may be named."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..common.names import near
from ..formats.names import NAMES, PARAM_FORMAT_NAMES

if TYPE_CHECKING:
    import torch

#: A unit that the shell separated from its number, as in ``--budget 8 GiB``.
UNIT = re.compile(r"unrecognized arguments: (%|[kmgt]i?b?|b|[mµ]?s)(?: |$)", re.IGNORECASE)


def any_of(names: Sequence[str]) -> str:
    """Return names as text, the last two joined by "or"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


#: Help of the options that say how state is stored and where it lies, which several commands have.
STATE_FORMAT = (
    f"how state is stored: {any_of(NAMES)}. int8 takes 8 bits an element and a float32 for each 256; state of "
    "parameters below 4,096 elements is float32 then. float16 is refused for second moments, unless parameters are "
    "float16, too"
)
PARAM_FORMAT = (
    f"how parameters are stored: {any_of(PARAM_FORMAT_NAMES)}, in bfloat16, and beside them, as state, the 16 bits "
    "that they have lost of a float32, or the upper 8 of these"
)
BUDGET = (
    "how much state may stay on the device (if parameters are on a CPU: in RAM), as 2GiB, 500MB, 25%% of the state or "
    "0; the rest is spilled to the host (on a CPU: to a file)"
)
PLACEMENT = (
    "kind of memory. With parameters on a GPU: mapped (default with a budget; pinned pages on the host, device pages, "
    "one address range), managed (CUDA managed memory), managed-driver (the same, and the driver decides what stays), "
    "host (all state in pinned memory) or device (all on the GPU); on a CPU: file (default with a budget), host or "
    "device (both: all in RAM)"
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument with the usage of its own command, and suggests what may have been meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here: argparse would leave it to the outermost parser, which has another usage."""
        self._given = sys.argv[1:] if args is None else args
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message with its hint and end with exit status 2."""
        super().error(self.told(message))

    def told(self, message: str) -> str:
        """Return ``message`` with a hint at what may have been meant, if there is one."""
        if found := UNIT.search(message):
            return f"{message} (a value with a space needs quotes, as '8 {found[1]}')"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        names = [word.partition("=")[0] for word in self._given if word.startswith("--") and word != "--"]
        unknown = [name for name in names if not any(option.startswith(name) for option in known)]
        return message + "".join(near(name, known) for name in dict.fromkeys(unknown))


class UsageError(Exception):
    """A request that cannot be met. The message names the value, the limit and what to do instead."""


def pick_device(name: str | None) -> torch.device:
    """Return the device called ``name``. None means the GPU if there is one, else the CPU.

    Raises:
        UsageError: the name is neither ``cpu`` nor ``cuda[:N]``, or this machine has no such GPU.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: must be cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")  # torch accepts cpu:1 too, and there is only one CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = f"torch {torch.__version__} sees {count} GPU{'' if count == 1 else 's'} here"
        if torch.version.cuda is None:
            found = f"torch {torch.__version__} is a CPU build; notes/setup.md says how to have one for CUDA"
        raise UsageError(f"--device {name}: {found}. Use another device, or --device cpu.")
    return device
