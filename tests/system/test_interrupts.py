"""Blocks in which no signal handler runs."""

# ruff: noqa: PT012 (what is raised, rises at the end of the block)

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagedopt.system.interrupts import Uninterrupted

USR1, ALRM, INT = signal.SIGUSR1, signal.SIGALRM, signal.SIGINT


class Told(Exception):
    """What a handler raises."""


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """Handlers for three signals; those of SIGALRM and SIGINT raise.  Afterwards they must be in place."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if number != USR1:
            raise Told(number)

    before = {number: signal.signal(number, note) for number in (USR1, ALRM, INT)}
    yield seen
    try:
        assert all(signal.getsignal(number) is note for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_run_at_the_end_each_once_whatever_the_others_raise(calls: list[int]) -> None:
    during = None
    with pytest.raises(Told), Uninterrupted():
        for number in (ALRM, USR1, ALRM, INT, USR1):
            signal.raise_signal(number)
        during = list(calls)
    assert during == []
    assert sorted(calls) == sorted([ALRM, USR1, INT])


def test_an_error_of_the_block_goes_on(calls: list[int]) -> None:
    with pytest.raises(KeyError), Uninterrupted():
        signal.raise_signal(USR1)
        raise KeyError
    assert calls == [USR1]


def test_only_a_second_ctrl_c_gets_in_and_only_where_it_may(calls: list[int]) -> None:
    reached = []
    with pytest.raises(Told), Uninterrupted(gives_way=True):
        signal.raise_signal(ALRM)
        signal.raise_signal(ALRM)
        signal.raise_signal(INT)
        reached.append(1)
        signal.raise_signal(INT)
        reached.append(2)
    assert reached == [1]
    calls.clear()
    with pytest.raises(Told), Uninterrupted():
        signal.raise_signal(INT)
        signal.raise_signal(INT)
        reached.append(3)
    assert reached == [1, 3]
    assert calls == [INT]


def test_a_second_ctrl_c_ends_the_protection_with_all_handlers_called_and_in_place(calls: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in (USR1, ALRM, INT)]
    with pytest.raises(Told), Uninterrupted(gives_way=True):
        signal.raise_signal(USR1)
        signal.raise_signal(INT)
        try:
            signal.raise_signal(INT)
        finally:
            assert sorted(calls) == sorted([INT, USR1])
            assert [signal.getsignal(number) for number in (USR1, ALRM, INT)] == handlers
    assert sorted(calls) == sorted([INT, USR1])
    with pytest.raises(Told), Uninterrupted():  # and the next block protects as ever
        signal.raise_signal(ALRM)
        calls.clear()
    assert calls == [ALRM]


def test_a_block_in_a_block_ends_with_the_outer_one(calls: list[int]) -> None:
    after = False
    with pytest.raises(Told), Uninterrupted():
        with Uninterrupted():
            signal.raise_signal(ALRM)
        after = True
    assert after


def test_other_threads_go_on_as_before(calls: list[int]) -> None:
    def work() -> None:
        with Uninterrupted():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with pytest.raises(Told):
        signal.raise_signal(ALRM)


def test_signals_that_are_ignored_or_have_no_handler_of_python_s_are_left_alone() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Uninterrupted():
            signal.raise_signal(signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
