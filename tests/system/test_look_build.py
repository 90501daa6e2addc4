"""The compiled look is compiled by a child process, once; without one, steps look in Python, and doctor says why."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from pagedopt import PagedAdamW
from pagedopt.system import cache, warn
from pagedopt.system import look as build
from tests.world import record

COMPILED, START = cache.find(build._file()), build._start


def forked(priority: int) -> int:
    """In the place of a new interpreter, which takes seconds."""
    if not (child := os.fork()):
        os.setpgid(0, 0)
        build.main()
        os._exit(0)
    return child


def trained(steps: int) -> PagedAdamW:
    p = Parameter(torch.ones(3))
    optimizer = PagedAdamW([p])
    for _ in range(steps):
        p.grad = torch.ones(3)
        optimizer.step()
    return optimizer


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As if nothing had been compiled; returns the cache, which is empty.  Who compiles is a fork of this process."""
    trained(1)  # its kernel is in the other cache
    monkeypatch.setattr(build, "_build", build._Build())
    monkeypatch.setattr(build, "_start", forked)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    build._file.cache_clear()
    yield tmp_path / "cache"
    build._file.cache_clear()


def compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the compiler, a script of the shell."""
    (folder / "compiler").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", f"{folder / 'compiler'} --an-option")


#: What the compiler does, the reason that is given, and whether later processes find it.
COMPILERS = [
    ("echo look.cpp: error: no such header >&2; exit 1", "error: no such header (all of it: ", True),
    ("exit 1", "it said nothing (all of it: ", True),
    ("while [ $1 != -o ]; do shift; done; echo > $2", "file too short", True),
    ("kill -9 $PPID", "the process that should compile it ended with -9", False),
]


@pytest.mark.parametrize(("script", "reason", "kept"), COMPILERS)
def test_without_an_extension_steps_look_in_python_and_the_reason_is_kept(
    script: str, reason: str, kept: bool, anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, script, monkeypatch)
    assert build.compiled_look(wait=True) is None
    assert reason in build.why_none()
    assert not build.pending()
    optimizer = trained(5)
    assert record(optimizer) is None
    (state,) = optimizer.state.values()
    assert state["step"] == 5
    again = build._Build()  # as in another process
    assert again.ask(wait=False) is None
    assert (again.reason is not build._PENDING) is kept
    if kept:
        assert reason in again.reason
        (text,) = anew.glob("look-*.txt")
        os.utime(text, (time.time() - 2 * build.RETRY,) * 2)
        assert build._failure() is None, "it is tried again after a day"
    else:
        os.waitpid(again._child, 0)


def test_the_compiler_has_a_limit_and_what_it_has_started_ends(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, f"echo $$ > {tmp_path / 'number'}; sleep 600", monkeypatch)
    monkeypatch.setattr(build, "LIMIT", 1)
    assert build.compiled_look(wait=True) is None
    assert "the compiler took more than 1 s" in build.why_none()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), 0)


NONE = {
    "no compiler": (lambda patch: patch.setenv("CXX", "/nowhere/c++"), "there is no C++ compiler '/nowhere/c++'"),
    "no headers": (
        lambda patch: patch.setattr(build.sysconfig, "get_paths", lambda: {"include": "/nowhere"}),
        "/nowhere/Python.h is missing",
    ),
    "no interpreter": (lambda patch: patch.setattr(sys, "executable", "/opt/app/train"), "is no Python interpreter"),
    "none at all": (lambda patch: patch.setattr(sys, "executable", None), "is no Python interpreter"),
    "not there": (lambda patch: patch.setattr(sys, "executable", "/nowhere/python3"), "No such file"),
    "a frozen application": (lambda patch: patch.setattr(sys, "frozen", True, raising=False), "is no Python"),
    "no place": (
        lambda patch: patch.setenv(cache.VARIABLE, "/dev/null/cache"),
        "there is no place to keep it; set PAGEDOPT_CACHE_DIR",
    ),
    "no lock": (
        lambda patch: patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False),
        "this Python has no global interpreter lock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NONE)
def test_where_nothing_can_be_compiled_nothing_is_started(
    what: str, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, reason = NONE[what]
    with monkeypatch.context() as patch:
        patch.setattr(build, "_start", START)
        act(patch)
        assert build.compiled_look() is None
    assert reason in build.why_none()
    assert not build.pending()
    assert build._build._child == 0


def test_an_optimizer_begins_it_and_waits_for_none(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler goes on when the process that has asked for it, or a fork of that, has ended."""
    script = f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.05; done; echo error: at last >&2; exit 1"
    compiler(tmp_path, script, monkeypatch)
    PagedAdamW([Parameter(torch.ones(3))])
    assert build.pending()
    assert build.why_none() == "it is being compiled"
    child = build._build._child
    if not (fork := os.fork()):
        build._build.ask(wait=False)  # has a child of its own, which waits for its turn
        os._exit(0 if build.pending() and build._build._child not in (0, child) else 1)
    assert os.waitpid(fork, 0)[1] == 0
    (tmp_path / "go").touch()
    assert build.compiled_look(wait=True) is None
    assert "error: at last" in build.why_none()


def test_a_copy_of_the_package_finds_the_same_extension(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, copy = build._file(), tmp_path / "look.cpp"
    copy.write_text(build._SOURCE.read_text())
    monkeypatch.setattr(build, "_SOURCE", copy)
    build._file.cache_clear()
    assert build._file() == name
    copy.write_text("another")
    build._file.cache_clear()
    assert build._file() != name


@pytest.mark.skipif(build.compiled_look(wait=True) is None, reason="no compiled look here")
def test_what_is_compiled_is_kept_and_a_file_that_is_damaged_is_compiled_anew(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"while [ $1 != -o ]; do shift; done; cp {tmp_path / 'look.so'} $2; echo >> {tmp_path / 'runs'}"
    compiler(tmp_path, script, monkeypatch)
    (tmp_path / "look.so").write_bytes(COMPILED.data)
    monkeypatch.setattr(build, "_start", START)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which the child must not inherit
    try:
        assert build.compiled_look(wait=True).Look
    finally:
        signal.signal(signal.SIGCHLD, handler)
    (file,) = anew.iterdir()  # and no reason why there is none
    assert build._Build().ask(wait=False).Look, "from the cache, at once"
    monkeypatch.setattr(build, "_start", forked)
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(warn, "_said", set())
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert build._Build().ask(wait=True).Look
    assert (tmp_path / "runs").read_text() == "\n\n"


@pytest.mark.skipif(build.compiled_look(wait=True) is None, reason="no compiled look here")
@pytest.mark.parametrize("end", [None, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0)])
def test_while_another_process_tries_what_it_has_compiled_nobody_believes_that_it_failed(
    end: Callable[[], None] | None, anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked then had no look for its whole life."""
    (tmp_path / "look.so").write_bytes(COMPILED.data)
    compiler(tmp_path, f"while [ $1 != -o ]; do shift; done; cp {tmp_path / 'look.so'} $2", monkeypatch)

    def tried(data: bytes) -> None:
        other = build._Build()
        other._find(build._PENDING)
        (tmp_path / "found").write_text(other.reason)
        if end is not None:
            end()

    monkeypatch.setattr(build, "_load", tried)
    build.main()
    assert (tmp_path / "found").read_text() == build._PENDING
    assert ("loading it ended the process" in (build._failure() or "")) == (end is not None)
    assert (cache.find(build._file()) is None) == (end is not None)
