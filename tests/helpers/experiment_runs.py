"""Experiments by their names, times as rows have them, and what notes and pictures say of themselves."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from experiments import kept
from experiments.clock import series
from experiments.lab import Run
from pagedopt.commands.tables import new_figure


def experiment(name: str) -> kept.Experiment:
    """By its name."""
    found = kept.find(name)
    assert found is not None
    return found[0]


def asked(name: str) -> ModuleType:
    """A question by its name."""
    return experiment(name).questions[name]


def undated(text: str) -> str:
    """A page without what has changed since it was measured, which pages of before said."""
    return re.sub(r"; what has changed since is unknown|; [\w ,]+ changed since| Changed since: [^.\n]+\.", "", text)


def emptied(text: str) -> str:
    """A note with nothing between its markers."""
    return re.sub(r"(?s)(<!-- begin (.*?) -->\n).*?(?=<!-- end \2 -->)", r"\1", text)


CPU = torch.device("cpu")


def clocks(wall: float, gpu: float | None = None) -> dict[str, Any]:
    """Times (µs) as a row has them."""
    times = {"host": series([wall], "host"), "wall": series([wall], "wall")}
    return {**times, "gpu": None if gpu is None else series([gpu], "GPU")}


def quick_run() -> Run:
    return Run(CPU, True)


def can_draw() -> bool:
    """Whether there is matplotlib, which CI must have.

    Raises:
        RuntimeError: this is CI, and it is missing.
    """
    if new_figure(1, 1) is None and os.environ.get("CI"):
        raise RuntimeError("tests of pictures must not be skipped in CI: install matplotlib")
    return new_figure(1, 1) is not None


needs_matplotlib = pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")


def made_of(path: Path) -> str | None:
    """Its text ``Source``, which names the values that were drawn; None where there is none."""
    content = path.read_bytes()
    at = 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, inner = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        if kind in (b"tEXt", b"iTXt") and inner.partition(b"\0")[0] == b"Source":
            return inner.rpartition(b"\0")[2].decode()
        at += 12 + length
    return None
