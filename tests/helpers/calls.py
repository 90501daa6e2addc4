"""Which functions of the package a call runs through: each costs host time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pagedopt

PACKAGE = str(Path(pagedopt.__file__).parent) + "/"


def calls(act: Callable[[], Any]) -> list[CodeType]:
    """Those of one call, in this thread, in order and as often as they are called."""
    found: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()  # what earlier tests have left calls functions of the package where it ends
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return found
