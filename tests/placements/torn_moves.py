"""Programs for tests of moves that are cut off, each to be run in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import mmap
import os
import resource
import sys
import traceback
from collections.abc import Callable

import stand_ins
import torch
from file_support import SMALL, assert_holds, assert_measured, fill, process_bytes, sections_of, small, step

from pagedopt.placements.file import FileArena


def fill_the_table_of_mappings(hogs: list[mmap.mmap]) -> None:
    """Make mappings until the system (vm.max_map_count) allows no more."""
    kinds = (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)  # in turn, so that neighbours are not joined
    with contextlib.suppress(OSError):
        while True:
            hogs.append(mmap.mmap(-1, mmap.PAGESIZE, prot=kinds[len(hogs) % 2]))


def at_the_limit_of_mappings() -> None:
    """Move with 0, 1, 2 … mappings left; print for each move the numbers with which it was refused."""
    hogs: list[mmap.mmap] = []
    found: dict[str, list[int]] = {}
    for first, target in ((10, 9), (4, 3), (0, 1), (3, 4)):
        refused = found[f"{first} to {target}"] = []
        for left in range(24):
            if is_refused(first, target, left, hogs):
                refused.append(left)
            elif left > len(refused) + 1:  # and no more of them
                break
    print(json.dumps(found))


def is_refused(first: int, target: int, left: int, hogs: list[mmap.mmap]) -> bool:
    memory = small(first)
    want = fill(memory)
    fill_the_table_of_mappings(hogs)
    for _ in range(left):
        hogs.pop().close()
    text = stand_ins.refusal(lambda: memory.move(target), MemoryError)
    for _ in range(100):
        hogs.pop().close()
    assert "vm.max_map_count" in text or not text, text
    assert memory.resident == (first if text else target)
    check(memory, want)
    return bool(text)


def refusal(memory: FileArena, target: int, kind: int, limit: int) -> str:
    """What a move says that the system refuses under a limit; "" if it does not."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, limits[1]))
    try:
        return stand_ins.refusal(lambda: memory.move(target), MemoryError)
    finally:
        resource.setrlimit(kind, limits)


def without_memory(first: int, target: int) -> None:
    """Move up with an address space that is too small for it, and then with one that is not."""
    memory = small(first)
    want = fill(memory)
    text = refusal(memory, target, resource.RLIMIT_AS, process_bytes("VmSize") + (target - first) * SMALL)
    assert memory.resident == first, memory.resident
    check(memory, want)
    print(text)


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


def forked(resident: int) -> None:
    """Use state in a child; what the parent has is to be left alone."""
    memory = small(resident)
    want = fill(memory)
    views = sections_of(memory)
    if is_child_after(lambda: in_the_child(memory, views, want)):
        return
    assert memory.resident == resident
    check(memory, want)
    step(memory)
    memory.check_owner()
    print("fine")


def is_child_after(act: Callable[[], None]) -> bool:
    """Fork.  The child acts, and is to end as any process does, with all that is run at exit; the parent waits."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return False
    try:
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    return True


def in_the_child(memory: FileArena, views: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, views, want))
    assert all(map(torch.equal, map(copy.deepcopy, views), want))
    memory.drop()  # as reading all of it is followed by
    assert all(map(torch.equal, views, want))
    moves = (functools.partial(memory.move, 5), functools.partial(memory.move, 10), functools.partial(memory.evict, 9))
    for call in (*moves, memory.prepare, memory.check_owner):
        text = stand_ins.refusal(call)
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


def child_of_resident_state() -> None:
    """State that is all in memory is each process's own, as any tensor is."""
    memory = small(10)
    want = fill(memory)

    def use() -> None:
        memory.check_owner()
        memory.prepare()
        step(memory)
        assert_holds(memory, [w + 1 + i for i, w in enumerate(want)])
        assert stand_ins.refusal(lambda: memory.move(0)), "wrote the parent's file"
        assert memory.resident == 10

    if not is_child_after(use):
        check(memory, want)
        print("fine")


def larger_than_allowed(target: int) -> None:
    """Move down where a file may not be as large as it should be."""
    memory = small(10)
    want = fill(memory)
    text = refusal(memory, target, resource.RLIMIT_FSIZE, 18 * SMALL)  # eight pages of the second section
    assert memory.resident == 10, memory.resident
    check(memory, want)
    print(text)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
