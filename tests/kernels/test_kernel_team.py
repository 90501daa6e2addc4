"""Kernels on the threads of torch's OpenMP: which of them work, and what happens when one fails."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from forks import in_child
from support import F32, lists_for, same_bits, scalars_for, threads

from pagedopt import Sweep, multi_tensor_apply
from pagedopt.kernels import cpu
from pagedopt.rules import RULES
from pagedopt.tables.layout import Geometry, HostTable

CHUNK = 1024
#: Counts at the begin of each chunk how often it was walked, and says by which thread of the team.
TEXT = """
import numpy as _np
from numba import carray as _carray, njit as _njit
from pagedopt.kernels.numba_numbers import asked as _asked, pointer as _pointer

@_njit(error_model="numpy", nogil=True)
def kernel(_scalars, _rows, _chunks, _chunk_numel, _first, _last):
    for _item in range(_first, _last):
        _row, _offset = _chunks[_item, 0], _chunks[_item, 1]
        if _scalars[0, 0] == _item:
            raise MemoryError
        _seen = _carray(_pointer(_rows[_row, 0] + 8 * _offset), 2, _np.int64)
        _seen[0] += 1
        _seen[1] = _asked(_np.int64(_scalars[0, 1]))
"""

pytestmark = pytest.mark.skipif(cpu.openmp() is None, reason="torch has no OpenMP here, or another one than GCC's")


@pytest.fixture(scope="module")
def kernel() -> Any:
    return cpu._compiled(TEXT, "seen", 1, 2)


class Seen:
    """A table of ``chunks`` chunks, and what was seen of each."""

    def __init__(self, chunks: int) -> None:
        self.numbers = np.zeros(chunks * CHUNK, np.int64)
        self.table = HostTable(1, [chunks * CHUNK], 2, 1, Geometry(CHUNK, 512))
        self.table.rows["address"] = self.numbers.ctypes.data
        self.fail(-1)

    def fail(self, chunk: int) -> None:
        """Let a kernel fail at a chunk; -1: at none."""
        found = cpu.openmp()
        assert found is not None
        self.table.set_scalars([[chunk, found.thread_num]])

    @property
    def times(self) -> list[int]:
        return self.numbers[::CHUNK].tolist()

    @property
    def threads(self) -> list[int]:
        return self.numbers[1::CHUNK].tolist()


def walk(kernel: Any, seen: Seen, count: int, span: tuple[int, int] | None = None) -> Seen:
    with threads(count):
        cpu.run(kernel, seen.table, span)
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_thread_has_one_stretch_and_the_same_in_every_step(kernel: Any, count: int) -> None:
    chunks = 4 * cpu.MIN_ELEMENTS // CHUNK
    seen = walk(kernel, Seen(chunks), count)
    first = seen.threads
    walk(kernel, seen, count)
    assert seen.times == [2] * chunks
    assert sorted(set(first)) == list(range(count))
    assert seen.threads == first == sorted(first)


def test_as_many_threads_work_as_the_work_is_worth(kernel: Any) -> None:
    for worth in (1, 2, 3):
        chunks = worth * cpu.MIN_ELEMENTS // CHUNK
        assert len(set(walk(kernel, Seen(chunks), 4).threads)) == worth
    assert walk(kernel, Seen(chunks), 4, (2, 40)).times == [2 <= i < 40 for i in range(chunks)]


def test_nothing_to_do_is_done(kernel: Any) -> None:
    for seen in (Seen(0), Seen(3)):
        assert walk(kernel, seen, 4, (0, 0)).times == [0] * len(seen.times)
    assert walk(kernel, Seen(0), 4).times == []


def test_a_team_of_fewer_threads_than_stretches_does_them_all(kernel: Any) -> None:
    """OpenMP may give fewer threads than were asked for."""
    seen = Seen(7)
    entry = cpu.team_entry()
    assert entry is not None
    cpu.Call(kernel, seen.table, [(i, i + 1) for i in range(7)]).on(entry, 2)()
    assert seen.times == [1] * 7
    assert set(seen.threads) == {0, 1}


def test_what_fails_on_a_thread_is_raised_on_ours(kernel: Any, capfd: pytest.CaptureFixture[str]) -> None:
    seen = Seen(4 * cpu.MIN_ELEMENTS // CHUNK)
    walk(kernel, seen, 4)
    last = len(seen.times) - 1
    seen.fail(last)
    with pytest.raises(MemoryError, match="thread of a CPU kernel"):
        walk(kernel, seen, 4)
    assert capfd.readouterr().err == ""
    assert seen.times == [2] * last + [1]
    seen.fail(-1)
    assert walk(kernel, seen, 4).times == [3] * last + [2], "what failed once is not remembered"


def test_a_fork_has_one_thread(kernel: Any) -> None:
    """It has inherited OpenMP's record of the team, but not its threads: it would wait for them."""

    def child() -> bool:
        if cpu.team_entry() is not None:
            return False
        seen = walk(kernel, Seen(64), 4)
        return seen.times == [1] * 64 and set(seen.threads) == {0}

    walk(kernel, Seen(64), 4)
    assert in_child(child)


def test_a_torch_without_openmp_has_one_thread(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(64)
    monkeypatch.setattr(cpu, "openmp", lambda: None)
    assert walk(kernel, seen, 4).times == [1] * 64
    assert set(seen.threads) == {0}


# ---- whole calls ----

SIZES = (700_001, 1, 0, 33_000, 5, 20_000)


def test_threads_change_no_bit() -> None:
    adamw, results = RULES["adamw"], []
    for count in (1, 2, 5):
        lists = lists_for(adamw, SIZES, (F32,) * 4)
        for _ in range(2):
            with threads(count):
                Sweep(adamw, lists).run(scalars_for(adamw))
        results.append(lists)
    assert all(same_bits(results[0], other) for other in results[1:])


def test_calls_of_several_threads_do_not_mix() -> None:
    def double(lists: list[list[torch.Tensor]]) -> None:
        for _ in range(20):
            multi_tensor_apply(RULES["mul_scalar"], lists, {"scalar": 2.0})

    def numbers() -> list[list[torch.Tensor]]:
        return [[torch.arange(n, dtype=F32) for n in SIZES]]

    several = [numbers() for _ in range(6)]
    with threads(4):
        callers = [threading.Thread(target=double, args=(lists,)) for lists in several]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    for lists in several:
        assert all(torch.equal(t, was * 2**20) for t, was in zip(lists[0], numbers()[0], strict=True))
