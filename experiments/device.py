"""The device that is measured, by name; and the one line with which a command ends that cannot be followed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


def refuse(text: str) -> NoReturn:
    """End with exit status 2 and one line.

    Raises:
        SystemExit: always.
    """
    print(text, file=sys.stderr)
    raise SystemExit(2)


def chosen_device(name: str) -> torch.device:
    """The device, with its index, made current.

    Raises:
        SystemExit: the device is not here.
    """
    import torch  # which takes seconds: a child that needs none is there at once

    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not found:
        refuse(f"--device is {name!r}; use cuda, cuda:N or cpu")
    if name == "cpu":
        return torch.device("cpu")
    index, there = int(found[1] or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= there:
        refuse(f"--device is {name!r}; torch sees {there} CUDA devices here, numbered from 0; or use --device cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
