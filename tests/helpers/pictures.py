"""Whether pictures can be drawn, and what a PNG says of itself."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from pagedopt.commands.tables import new_figure


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
