"""Mounted file systems, from ``/proc/self/mountinfo``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_FILE = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """One mount.

    Attributes:
        top: the folder of the file system that is visible at ``point``; ``/`` unless only a part of it is mounted.
        point: where it is mounted.
        fs_type: the type of the file system, e.g. ``ext4``.
        options: of the file system; those of a version 1 cgroup name its controllers.
    """

    top: str
    point: str
    fs_type: str
    options: tuple[str, ...]


def mounts(text: str | None = None) -> list[Mount]:
    """Return every mount in the order of the file (``text``, or read now).  Of several at one point the last counts."""
    if text is None:
        try:
            text = _FILE.read_text()
        except OSError:
            return []
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        top, point = left.split()[3:5]
        if "\\" in left:
            top, point = _unescaped(top), _unescaped(point)
        fields = right.split()
        found.append(Mount(top, point, fields[0], tuple(fields[-1].split(","))))
    return found


def file_system(path: str | os.PathLike[str], text: str | None = None) -> str:
    """Return the type of the file system of ``path``, e.g. ``ext4``; "" if unknown.  ``text`` as in :func:`mounts`."""
    real = os.path.join(os.path.realpath(path), "")
    above = [mount for mount in mounts(text) if real.startswith(os.path.join(mount.point, ""))]
    deepest = max((len(mount.point) for mount in above), default=0)
    return next((mount.fs_type for mount in reversed(above) if len(mount.point) == deepest), "")


def _unescaped(field: str) -> str:
    """Undo the escapes of a path: the file writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
