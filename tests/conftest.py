"""What a whole run shares, workers and all: a folder for compiled kernels (never the user's) and locks; signals.

Compiled kernels are kept from run to run, in pytest's own cache: ``--cache-clear`` and ``make clean`` empty it.  Each
file is found by all that it is made of: text, signature, processor, and the versions of Python and Numba, NVRTC or
g++.  In CI a run begins without any.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from gpu_lock import Turns
from slices import Slice

from tests.clients.clients_page import Record

if TYPE_CHECKING:
    from command_line import Program

    from tests.card.tables import Tables

RUN_FOLDER = "PAGEDOPT_TESTS_FOLDER"
RECORD = "PAGEDOPT_CLIENTS_RECORD"
#: Bytes: what some ten versions of all kernels take.
MOST_KEPT = 1 << 30


def pytest_configure(config: pytest.Config) -> None:
    heed_interrupts()
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the variables from the controller
        folder = tempfile.mkdtemp(prefix="pagedopt-tests-")
        if RUN_FOLDER not in os.environ:  # a run that a test starts uses the kernels of the run that it is a part of
            os.environ["PAGEDOPT_CACHE_DIR"] = str(_kept_kernels(config) or os.path.join(folder, "cache"))
        os.environ[RUN_FOLDER] = folder
    config.pluginmanager.register(Turns(Path(os.environ[RUN_FOLDER])))
    if RECORD in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(Path(os.environ[RECORD]).resolve()))
    if (chosen := Slice.asked_for()) is not None:
        config.pluginmanager.register(chosen)


def _kept_kernels(config: pytest.Config) -> Path | None:
    """Where compiled kernels are kept; None: nowhere.  It begins anew when it has outgrown :data:`MOST_KEPT`."""
    if os.environ.get("CI") or not config.pluginmanager.hasplugin("cacheprovider"):
        return None
    try:
        folder = config.cache.mkdir("kernels")  # type: ignore[union-attr]
    except OSError:  # a tree that cannot be written
        return None
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > MOST_KEPT:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(RUN_FOLDER), ignore_errors=True)


def pytest_collection(session: pytest.Session) -> None:
    """Compile the look while tests are collected; the controller of pytest-xdist collects none."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        from pagedopt.system.look import compiled_look

        compiled_look()


@pytest.hookimpl(tryfirst=True)  # before long ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of optimizers that are not run often, 24 tests of 25 are long ones."""
    from tests.specs import is_seldom

    for item in items:
        given = getattr(item, "callspec", None)
        if given is not None and any(map(is_seldom, given.params.values())) and zlib.crc32(item.nodeid.encode()) % 25:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """No test has to wait for the compiler of the look, and steps use it from the first on."""
    from pagedopt.system.look import compiled_look

    compiled_look(wait=True)
    freeze()


def freeze() -> None:
    """Tests look for what is garbage, often: without all modules and tests among it that takes no time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # behind the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor what kernels, compilers and results have left by then: half a million objects in a worker's last files.

    A first step alone loads torch's compiler, and each look for garbage after it would take a quarter of a second.
    """
    global _modules
    if nextitem is not None and (nextitem.path != item.path or len(sys.modules) > _modules + 20):
        _modules = len(sys.modules)
        freeze()


_modules = len(sys.modules)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line for each reason: ``-rs`` has one for each test, two thousand without a GPU."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"skipped {tests:,}: {reason}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder on a disk, where state files go."""
    from file_support import folder_for_state

    with folder_for_state() as path:
        yield path


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """The program, as it is typed."""
    from command_line import Program

    return Program(capsys)


@pytest.fixture(autouse=True)
def staged(request: pytest.FixtureRequest) -> Iterator[str]:
    """How staged steps go: ``graph`` as they are, ``calls`` if :data:`often.both_ways` says so."""
    way: str = getattr(request, "param", "graph")
    # Without the fixture monkeypatch: all tests would undo theirs behind all other fixtures.
    with mock.patch.dict(os.environ, PAGEDOPT_STAGED=way) if way == "calls" else contextlib.nullcontext():
        yield way


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    """A played card, with tables on it."""
    from tests.card.card import Card
    from tests.card.tables import Tables

    with Card(monkeypatch).playing() as card:
        yield Tables(card)


def heed_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored, which Python and its children then keep so: tests that send
    it, here or to a child, would show nothing."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """As if torch.compile had compiled nothing yet."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
