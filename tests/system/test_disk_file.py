"""Few open files for many state files: ranges are nobody else's, zero when taken, and given back to the disk."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from file_support import open_files
from stand_ins import raising

from pagedopt.system import libc
from pagedopt.system.state_file import FILES, StateFile

KIB = 1 << 10
SIZE = 256 * KIB


pytestmark = pytest.mark.usefixtures("folder")


def made(folder: Path, count: int, value: int | None = None) -> list[StateFile]:
    """State files, filled with a value."""
    files = [StateFile(folder, SIZE) for _ in range(count)]
    if value is not None:
        for file in files:
            write(file, value)
    return files


def write(file: StateFile, value: int) -> None:
    file.reserve([(0, SIZE)])
    ctypes.memset(file.address, value, SIZE)
    file.drop([(0, SIZE)])


def blocks(folder: Path) -> int:
    """Bytes on the disk of all open files in a folder."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{number}"
        if os.path.islink(link) and os.readlink(link).startswith(str(folder)):
            found[os.stat(link).st_ino] = os.stat(link).st_blocks * 512
    return sum(found.values())


def test_many_share_few_and_each_has_its_bytes(folder: Path) -> None:
    files = made(folder, 3 * FILES + 2)
    assert open_files(folder) == FILES
    assert [f.disk_bytes() for f in files] == [0] * len(files)
    for i, file in enumerate(files):
        write(file, i)
    assert all(set(bytes(file.memory)) == {i} for i, file in enumerate(files))
    assert {f.disk_bytes() for f in files} == {SIZE}
    assert SIZE * len(files) <= blocks(folder) <= 1.1 * SIZE * len(files)
    some = files[::2]
    del files, file
    gc.collect()
    assert all(set(bytes(each.memory)) == {2 * i} for i, each in enumerate(some))
    assert blocks(folder) <= 1.1 * SIZE * len(some)
    del some
    gc.collect()
    assert open_files(folder) == 0


def test_what_was_given_back_is_free_on_the_disk_and_no_later_range_has_its_bytes(folder: Path) -> None:
    files = made(folder, 2 * FILES, 7)
    views = [memoryview(file.memory) for file in files[:4:2]]  # whose ranges are in use though nobody has the object
    del files[::2]
    gc.collect()
    assert blocks(folder) <= 1.1 * SIZE * (FILES + len(views))
    later = made(folder, FILES)
    assert open_files(folder) == FILES
    assert not any(any(bytes(file.memory)) for file in later)
    assert all(set(bytes(each)) == {7} for each in (*views, *(file.memory for file in files)))


def test_a_file_that_may_not_grow_leaves_all_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = made(folder, FILES)
    write(files[0], 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", raising(OSError(errno.EFBIG, "too large")))
        with pytest.raises(MemoryError, match="gave no 262,144 bytes for a state file"):
            StateFile(folder, SIZE)
    assert open_files(folder) == FILES
    assert set(bytes(files[0].memory)) == {3}
    write(late := StateFile(folder, SIZE), 4)
    assert set(bytes(late.memory)) == {4}


def test_a_child_gives_back_nothing_of_its_parents(folder: Path) -> None:
    files = made(folder, FILES + 3, 5)
    child = os.fork()
    if not child:
        early = StateFile(folder, SIZE)  # while all of its parent's files are open
        write(early, 8)
        del files
        gc.collect()
        own = StateFile(folder, SIZE)
        write(own, 9)
        os._exit(0 if own._begin == early._begin == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    for file in files:
        file.drop([(0, SIZE)])
    assert all(set(bytes(file.memory)) == {5} for file in files)


def test_an_interrupt_while_a_state_file_is_given_back_comes_behind_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, unmap = StateFile(folder, SIZE), libc.unmap
    write(file, 6)

    def interrupted(address: int, nbytes: int) -> None:
        unmap(address, nbytes)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(libc, "unmap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.close()
    assert blocks(folder) == 0


LATE = """
import atexit, ctypes, os, sys
from pathlib import Path

def last():
    file.reserve([(0, 4096)])
    ctypes.memset(file.address, 1, 4096)
    file.drop([(0, 4096)])
    with open(sys.argv[1] + "/users", "w+b") as users:
        assert users.fileno() != file._file

atexit.register(last)  # runs behind what pagedopt registers
from pagedopt.system.state_file import StateFile
file = StateFile(Path(sys.argv[1]), 4096)
"""


def test_a_function_that_runs_at_exit_finds_the_file_open(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
