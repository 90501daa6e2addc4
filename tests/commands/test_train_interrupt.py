"""A signal while a step goes on for long: `train` ends all the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import threading
import time

import pytest

from pagedopt.commands.train import interrupt
from pagedopt.commands.train.interrupt import Interrupt


def long_call(seconds: float) -> None:
    """One call in which Python handles no signal, as torch has them."""
    begin, rounds = time.perf_counter(), 20_000
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(rounds * seconds / (time.perf_counter() - begin)))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An item if the program would have been ended."""
    found: list[bool] = []
    monkeypatch.setattr(interrupt, "end_now", lambda: found.append(True))
    monkeypatch.setattr(interrupt, "PATIENCE", 0.1)
    monkeypatch.setattr(interrupt, "SECOND", 0.05)
    return found


def sent(*numbers: int) -> threading.Timer:
    """These signals arrive in a moment."""
    timer = threading.Timer(0.1, lambda: [(os.kill(os.getpid(), number), time.sleep(0.02)) for number in numbers])
    timer.start()
    return timer


@pytest.mark.parametrize("held", [0, 1024])
def test_a_step_that_goes_on_for_long_is_ended_after_sigterm(ended: list[bool], held: int) -> None:
    """Also in a process that holds more descriptors than ``select`` takes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
        for _ in range(held):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        asked = stack.enter_context(Interrupt())
        timer = sent(signal.SIGTERM)
        with asked.step():
            long_call(1.0)
        timer.join()
        assert asked.requested
    assert ended == [True]


def test_a_step_that_ends_in_time_is_not_ended_and_nor_is_what_follows(ended: list[bool]) -> None:
    with Interrupt() as asked:
        with asked.step():
            signal.raise_signal(signal.SIGTERM)
        assert asked.requested
        time.sleep(0.2)  # a checkpoint is written
    assert ended == []


@pytest.mark.parametrize(("numbers", "ends"), [((signal.SIGINT,), False), ((signal.SIGINT, signal.SIGINT), True)])
def test_ctrl_c_waits_for_the_step_and_a_second_one_does_not(
    numbers: tuple[int, ...], ends: bool, ended: list[bool]
) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with Interrupt() as asked:
            timer = sent(*numbers)
            with asked.step():
                long_call(0.7)
            timer.join()
            assert asked.requested
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ended) == ends


def test_handlers_and_the_wakeup_descriptor_are_as_before() -> None:
    before = [signal.getsignal(number) for number in interrupt.CAUGHT], signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])
    threads = threading.active_count()
    with Interrupt() as asked, asked.step():
        assert signal.getsignal(signal.SIGTERM) == asked._handle
    assert [signal.getsignal(number) for number in interrupt.CAUGHT] == before[0]
    assert signal.set_wakeup_fd(before[1]) == before[1]
    assert threading.active_count() == threads
