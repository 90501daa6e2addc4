"""The file behind state: it goes with its last user, however that ends, and a lack of room leaves all as it was."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import file_support
import pytest
from command_line import assert_has
from file_support import MIB, assert_holds, assert_measured, assert_whole, fill, mapped, open_files, small, step
from stand_ins import raising

from pagedopt.system import host, libc, state_file
from pagedopt.system.host import file_system
from pagedopt.system.state_file import FOLDER_VARIABLE, StateFile, state_folder

pytestmark = pytest.mark.usefixtures("folder")


# ---- the end ----


def test_an_interrupt_while_a_state_file_ends_comes_behind_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, unmap, before = StateFile(folder, MIB), libc.unmap, open_files(folder)

    def interrupted(address: int, nbytes: int) -> None:
        unmap(address, nbytes)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(libc, "unmap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.close()
    assert open_files(folder) == before - 1


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


def test_a_killed_process_leaves_no_file(folder: Path) -> None:
    command = [sys.executable, file_support.__file__, "wait"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=file_support.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not os.listdir(folder)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_without_nameless_files_the_name_goes_at_once(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
    real = os.open

    def refuse(path: os.PathLike[str], flags: int, mode: int = 0o777, **more: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, "no nameless files here")
        return real(path, flags, mode, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    memory = small(3)
    assert not os.listdir(folder)
    step(memory)
    assert_measured(memory)


# ---- no room ----


def test_a_file_larger_than_allowed_is_refused_and_leaves_nothing(folder: Path) -> None:
    descriptors, mappings, text = file_support.run_apart("shortage", 2 * MIB).split(maxsplit=2)
    assert (descriptors, mappings) == ("0", "0")
    assert_has(text, f"{folder} gave no 16,777,216 bytes", "PAGEDOPT_STATE_DIR")


def test_where_no_more_files_may_be_open_the_error_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with pytest.raises(OSError, match=r"Too many open files.*ulimit -n.*overlap='backward'") as told:
        StateFile(folder, MIB)
    assert told.value.errno == errno.EMFILE


def test_a_full_disk_is_seen_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    before = open_files(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=409_600, total=9999 * 4096))
    refusal = r"needs 1,310,720 bytes in .*, whose disk has 409,600 of"
    with pytest.raises(MemoryError, match=refusal):
        small()
    assert open_files(folder) == before
    memory = small(10)  # needs no disk
    with pytest.raises(MemoryError, match=refusal):
        memory.move(0)
    assert memory.resident == 10
    assert_measured(memory)


def refuse_space(monkeypatch: pytest.MonkeyPatch, after: int, code: int = errno.ENOSPC) -> None:
    """Let the disk be full after so many reservations."""
    real, calls = os.posix_fallocate, [0]

    def fallocate(file: int, offset: int, nbytes: int) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        real(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_half_way_gives_all_back(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
    gc.collect()
    before = open_files(folder), mapped(folder)
    refuse_space(monkeypatch, 1, code)
    with pytest.raises(MemoryError, match=r"gave no 1,048,576 bytes for a state file") as error:
        small(2)
    # The error still refers to the frames it came through; nothing may wait for it to go.
    assert (open_files(folder), mapped(folder)) == before
    assert str(folder) in str(error.value)


def test_pages_that_find_no_room_on_the_disk_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small(10)
    want = fill(memory)
    refuse_space(monkeypatch, 5)  # two pages and a half
    with pytest.raises(MemoryError, match="gave no 131,072 bytes"):
        memory.move(0)
    assert memory.resident == 8
    assert_whole(memory, want)
    monkeypatch.undo()
    memory.move(2)
    assert_whole(memory, want)


def test_pages_that_cannot_be_written_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small(10)
    want = fill(memory)
    real, written = os.pwrite, list[int]()

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if len(written) == 7:
            raise OSError(errno.EIO, "broken disk")
        written.append(real(file, data[:40_000], offset))  # a part of what was asked for, as the call may
        return written[-1]

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="broken disk"):
        memory.move(0)
    assert memory.resident == 9
    assert_whole(memory, want)
    written.clear()
    with pytest.raises(OSError, match="broken disk"):
        memory.move(0)
    assert memory.resident == 8
    assert_holds(memory, want)


def test_memory_is_checked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small(2)
    monkeypatch.setattr(host, "rooms", lambda: [host.Room(MIB, 20 * MIB, "cgroup /job")])
    for take in (memory.move, small):
        with pytest.raises(MemoryError, match="cgroup /job"):
            take(10)
    assert memory.resident == 2
    memory.move(1)


# ---- the folder ----


def test_a_folder_in_memory_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if file_system("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    monkeypatch.setenv(FOLDER_VARIABLE, "/dev/shm")
    with pytest.raises(ValueError, match=r"PAGEDOPT_STATE_DIR is '/dev/shm', which is in memory \(tmpfs\)"):
        small()


def test_a_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "nowhere"))
    with pytest.raises(ValueError, match="nowhere', which is no folder"):
        small()


def test_folders_in_memory_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    kinds = {"/var/tmp": "tmpfs", str(tmp_path): "ext4"}
    monkeypatch.setattr(state_file, "file_system", lambda path: kinds[str(path)])
    assert state_folder() == tmp_path
    kinds["/var/tmp"] = "ext4"
    assert state_folder() == Path("/var/tmp")
    kinds.update({"/var/tmp": "tmpfs", str(tmp_path): "ramfs"})
    with pytest.raises(ValueError, match=r"/var/tmp is in memory \(tmpfs\), .* is in memory \(ramfs\); name one"):
        state_folder()


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:20 / /tmp rw - tmpfs tmpfs rw
24 23 8:1 / /tmp/my\\040disk rw master:1 shared:2 - xfs /dev/sda1 rw
25 22 0:21 / /mnt rw - tmpfs tmpfs rw
26 22 8:2 / /mnt rw - btrfs /dev/sdb1 rw
"""


KINDS = {"/": "ext4", "/tmpfile": "ext4", "/tmp": "tmpfs", "/tmp/my disk/state": "xfs", "/mnt/a": "btrfs"}


@pytest.mark.parametrize(("path", "kind"), KINDS.items())
def test_the_file_system_is_that_of_the_last_and_longest_mount(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind
    assert file_system(path, "") == ""


# ---- disks of other kinds ----


def test_a_stacked_file_system_is_written_through_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overlay writing out a range of the file does nothing."""
    useless = list[object]()
    monkeypatch.setattr(state_file, "file_system", lambda path: "overlay")
    monkeypatch.setattr(libc, "write_out", lambda *arguments: useless.append(arguments))
    memory = small(3)
    want = fill(memory)
    step(memory)
    assert not useless
    assert_whole(memory, [w + 1 + i for i, w in enumerate(want)])


def test_without_holes_the_space_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "punch_hole", raising(OSError(errno.EOPNOTSUPP, "no holes here")))
    memory = small(3)
    want = fill(memory)
    memory.move(8)
    memory.move(1)
    assert memory.measured()["host"] == memory.planned()["host"]
    assert_holds(memory, want)


def test_changed_pages_stay_in_their_place_on_a_disk_that_copies(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(state_file, "file_system", lambda path: "btrfs")
    monkeypatch.setattr(state_file.fcntl, "ioctl", lambda file, *rest: asked.append(rest))
    StateFile(folder, 4096)
    assert asked == [(0x40086602, (0x00800000).to_bytes(8, sys.byteorder))]
