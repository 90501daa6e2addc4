"""The threads of a CPU kernel: as many as there are, and none is in the table when the call has ended.

What is compiled runs on the team of torch's OpenMP, unless the process was forked; what is Python, on our own threads.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from cache_support import in_child
from stand_ins import raising
from support import F32, lists_for, same_bits, scalars_for, threads

from pagedopt import Sweep, multi_tensor_apply
from pagedopt.kernels import cpu
from pagedopt.rules import RULES
from pagedopt.tables.layout import Geometry, HostTable

THREADS = 4
ADAMW = RULES["adamw"]
SIZES = (700_001, 1, 0, 33_000, 5, 20_000)  # work for four threads, of whatever kind


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with threads(THREADS):
        yield


def double(lists: list[list[torch.Tensor]]) -> None:
    multi_tensor_apply(RULES["mul_scalar"], lists, {"scalar": 2.0})


def numbers() -> list[list[torch.Tensor]]:
    return [[torch.from_numpy(np.arange(n, dtype=np.float32)) for n in SIZES]]


def are_doubled(lists: list[list[torch.Tensor]], times: int = 1) -> bool:
    """In NumPy, which starts no threads."""
    return all(np.array_equal(t.numpy(), np.arange(len(t), dtype=np.float32) * 2**times) for t in lists[0])


def test_threads_change_no_bit() -> None:
    results = []
    for count in (1, 2, 5):
        lists = lists_for(ADAMW, SIZES, (F32,) * 4)
        for _ in range(2):
            with threads(count):
                Sweep(ADAMW, lists).run(scalars_for(ADAMW))
        results.append(lists)
    assert all(same_bits(results[0], other) for other in results[1:])


# ---- with fewer threads than were asked for ----


def no_more_threads() -> None:
    """From here on the system gives this process none."""
    if os.geteuid() == 0:  # whom no limit holds
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    with pytest.raises(RuntimeError, match="new thread"):
        threading.Thread(target=print).start()


@pytest.mark.parametrize("before", [0, 2], ids=["no thread at all", "one of three"])
def test_the_threads_there_are_do_the_work(before: int) -> None:
    def work() -> bool:
        lists = numbers()
        if before:
            with threads(before):
                double(lists)
        no_more_threads()
        for _ in range(3):
            double(lists)
        return are_doubled(lists, 4 if before else 3)

    double(numbers())  # compiled here: the child may not be able to
    assert in_child(work)


def test_a_fork_has_threads_of_its_own() -> None:
    def work() -> bool:
        double(lists)
        return are_doubled(lists)

    lists = numbers()
    double(numbers())
    assert in_child(work)


def test_calls_of_several_threads_do_not_mix() -> None:
    lists = [numbers() for _ in range(6)]
    callers = [threading.Thread(target=lambda own: [double(own) for _ in range(20)], args=(own,)) for own in lists]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(are_doubled(own, 20) for own in lists)


# ---- what ends a call early ----


class Kernel:
    """In the place of a compiled one: takes its time, and knows who is inside.

    Args:
        first: what the calling thread does in its first stretch.
        others: what each other thread does in its first.
    """

    def __init__(self, first: Callable[[], Any] = lambda: None, others: Callable[[], Any] = lambda: None) -> None:
        self._first, self._others, self._caller = first, others, threading.get_ident()
        self.inside = self.taken = 0
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        self._all_in = threading.Barrier(THREADS)

    def __call__(self, *arguments: Any) -> None:
        me = threading.get_ident()
        with self._lock:
            self.inside += 1
            self.taken += 1
            new = me not in self._seen
            self._seen.add(me)
        try:
            if new:
                self._all_in.wait(10)
                (self._first if me == self._caller else self._others)()
            time.sleep(0.02)
        finally:
            with self._lock:
                self.inside -= 1


def table() -> HostTable:
    """Of many stretches."""
    return HostTable(1, [1 << 20], geometry=Geometry(1024, 512))


SHARES = THREADS * cpu.SHARES


class Interrupted(Exception):
    """What a handler raises."""


@pytest.fixture
def handler() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    yield
    for number, was in before.items():
        signal.signal(number, was)


def check_all_have_left(kernel: Kernel) -> None:
    assert kernel.inside == 0, "a thread is still in the table"
    taken = kernel.taken
    assert taken < SHARES, "nobody stopped"
    time.sleep(0.05)
    assert kernel.taken == taken, "a thread went on"


def test_an_undisturbed_call_takes_every_stretch_once() -> None:
    kernel = Kernel()
    cpu.run(kernel, table())
    assert (kernel.inside, kernel.taken) == (0, SHARES)


def test_an_interrupt_ends_the_call_when_all_threads_have_left(handler: None) -> None:
    kernel = Kernel(first=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        cpu.run(kernel, table())
    check_all_have_left(kernel)


def test_an_interrupt_of_the_wait_does_not_end_it(handler: None) -> None:
    """Signals come from all threads, at all times; Python handles them in the first."""

    def again() -> None:
        for _ in range(5):
            time.sleep(0.01)
            signal.raise_signal(signal.SIGALRM)
        time.sleep(0.05)  # the last is handled before anybody leaves

    kernel = Kernel(first=lambda: signal.raise_signal(signal.SIGINT), others=again)
    with pytest.raises(Interrupted, match=str(int(signal.SIGINT))):
        cpu.run(kernel, table())
    check_all_have_left(kernel)


@pytest.mark.parametrize("where", ["first", "others"])
def test_an_error_on_a_thread_is_raised_when_all_have_left(where: str) -> None:
    kernel = Kernel(**{where: raising(MemoryError("of a thread"))})
    with pytest.raises(MemoryError, match="of a thread"):
        cpu.run(kernel, table())
    check_all_have_left(kernel)
    double(lists := numbers())
    assert are_doubled(lists), "the threads are gone"
