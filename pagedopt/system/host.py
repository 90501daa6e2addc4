"""Free memory of this machine and its cgroups, free disk space, and which pages of a range are in memory."""

from __future__ import annotations

import functools
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from . import libc

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


#: :func:`check_host` and :func:`check_disk` leave this share of memory or disk free, but at most this many bytes.
RESERVE_SHARE, MAX_RESERVE = 0.05, 256 << 20
#: In version 1 of cgroups a number larger than any memory means "no limit".
UNLIMITED = 1 << 62
#: ``mincore`` writes one byte per page, so it is called for at most this many bytes of address space.
_STRIDE = 1 << 30


@dataclass(frozen=True)
class Room:
    """Memory that one limit leaves: ``free`` of ``limit`` bytes, and whose limit it is."""

    free: int
    limit: int
    owner: str

    @property
    def reserve(self) -> int:
        """Bytes that stay free."""
        return min(MAX_RESERVE, int(self.limit * RESERVE_SHARE))


@dataclass(frozen=True)
class _Version:
    """File and field names of one cgroup version.  The smallest limit counts; memory of ``cache`` is reclaimable."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def available() -> int:
    """Return the bytes of host memory that this process may still take; 0 if the system does not say."""
    return max(0, min((room.free for room in rooms()), default=0))


def check_host(nbytes: int, what: str) -> None:
    """Raise a MemoryError unless the machine and its cgroups keep a reserve beside ``nbytes`` for ``what``."""
    if nbytes <= 0:
        return
    for room in rooms():
        if nbytes > room.free - room.reserve:
            raise MemoryError(
                f"{what} needs {nbytes:,} bytes of host memory, but {room.owner} has {max(room.free, 0):,} of "
                f"{room.limit:,} left, of which {room.reserve:,} stay in reserve; free some (or raise the limit), use "
                "a smaller state_format, or keep less of it here: a larger device_budget for parameters on a GPU, "
                "placement='file' for parameters on a CPU"
            )


def check_disk(folder: str | os.PathLike[str], nbytes: int, what: str) -> None:
    """Raise a MemoryError unless the disk of ``folder`` keeps a reserve beside ``nbytes`` for ``what``."""
    disk = shutil.disk_usage(folder)
    room = Room(disk.free, disk.total, "")
    if 0 < nbytes > room.free - room.reserve:
        raise MemoryError(
            f"{what} needs {nbytes:,} bytes in {os.fspath(folder)}, whose disk has {room.free:,} of {room.limit:,} "
            f"left, of which {room.reserve:,} stay in reserve; free some, name a folder on another disk with "
            "PAGEDOPT_STATE_DIR, use a smaller state_format or raise device_budget"
        )


def rooms(root: Path = Path("/")) -> list[Room]:
    """Return every limit on this process's memory: the machine's and those of its cgroups, below ``root``."""
    found = []
    fields = numbers(_text(root / "proc/meminfo"))
    if "MemAvailable" in fields:  # host pages of the driver are in no count of /proc/self/status
        found.append(Room(fields["MemAvailable"] * 1024, fields.get("MemTotal", 0) * 1024, "the machine"))
    for version, folder in cgroup_folders(_text(root / "proc/self/cgroup"), _text(root / "proc/self/mountinfo")):
        at = root / folder.relative_to("/")
        limits = [int(text) for name in version.limits if (text := _text(at / name).strip()).isdigit()]
        if min(limits, default=UNLIMITED) < UNLIMITED and (usage := _text(at / version.usage).strip()).isdigit():
            cache = numbers(_text(at / "memory.stat"))
            used = int(usage) - sum(cache.get(name, 0) for name in version.cache)
            found.append(Room(min(limits) - max(used, 0), min(limits), f"cgroup {folder}"))
    return found


def numbers(text: str) -> dict[str, int]:
    """Return the numbers of lines such as ``MemTotal:  16 kB`` or ``inactive_file 16`` by name, without units."""
    return {name: int(number) for name, number in re.findall(r"^(\S+?):?[ \t]+(\d+)(?!\S)", text, re.MULTILINE)}


@functools.lru_cache(maxsize=4)  # both texts stay as they are while nobody moves the process or mounts anything
def cgroup_folders(cgroup: str, mountinfo: str) -> list[tuple[_Version, PurePosixPath]]:
    """Return the folders that may limit the memory of a process, its own first.

    Args:
        cgroup, mountinfo: the texts of its ``/proc/self/cgroup`` and ``/proc/self/mountinfo``.
    """
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    found = []
    for mount in mounts(mountinfo):
        if mount.fs_type not in paths or (mount.fs_type == "cgroup" and "memory" not in mount.options):
            continue
        own = PurePosixPath(paths[mount.fs_type])
        # In a container the root of the mounted hierarchy may be the container's own cgroup.
        own, point = own.relative_to(mount.top if own.is_relative_to(mount.top) else "/"), PurePosixPath(mount.point)
        version = _V1 if mount.fs_type == "cgroup" else _V2
        inner = point / own
        found += [(version, folder) for folder in [inner, *inner.parents] if folder.is_relative_to(point)]
    return found


def _text(path: Path) -> str:
    """Return the text of a small file, "" if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def resident_bytes(address: int, nbytes: int) -> int:
    """Return how many bytes of a mapped range are in memory; pages of a file count when cached, mapped or not."""
    end = address + nbytes
    first, last = address // libc.PAGE * libc.PAGE, -(-end // libc.PAGE) * libc.PAGE
    total = 0
    for begin in range(first, last, _STRIDE):
        pages = libc.in_memory(begin, min(_STRIDE, last - begin))
        starts = begin + np.flatnonzero(pages) * libc.PAGE
        total += int((np.minimum(starts + libc.PAGE, end) - np.maximum(starts, address)).sum())
    return total
