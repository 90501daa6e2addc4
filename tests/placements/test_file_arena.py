"""State in a file: what is in memory, what is on the disk, and that no bit of it is lost on the way."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import file_support
import pytest
from file_support import (
    MIB,
    SMALL,
    arena,
    assert_holds,
    assert_measured,
    fill,
    open_files,
    sections_of,
    small,
    step,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stand_ins import raising

from pagedopt.paging.policy import SLOTS, Move
from pagedopt.placements.file import FileArena, FileMover
from pagedopt.system import libc

pytestmark = pytest.mark.usefixtures("folder")


# ---- where the bytes are ----


@pytest.mark.parametrize("resident", [0, 1, 4, 10])
def test_a_new_arena_is_zero_and_where_it_was_planned(resident: int) -> None:
    memory = small(resident)
    sizes = memory.layout.page_bytes()
    assert memory.planned() == {"host": sizes[:resident].sum(), "file": sizes[resident:].sum()}
    assert_measured(memory)
    assert not memory.tensor.any()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=6), st.integers(0, 10))
@example([2, 9, 3], 2)  # the kernel caches a piece of the file that lies across the new boundary
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


def visit(memories: list[FileArena], moves: list[Move], inside: Callable[[], object] = lambda: None) -> None:
    """Pages come, and go again."""
    mover = FileMover(memories)
    mover.begin()
    for move in moves:
        mover.fetch(move)
    for move in moves:
        mover.arrive(move)
        inside()
        mover.evict(move)
    mover.finish()


def test_what_is_read_beside_the_pages_of_a_step_is_dropped_with_the_next() -> None:
    memory = small(3)
    want = fill(memory)
    memory.drop()
    assert_holds(memory, want)
    assert memory.measured()["host"] == memory.layout.nbytes
    memory.prepare()
    assert_measured(memory)
    visit([memory], [Move(0, 5, 0)], lambda: assert_holds(memory, want))
    assert_measured(memory)


def test_the_number_of_mappings_does_not_grow_with_the_pages() -> None:
    memory = arena(40 * SMALL // 4, 0, 2, SMALL)
    assert memory.layout.pages > 30
    begin, end = memory.tensor.data_ptr(), memory.tensor.data_ptr() + memory.layout.nbytes
    for resident in (35, 5, 20):
        memory.move(resident)
        with open("/proc/self/smaps") as lines:
            assert sum(first < end and last > begin for first, last, _ in file_support.mappings(lines)) <= 6


def test_state_of_no_elements_needs_no_file(folder: Path) -> None:
    before = open_files(folder)
    memory = arena(0)
    assert memory.tensor.nbytes == 0
    assert memory.planned() == memory.measured() == {"host": 0, "file": 0}
    memory.move(0)
    memory.prepare()
    assert open_files(folder) == before


# ---- bounds ----


@pytest.mark.parametrize("share", [0.25, pytest.param(0, marks=pytest.mark.long)])
def test_the_resident_size_stays_within_the_budget(share: float) -> None:
    """96 MiB of state, a quarter of them in memory: pages of 6 MiB through four slots."""
    *sizes, right = file_support.run_apart("peak", 96, share, 3).split()
    peak, after, here, away = map(int, sizes)
    budget = int(96 * MIB * share)
    assert budget <= peak, "this measures nothing"
    assert peak <= budget + SLOTS * 6 * MIB + 8 * MIB < budget + 64 * MIB
    assert after <= budget + 8 * MIB
    assert here == budget, "the page cache keeps what was evicted"
    assert abs(away - (96 * MIB - budget)) <= 65536
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


def test_an_interrupt_before_a_page_is_queued_leaves_nothing_to_wait_for() -> None:
    """It came between the note of an eviction and its queueing: the end then waited for ever."""
    memory = small()
    mover = FileMover([memory])
    mover.begin()
    mover.fetch(Move(0, 0, 0))
    mover.arrive(Move(0, 0, 0))
    put = mover._tasks.put
    mover._tasks = SimpleNamespace(put=raising(KeyboardInterrupt()))  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        mover.evict(Move(0, 0, 0))
    mover._tasks = SimpleNamespace(put=put)  # type: ignore[assignment]
    end = threading.Thread(target=mover.finish, daemon=True)
    end.start()
    end.join(10)
    assert not end.is_alive()
    assert not mover._thread.is_alive()


def test_an_interrupt_while_the_thread_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, start = FileMover([small()]), threading.Thread.start

    def started_and_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", started_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        mover.begin()
    mover._thread.join(10)
    assert not mover._thread.is_alive()
