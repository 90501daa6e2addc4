"""State in a file: what is in memory, what is on the disk, and that no bit of it is lost on the way."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import file_support
import pytest
import torch
from file_support import MIB, arena, sections_of, step
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedopt import host_memory, libc, state_file
from pagedopt.arenas.file import FileArena, FileMover
from pagedopt.host_memory import mappings, resident_bytes
from pagedopt.residency import SLOTS, Move
from pagedopt.state_file import FOLDER_VARIABLE, StateFile, file_system, state_folder

SMALL = 64 << 10  # bytes of a page in each section
NUMEL = 10 * SMALL // 4 - 77  # ten pages, the last one not full


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    """An empty folder on a disk, where state files go."""
    with contextlib.ExitStack() as stack:
        try:
            parent = state_folder()
        except ValueError as error:
            pytest.skip(str(error))
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(FOLDER_VARIABLE, str(path))
        yield path


def small(resident: int = 0, sections: int = 2) -> FileArena:
    memory = arena(NUMEL, resident * sections * SMALL, sections, SMALL)
    assert (memory.resident, memory.layout.pages) == (resident, 10)
    return memory


def fill(memory: FileArena) -> list[torch.Tensor]:
    """Numbers that say where they are; returns copies."""
    for i, section in enumerate(sections_of(memory)):
        section.copy_(torch.arange(section.numel(), dtype=torch.int32) * 7 + i)
    return [section.clone() for section in sections_of(memory)]


def assert_holds(memory: FileArena, want: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(sections_of(memory), want, strict=True))


def assert_measured(memory: FileArena) -> None:
    """Exactly what was planned is in memory; the disk adds a block or two for its own records."""
    planned, measured = memory.planned(), memory.measured()
    assert measured["host"] == planned["host"]
    assert 0 <= measured["file"] - planned["file"] <= 16384


def open_files(folder: Path) -> int:
    """How many descriptors of this process are of files in ``folder``, named or not."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))


def mapped(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


# ---- where the bytes are ----


@pytest.mark.parametrize("resident", [0, 1, 4, 10])
def test_a_new_arena_is_zero_and_where_it_was_planned(resident: int) -> None:
    memory = small(resident)
    sizes = memory.layout.page_bytes()
    assert memory.planned() == {"host": sizes[:resident].sum(), "file": sizes[resident:].sum()}
    assert_measured(memory)
    assert not memory.tensor.any()


@pytest.mark.parametrize("resident", [0, 3, 10])
def test_a_step_leaves_pages_where_they_were(resident: int) -> None:
    memory = small(resident, 3)
    want = fill(memory)
    for _ in range(3):
        step(memory)
        assert_measured(memory)
    assert_holds(memory, [w + 3 * (1 + i) for i, w in enumerate(want)])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=6), st.integers(0, 10))
def test_pages_move_at_their_addresses_and_lose_nothing(boundaries: list[int], first: int) -> None:
    memory = small(first)
    address, want = memory.tensor.data_ptr(), fill(memory)
    for resident in boundaries:
        memory.move(resident)
        assert memory.resident == resident
        assert_measured(memory)
        step(memory)
        want = [w + 1 + i for i, w in enumerate(want)]
    assert_holds(memory, want)
    assert memory.tensor.data_ptr() == address


def assert_comes_in(memory: FileArena, pages: list[int]) -> None:
    """Nothing but these pages is in memory soon: reading goes on behind the caller's back."""
    want = sum(int(memory.layout.page_bytes()[page]) for page in pages)
    for _ in range(500):
        if memory.measured()["host"] == want:
            break
        time.sleep(0.01)
    assert memory.measured()["host"] == want


def test_fetch_and_evict_move_one_whole_page() -> None:
    memory = arena(8 * MIB // 4)
    assert memory.layout.page_bytes()[4] == MIB, "pages are larger than a request to read"
    want = fill(memory)
    memory.drop()
    assert_comes_in(memory, [])
    memory.fetch(4)
    memory.fetch(15)
    assert_comes_in(memory, [4, 15])
    memory.evict(4)
    assert_comes_in(memory, [15])
    memory.evict(15)
    memory.evict(15)
    assert_comes_in(memory, [])
    assert_holds(memory, want)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["fetch", "evict", "write", "drop"]), st.integers(2, 9)), max_size=30))
def test_any_order_of_fetching_writing_and_evicting_keeps_every_bit(calls: list[tuple[str, int]]) -> None:
    memory = small(2)
    want = fill(memory)
    numel = memory.layout.page_numel
    for number, (verb, page) in enumerate(calls):
        if verb == "write":
            for section in (*sections_of(memory), *want):
                section[page * numel : (page + 1) * numel] ^= number * 1_000_003
        elif verb == "drop":
            memory.drop()
        else:
            getattr(memory, verb)(page)
    assert_holds(memory, want)


def test_reading_everything_brings_it_in_and_the_next_step_drops_it() -> None:
    memory = small(3)
    want = fill(memory)
    memory.drop()
    assert_holds(memory, want)
    assert memory.measured()["host"] == memory.layout.nbytes
    memory.prepare()
    assert_measured(memory)


def test_what_is_read_beside_the_pages_of_a_step_is_dropped_with_them() -> None:
    memory = small(3)
    want = fill(memory)
    mover = FileMover([memory])
    mover.begin()
    mover.fetch(Move(0, 5, 0))
    mover.arrive(Move(0, 5, 0))
    assert_holds(memory, want)
    mover.evict(Move(0, 5, 0))
    mover.finish()
    assert_measured(memory)


def test_two_arenas_do_not_disturb_each_other() -> None:
    one, other = small(2), small(5, 3)
    wants = [fill(one), fill(other)]
    step(one)
    one.move(7)
    assert_holds(other, wants[1])
    step(other)
    other.move(0)
    assert_measured(one)
    assert_holds(one, [w + 1 + i for i, w in enumerate(wants[0])])
    assert_holds(other, [w + 1 + i for i, w in enumerate(wants[1])])


def test_one_mover_carries_pages_of_several_arenas() -> None:
    memories = [small(8), small(9)]
    mover = FileMover(memories)
    want = [fill(memory) for memory in memories]
    mover.begin()
    moves = [Move(0, 8, 0), Move(1, 9, 1), Move(0, 9, 2)]
    for move in moves:
        mover.fetch(move)
    for move in moves:
        mover.arrive(move)
        mover.evict(move)
    mover.finish()
    for memory, values in zip(memories, want, strict=True):
        assert_measured(memory)
        assert_holds(memory, values)


def test_the_number_of_mappings_does_not_grow_with_the_pages() -> None:
    memory = arena(40 * SMALL // 4, 0, 2, SMALL)
    assert memory.layout.pages > 30
    begin, end = memory.tensor.data_ptr(), memory.tensor.data_ptr() + memory.layout.nbytes
    for resident in (35, 5, 20):
        memory.move(resident)
        with open("/proc/self/smaps") as lines:
            assert sum(first < end and last > begin for first, last, _ in mappings(lines)) <= 4


def test_state_of_no_elements_needs_no_file(folder: Path) -> None:
    before = open_files(folder)
    memory = arena(0)
    assert memory.tensor.nbytes == 0
    assert memory.planned() == memory.measured() == {"host": 0, "file": 0}
    memory.move(0)
    memory.prepare()
    assert open_files(folder) == before


# ---- bounds ----


def run_apart(*arguments: object, **options: object) -> str:
    """What ``file_support.py`` prints in a process of its own."""
    command = [sys.executable, file_support.__file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.parametrize("share", [0.25, 0])
def test_the_resident_size_stays_within_the_budget(share: float) -> None:
    """96 MiB of state, a quarter of them in memory: pages of 6 MiB through four slots."""
    peak, after, here, away, right = run_apart("peak", 96, share, 3).split()
    budget = int(96 * MIB * share)
    assert int(peak) <= budget + SLOTS * 6 * MIB + 8 * MIB < budget + 64 * MIB
    assert int(peak) >= budget, "this measures nothing"
    assert int(after) <= budget + 8 * MIB
    assert int(here) == budget, "the page cache keeps what was evicted"
    assert abs(int(away) - (96 * MIB - budget)) <= 65536
    assert right == "True"


def test_a_slot_is_not_fetched_into_before_it_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk writes, no more pages are in memory than there are slots."""
    memory, here, most = small(), set(), [0]
    done = threading.Event()

    def fetch(page: int) -> None:
        here.add(page)
        most[0] = max(most[0], len(here))

    def evict(page: int) -> None:
        done.wait(0.01)
        here.remove(page)

    monkeypatch.setattr(memory, "fetch", fetch)
    monkeypatch.setattr(memory, "evict", evict)
    step(memory)
    assert most == [SLOTS]
    assert not here, "evictions are still under way"


def test_a_page_arrives_when_reading_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, begun = small(), list[int]()
    monkeypatch.setattr(memory, "fetch", lambda page: (time.sleep(0.05), begun.append(page)))
    mover = FileMover([memory])
    mover.begin()
    mover.fetch(Move(0, 3, 0))
    mover.fetch(Move(0, 4, 1))
    mover.arrive(Move(0, 3, 0))
    assert begun == [3]
    mover.finish()
    assert begun == [3, 4]


def test_evicting_does_not_hold_up_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, release = small(), threading.Event()
    monkeypatch.setattr(memory, "evict", lambda page: release.wait(30) or pytest.fail("waited for"))
    mover = FileMover([memory])
    mover.begin()
    for page in range(2):
        mover.fetch(Move(0, page, page))
    mover.arrive(Move(0, 0, 0))
    mover.evict(Move(0, 0, 0))
    mover.arrive(Move(0, 1, 1))
    release.set()
    mover.finish()


def test_a_failed_write_is_raised_at_the_end_and_the_page_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small()
    want = fill(memory)
    memory.drop()
    good, bad = libc.write_out, memory.layout.stretches(4, 5)[1][0]

    def write_out(file: int, offset: int, nbytes: int) -> None:
        if offset == bad:
            raise OSError(errno.EIO, "write_out: broken disk")
        good(file, offset, nbytes)

    monkeypatch.setattr(memory._file, "_through_mapping", False)
    monkeypatch.setattr(libc, "write_out", write_out)
    with pytest.raises(OSError, match="broken disk"):
        step(memory)
    assert_holds(memory, [w + 1 + i for i, w in enumerate(want)])


# ---- the end ----


def test_memory_and_file_go_with_the_last_view(folder: Path) -> None:
    gc.collect()
    before = open_files(folder), mapped(folder)
    memory = small(4)
    fill(memory)
    view = sections_of(memory)[1][5:8]
    values = view.tolist()
    del memory
    gc.collect()
    assert mapped(folder) > before[1]
    assert view.tolist() == values
    del view
    gc.collect()
    assert (open_files(folder), mapped(folder)) == before


def test_an_arena_outlives_its_views() -> None:
    memory = small(4)
    want = fill(memory)
    gc.collect()
    memory.move(1)
    assert_holds(memory, want)


def test_creating_and_deleting_leaves_nothing(folder: Path) -> None:
    before = open_files(folder), mapped(folder), file_support.process_bytes("VmRSS")
    for _ in range(30):
        step(small(5))
    gc.collect()
    assert (open_files(folder), mapped(folder)) == before[:2]
    assert file_support.process_bytes("VmRSS") - before[2] < 8 * MIB


def test_no_file_can_be_seen_while_it_is_in_use(folder: Path) -> None:
    memory = small()
    assert not os.listdir(folder)
    assert open_files(folder) >= 1
    del memory


def test_a_killed_process_leaves_no_file(folder: Path) -> None:
    command = [sys.executable, file_support.__file__, "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
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
    descriptors, mappings, text = run_apart("shortage", 2 * MIB).split(maxsplit=2)
    assert (descriptors, mappings) == ("0", "0")
    assert f"{folder} gave no 16,777,216 bytes" in text
    assert "PAGEDOPT_STATE_DIR" in text


def test_a_full_disk_is_seen_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    before = open_files(folder)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_frsize=4096, f_blocks=9999))
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
    assert_measured(memory)
    assert_holds(memory, want)
    monkeypatch.undo()
    memory.move(2)
    assert_measured(memory)
    assert_holds(memory, want)


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
    assert_measured(memory)
    assert_holds(memory, want)
    written.clear()
    with pytest.raises(OSError, match="broken disk"):
        memory.move(0)
    assert memory.resident == 8
    assert_holds(memory, want)


def test_pages_that_find_no_memory_stay_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small(1)
    want = fill(memory)
    real, given = libc.map_anonymous, []

    def refuse(nbytes: int, at: int | None = None) -> int:
        if len(given) == 3:
            raise OSError(errno.ENOMEM, "mmap: no memory")
        address = real(nbytes, at)
        given.extend([address] if at is None else [])
        return address

    monkeypatch.setattr(libc, "map_anonymous", refuse)
    with pytest.raises(MemoryError, match="gave no 131,072 bytes"):
        memory.move(10)
    with pytest.raises(OSError, match="mincore"):
        resident_bytes(given[-1], SMALL)  # no longer mapped
    assert memory.resident == 2
    assert_holds(memory, want)
    memory.drop()
    assert_measured(memory)
    monkeypatch.undo()
    memory.move(10)
    assert_holds(memory, want)
    assert_measured(memory)


def test_memory_is_checked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small(2)
    monkeypatch.setattr(host_memory, "rooms", lambda: [host_memory.Room(MIB, 20 * MIB, "cgroup /job")])
    with pytest.raises(MemoryError, match="cgroup /job"):
        memory.move(10)
    with pytest.raises(MemoryError, match="cgroup /job"):
        small(10)
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


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/tmpfile", "ext4"), ("/tmp", "tmpfs"), ("/tmp/my disk/state", "xfs"), ("/mnt/a", "btrfs")],
)
def test_the_file_system_is_that_of_the_last_and_longest_mount(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind
    assert file_system(path, "") == ""


# ---- disks of other kinds ----


def test_a_stacked_file_system_is_written_through_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overlay writing out a range of the file does nothing."""
    monkeypatch.setattr(state_file, "file_system", lambda path: "overlay")
    monkeypatch.setattr(libc, "write_out", lambda *arguments: None)
    memory = small(3)
    want = fill(memory)
    step(memory)
    assert_measured(memory)
    assert_holds(memory, [w + 1 + i for i, w in enumerate(want)])


def test_without_holes_the_space_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    monkeypatch.setattr(libc, "punch_hole", refuse)
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
