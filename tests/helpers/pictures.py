"""What a PNG says of itself."""

from __future__ import annotations

import struct
from pathlib import Path


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
