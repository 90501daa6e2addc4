"""What memory and disk may still be taken: made-up machines as file trees, and what is in memory of a real range."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import assert_has

from pagedopt.system import host, libc
from pagedopt.system.host import Room, available, check_disk, check_host, resident_bytes, rooms

MIB, GIB = 1 << 20, 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 32 0:30 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V1_OTHER = "34 32 0:31 / /sys/fs/cgroup/cpu rw,relatime shared:10 - cgroup cgroup rw,cpu,cpuacct\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Files by their paths."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total: int, free: int) -> dict[str, str]:
    return {
        "proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {free // 1024} kB\nHuge: 0\n"
    }


def v2(folder: str, limit: int | str, used: int, **more: int | str) -> dict[str, str]:
    """A cgroup of version 2 with the files that count."""
    cache = f"anon 5\ninactive_file {more.pop('inactive', 0)}\nactive_file {more.pop('active', 0)}\n"
    files = {"max": limit, "current": used, "stat": cache, **more}
    return {f"sys/fs/cgroup{folder}/memory.{name}": f"{value}\n" for name, value in files.items()}


def v2_at(path: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT}


def v1(folder: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"cache 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    files = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"sys/fs/cgroup/memory{folder}/memory.{name}": str(value) for name, value in files.items()}


def v1_at(path: str, top: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"9:memory:{path}\n4:cpu,cpuacct:/elsewhere\n0::/\n",
        "proc/self/mountinfo": V1_OTHER + V1_MOUNT.format(top=top),
    }


# ---- what limits say ----


def job(left: int, limit: int, path: str = "/job") -> Room:
    return Room(left, limit, f"cgroup /sys/fs/cgroup{path}")


#: Files, and the limits that they say.
SAYS: dict[str, tuple[dict[str, str], list[Room]]] = {
    "no cgroups": (meminfo(16 * GIB, 9 * GIB), [Room(9 * GIB, 16 * GIB, "the machine")]),
    "nothing": ({}, []),
    "every cgroup up to the root": (
        {**v2_at("/user/job/step"), **v2("/user/job/step", "max", 1 * GIB), **v2("/user/job", 4 * GIB, 3 * GIB),
         **v2("/user", 8 * GIB, 4 * GIB), "sys/fs/memory.max": "9", "sys/fs/memory.current": "8"},
        [job(GIB, 4 * GIB, "/user/job"), job(4 * GIB, 8 * GIB, "/user")],
    ),
    "cached_files": (
        {**v2_at("/job"), **v2("/job", 4 * GIB, 4 * GIB, inactive=GIB, active=2 * GIB)}, [job(3 * GIB, 4 * GIB)]
    ),
    "the lower of two limits": ({**v2_at("/job"), **v2("/job", 4 * GIB, GIB, high=2 * GIB)}, [job(GIB, 2 * GIB)]),
    # A limit of nearly 2**63 means that there is none; of the hierarchies only that of memory is looked at.
    "version 1": (
        {**v1_at("/a/b"), **v1("/a/b", 2 * GIB, GIB, cache=GIB // 2), **v1("/a", (1 << 63) - 4096, GIB),
         **v1("", 16 * GIB, 2 * GIB), "sys/fs/cgroup/cpu/memory.limit_in_bytes": "9",
         "sys/fs/cgroup/cpu/memory.usage_in_bytes": "8"},
        [job(3 * GIB // 2, 2 * GIB, "/memory/a/b"), job(14 * GIB, 16 * GIB, "/memory")],
    ),
    # The path is the host's; the hierarchy is mounted from the container's cgroup on, known by its top or not.
    "a container": ({**v1_at("/docker/1f"), **v1("", 2 * GIB, GIB)}, [job(GIB, 2 * GIB, "/memory")]),
    "its top": ({**v1_at("/docker/1f", "/docker/1f"), **v1("", 2 * GIB, GIB)}, [job(GIB, 2 * GIB, "/memory")]),
    "below its top": (
        {**v1_at("/docker/1f/part", "/docker/1f"), **v1("/part", 2 * GIB, GIB), **v1("", 3 * GIB, GIB)},
        [job(GIB, 2 * GIB, "/memory/part"), job(2 * GIB, 3 * GIB, "/memory")],
    ),
    # Version 2 for the processes, version 1 for the memory, as some distributions have it.
    "both versions": (
        {"proc/self/cgroup": "4:memory:/job\n0::/job\n",
         "proc/self/mountinfo": V1_MOUNT.format(top="/") + V2_MOUNT.replace("cgroup rw", "cgroup/unified rw"),
         **v1("/job", 2 * GIB, GIB)},
        [job(GIB, 2 * GIB, "/memory/job")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "said"), SAYS.values(), ids=SAYS)
def test_what_limits_say(tmp_path: Path, files: dict[str, str], said: list[Room]) -> None:
    assert rooms(tree(tmp_path, files)) == said


def test_a_process_that_is_moved_has_the_limits_of_its_new_cgroup(tmp_path: Path) -> None:
    limits = {**v2("/a", 4 * GIB, GIB), **v2("/b", 8 * GIB, GIB)}
    found = [rooms(tree(tmp_path, {**limits, **v2_at(path)})) for path in ("/a", "/b", "/a")]
    assert [[room.limit for room in each] for each in found] == [[4 * GIB], [8 * GIB], [4 * GIB]]


def test_this_machine_has_memory() -> None:
    assert 16 * MIB < available() <= os.sysconf("SC_PHYS_PAGES") * libc.PAGE


# ---- refusals ----


def pretend(monkeypatch: pytest.MonkeyPatch, *limits: Room) -> None:
    monkeypatch.setattr(host, "rooms", lambda: list(limits))


def test_the_tightest_limit_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, job = Room(5 * GIB, 16 * GIB, "the machine"), Room(3 * GIB, 4 * GIB, "cgroup /job")
    for limits, left in (((machine, job), 3 * GIB), ((Room(-5, 16 * GIB, "the machine"),), 0), ((), 0)):
        pretend(monkeypatch, *limits)
        assert available() == left


def test_memory_is_refused_with_who_how_much_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Room(5 * GIB, 16 * GIB, "the machine"), Room(GIB, 2 * GIB, "cgroup /job"))
    with pytest.raises(MemoryError) as error:
        check_host(GIB, "optimizer state")
    needed, left = "optimizer state needs 1,073,741,824 bytes", "cgroup /job has 1,073,741,824 of 2,147,483,648 left"
    assert_has(str(error.value), needed, left, "107,374,182 stay in reserve", "device_budget", "placement='file'")


def test_the_reserve_is_a_twentieth_and_never_more_than_256_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, reserve in ((GIB, GIB // 20), (1000 * GIB, 256 * MIB)):
        pretend(monkeypatch, Room(limit, limit, "the machine"))
        check_host(limit - reserve - 1, "state")
        with pytest.raises(MemoryError, match="the machine"):
            check_host(limit - reserve + 1, "state")


def test_nothing_is_always_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Room(0, GIB, "the machine"))
    check_host(0, "state")
    with pytest.raises(MemoryError):
        check_host(1, "state")


def test_a_disk_is_refused_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * GIB, total=10 * GIB))
    check_disk("/data", 2 * GIB - 256 * MIB, "state")
    check_disk("/data", 0, "state")
    with pytest.raises(MemoryError, match=r"state needs 1,900,000,000 bytes in /data.*PAGEDOPT_STATE_DIR"):
        check_disk("/data", 1_900_000_000, "state")


# ---- what is in memory ----


def anonymous(pages: int) -> np.ndarray:
    """Fresh memory that comes one page at a time."""
    room = mmap.mmap(-1, pages * libc.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(room, np.uint8)


def test_anonymous_memory_counts_where_it_was_touched() -> None:
    room = anonymous(64)
    address = room.ctypes.data
    assert resident_bytes(address, room.nbytes) == 0
    room[5 * libc.PAGE] = 1
    room[9 * libc.PAGE : 11 * libc.PAGE] = 1
    assert resident_bytes(address, room.nbytes) == 3 * libc.PAGE
    assert resident_bytes(address + 5 * libc.PAGE + 100, 50) == 50, "only what was asked about"
    assert resident_bytes(address + 4 * libc.PAGE + 100, libc.PAGE) == 100
    assert resident_bytes(address + 10 * libc.PAGE + 1, 2 * libc.PAGE) == libc.PAGE - 1
    assert resident_bytes(address, 0) == 0


def test_long_ranges_are_asked_about_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_STRIDE", 4 * libc.PAGE)
    room = anonymous(10)
    room[3 * libc.PAGE : 9 * libc.PAGE] = 1
    assert resident_bytes(room.ctypes.data, room.nbytes) == 6 * libc.PAGE
    part = 5 * libc.PAGE + 50
    assert resident_bytes(room.ctypes.data + 3 * libc.PAGE + 100, part) == part


def test_a_range_that_is_not_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="mincore"):
        resident_bytes(libc.PAGE, libc.PAGE)


def test_cached_pages_of_a_file_count() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8 * libc.PAGE))
        file.flush()
        view = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        assert resident_bytes(view.ctypes.data, view.nbytes) == 8 * libc.PAGE
