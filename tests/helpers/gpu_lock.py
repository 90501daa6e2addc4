"""Which tests may run beside each other on one card, when several workers share it.

A test that uses the card takes a lock shared; one marked ``exclusive``, because it watches memory or time, takes it
alone.  ``exclusive("host")`` watches the memory of the machine, too, and runs alone among all tests, GPU or not.

Groups of pytest-xdist (``--dist loadgroup``) would not do: a group's tests share a worker, but those of other workers
run beside them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

#: Folders whose tests use the card where there is one: an experiment says what machine it ran on, an estimate asks it.
FOLDERS = ("gpu", "experiments", "clients", "planning")
#: Other files without the marker ``gpu`` whose tests look at the card where there is one.  To ask for its name, as all
#: do that write down what machine this is, takes a CUDA context, and so some of its memory.
ALSO_ON_THE_CARD = ("test_doctor.py", "test_plan.py", "test_train.py")


class Lock:
    """Held by many processes at once or by one alone; released with its holder, however that ends.

    Who waits holds the turnstile, behind which later comers queue: else tests that overlap would keep a lone one out.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._lock, self._turnstile = folder / f"{name}.lock", folder / f"{name}.turnstile"

    @contextlib.contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        """Wait for the lock and keep it for the block."""
        with self._turnstile.open("a") as turnstile, self._lock.open("a") as lock:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(turnstile, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # said, as a forked child may have the file open still


class Need(NamedTuple):
    """How a test takes the two locks; ``card`` is None for one that does not use it."""

    host_alone: bool
    card_alone: bool | None


def need_of(item: pytest.Item) -> Need:
    """What a test's markers ask for.

    Raises:
        pytest.UsageError: ``exclusive`` has an unknown argument.
    """
    marker = item.get_closest_marker("exclusive")
    if marker and marker.args not in ((), ("host",)):
        raise pytest.UsageError(f"{item.nodeid}: exclusive{marker.args}; write exclusive or exclusive('host')")
    folder, file = item.path.parts[-2:]
    uses = item.get_closest_marker("gpu") or folder in FOLDERS or file in ALSO_ON_THE_CARD
    return Need(bool(marker and marker.args), bool(marker) if uses or marker else None)


class Turns:
    """A plugin in which every test waits for its turn before the clock of pytest-timeout starts.

    Tests that follow each other in one process and need to be as much alone take one turn: to have it means to wait
    until all others have ended theirs.
    """

    def __init__(self, folder: Path) -> None:
        self._host, self._card = Lock(folder, "host"), Lock(folder, "card")
        self._turn = contextlib.ExitStack()
        self._need: Need | None = None

    @functools.cached_property
    def needed(self) -> bool:
        """Whether there is a card; asked when tests run: xdist's controller runs none and need not import torch."""
        import torch

        return torch.cuda.is_available()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            need_of(item)  # so that a wrong marker is refused before anything runs

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        if not self.needed:
            return (yield)
        need = need_of(item)
        self._take(need)
        try:
            return (yield)
        finally:
            if need.card_alone is not None:
                settle()
            if not need.card_alone or nextitem is None or need_of(nextitem) != need:
                self._end()

    def _take(self, need: Need) -> None:
        if self._need == need:
            return
        self._end()
        self._turn.enter_context(self._host.hold(need.host_alone))  # all take it first: no two wait for each other
        if need.card_alone is not None:
            self._turn.enter_context(self._card.hold(need.card_alone))
        self._need = need

    def _end(self) -> None:
        self._need = None
        self._turn.close()


def settle() -> None:
    """Give back what a test left on the card, or it would go later, beside a test that watches."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a card that has failed says so in the test that did it
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
