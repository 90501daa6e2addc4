"""Moves that are cut off, by a signal or a system that gives no more: each page is where it is counted, bit for bit."""

from __future__ import annotations

import copy
import ctypes
import errno
import fcntl
import functools
import gc
import itertools
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import python
from file_support import assert_holds, assert_measured, fill, mapped, open_files, sections_of, small, step
from injector import interrupt_at
from often import MARKS
from stand_ins import raising, refusal

from pagedopt.placements.file import FileArena
from pagedopt.system import libc
from pagedopt.system.state_file import StateFile
from pagedopt.system.warn import StateLost

#: So many lines are passed over between two that get a signal.
STRIDE = 1 if os.environ.get("PAGEDOPT_EVERY_LINE") else 53


pytestmark = [pytest.mark.usefixtures("folder"), *MARKS[STRIDE > 1]]


def check(memory: FileArena, want: list[torch.Tensor]) -> None:
    """What is said to be away is away, what is said to be in memory is there, and nothing is lost now or later."""
    assert_holds(memory, want)
    memory.drop()
    assert_measured(memory)
    assert_holds(memory, want)
    for resident in (0, 10, 5):
        memory.move(resident)
        assert_measured(memory)
        assert_holds(memory, want)


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGALRM, marks=pytest.mark.long)])
@pytest.mark.parametrize(("first", "target"), [(4, 1), (10, 9), (1, 4), (0, 1)])
def test_a_signal_at_any_line_of_a_move_loses_nothing(first: int, target: int, number: int) -> None:
    reached = set[int]()
    for at in itertools.count(1 + number % STRIDE, STRIDE):
        memory = small(first)
        want = fill(memory)
        outcome = interrupt_at(at, number, lambda: memory.move(target))  # noqa: B023
        assert bool(outcome.error or outcome.unraisable) == bool(outcome.shots)
        reached.add(memory.resident)
        check(memory, want)
        if not outcome.shots:
            break
    assert reached == set(range(min(first, target), max(first, target) + 1)), "this interrupts nothing"


def test_a_signal_while_state_is_made_leaves_nothing(folder: Path) -> None:
    gc.collect()
    before = open_files(folder), mapped(folder)
    stride = STRIDE if STRIDE == 1 else 6 * STRIDE
    for at in itertools.count(1, stride):
        outcome = interrupt_at(at, signal.SIGINT, lambda: small(3))
        if not outcome.shots:
            break
        gc.collect()  # what is in a circle goes late
        assert (open_files(folder), mapped(folder)) == before, outcome.shots
    assert at > 3 * stride, "this interrupts nothing"


def test_a_call_that_a_signal_cuts_off_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a call that waits for sure, until the handler of the signal that cuts it off gives way."""
    monkeypatch.setitem(libc._SIGNATURES, "flock", (ctypes.c_int,) * 3)
    holder, waiter = (os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR) for _ in range(2))
    fcntl.flock(holder, fcntl.LOCK_EX)
    handler = signal.signal(signal.SIGALRM, lambda *_: fcntl.flock(holder, fcntl.LOCK_UN))
    signal.siginterrupt(signal.SIGALRM, True)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        libc.call("flock", waiter, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        os.close(holder)
        os.close(waiter)


# ---- a system that gives no more ----


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, at: int, code: int = errno.ENOMEM) -> Callable[[], int]:
    """Let one call to the system fail.  Returns how many there were."""
    real, calls = getattr(libc, name), itertools.count(1)
    made = [0]

    def call(*arguments: int) -> int:
        made[0] = next(calls)
        if made[0] == at:
            raise OSError(code, f"{name}: {os.strerror(code)}")
        result: int = real(*arguments)
        return result

    monkeypatch.setattr(libc, name, call)
    return lambda: made[0]


@pytest.mark.parametrize(("first", "target", "name"), [(5, 2, "map_file"), (5, 2, "map_file_at"), (2, 5, "put"),
                                                       (2, 5, "map_anonymous"), (5, 2, "write_out")])  # fmt: skip
def test_any_call_that_fails_leaves_every_page_where_it_is_counted(
    first: int, target: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system may refuse any of them when another thread has taken the last of something."""
    for at in itertools.count(1):
        memory = small(first)
        want = fill(memory)
        with monkeypatch.context() as patch:
            patch.setattr(memory._file, "_through_mapping", False)
            made = refuse(patch, name, at)
            said = refusal(lambda: memory.move(target), MemoryError)  # noqa: B023
        assert bool(said) == (made() >= at)
        assert not said or not name.startswith(("map", "put")) or "vm.max_map_count" in said
        check(memory, want)
        if made() < at:
            break
    assert at > 1, "it is not called"


def test_a_page_that_cannot_even_stay_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small(0)
    fill(memory)
    with monkeypatch.context() as patch:
        refuse(patch, "put", 2)
        refuse(patch, "map_file_at", 1)
        with pytest.raises(StateLost, match=r"131,072 bytes of optimizer state .* load a checkpoint"):
            memory.move(3)


# ---- errors of the disk ----


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("name", ["pwrite", "posix_fallocate", "ftruncate", "open", "write_out", "sync", "fdatasync"])
def test_a_lack_of_room_is_a_memory_error_and_a_broken_disk_is_not(
    name: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(folder, 8192)
    file._through_mapping = name in ("sync", "fdatasync")
    calls: dict[str, Callable[[], object]] = {
        "ftruncate": lambda: StateFile(folder, 4096),
        "open": lambda: StateFile(folder, 4096),
        "posix_fallocate": lambda: file.reserve([(0, 4096)]),
        "write_out": lambda: file.drop([(0, 4096)]),
        "sync": lambda: file.drop([(0, 4096)]),
    }
    call = calls.get(name, lambda: file.send_out([(0, 4096)], [(0, 8192)]))
    monkeypatch.setattr(libc if hasattr(libc, name) else os, name, raising(OSError(code, os.strerror(code))))
    with pytest.raises(OSError if code == errno.EIO else MemoryError) as caught:
        call()
    if code == errno.ENOMEM:
        assert "of memory for optimizer state" in str(caught.value)
    elif code != errno.EIO:
        assert f"the disk of {folder} gave no" in str(caught.value)
        assert "PAGEDOPT_STATE_DIR" in str(caught.value)


def test_pages_reach_the_disk_before_they_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes a write and then fails would have lost it."""
    memory = small(5)
    want = fill(memory)
    with monkeypatch.context() as patch:
        patch.setattr(memory._file, "_through_mapping", False)
        refuse(patch, "write_out", 3, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            memory.move(0)
    assert memory.resident == 4
    check(memory, want)


# ---- processes: this file is a program, too ----


def forked(resident: int) -> None:
    """Use state in a child, which is to end as any process does; what the parent has is to be left alone."""
    memory = small(resident)
    want = fill(memory)
    views = sections_of(memory)
    if not (child := os.fork()):
        try:
            in_the_child(memory, views, want)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        return
    assert os.waitpid(child, 0)[1] == 0
    assert memory.resident == resident
    check(memory, want)
    step(memory)
    memory.check_owner()
    print("fine")


def in_the_child(memory: FileArena, views: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, views, want))
    assert all(map(torch.equal, map(copy.deepcopy, views), want))
    memory.drop()  # as reading all of it is followed by
    assert all(map(torch.equal, views, want))
    moves = (functools.partial(memory.move, 5), functools.partial(memory.move, 10), functools.partial(memory.evict, 9))
    for call in (*moves, memory.prepare, memory.check_owner):
        text = refusal(call)
        assert "copy.deepcopy" in text, f"{call} went through"
        assert str(os.getppid()) in text
    own = small(3)
    own_values = fill(own)
    step(own)
    own.move(7)
    own.move(0)
    assert_holds(own, [w + 1 + i for i, w in enumerate(own_values)])
    del own, memory, views
    gc.collect()


def test_a_fork_uses_its_own_state_and_leaves_the_parents() -> None:
    assert "fine" in python(__file__, OMP_NUM_THREADS="1")  # a forked child has no threads of OpenMP


def test_an_arena_takes_one_descriptor(folder: Path) -> None:
    gc.collect()
    before = open_files(folder)
    memories = [small(3) for _ in range(5)]
    assert open_files(folder) - before == len(memories)


if __name__ == "__main__":
    forked(3)
