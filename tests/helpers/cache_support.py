"""What tests of the kernel cache share: a kernel that a child process needs, and folders that other users can reach."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import stat
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pagedopt import multi_tensor_apply
from pagedopt.rules import Rule

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")


def halve(x):  # type: ignore[no-untyped-def]
    return x / 2


class Used(NamedTuple):
    """What came of using a kernel in a process that had none."""

    values: list[float]
    warnings: list[str]


def use() -> Used:
    """A rule that is new to this process: its kernel is found in the cache, or compiled."""
    x = torch.tensor([3.0, -8.0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        multi_tensor_apply(Rule(halve), [[x]])
    return Used(x.tolist(), [str(w.message) for w in told])


RIGHT = [1.5, -4.0]


def in_child(work: Callable[[], Any], user: int | None = None, umask: int | None = None, **environment: str) -> Any:
    """What ``work`` returns in a fork of this process.  (What it imports was imported here: others may not read it.)"""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        try:
            os.environ.update(environment)
            if umask is not None:
                os.umask(umask)
            if user is not None:
                os.setgroups([])
                os.setegid(user)
                os.seteuid(user)
            result = pickle.dumps((True, work()))
        except BaseException:
            result = pickle.dumps((False, traceback.format_exc()))
        with open(writer, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        well, result = pickle.loads(pipe.read() or pickle.dumps((False, "the child was killed")))
    os.waitpid(child, 0)
    assert well, result
    return result


@contextlib.contextmanager
def a_place() -> Iterator[Path]:
    """A folder that other users can reach, with room for a cache and for temporary files, which lie nowhere else."""
    use()  # a child that is another user cannot import what is needed for it
    folder = Path(tempfile.mkdtemp(prefix="pagedopt-tests-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        patch.setenv("PAGEDOPT_CACHE_DIR", str(folder / "cache"))
        yield folder
    shutil.rmtree(folder)


def own(folder: Path, user: int) -> Path:
    folder.mkdir(exist_ok=True)
    os.chown(folder, user, user)
    return folder


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file below, with what says whether it is still the same."""
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder.parent)): stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}


def plant(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)


def truncate(path: Path) -> None:
    plant(path, path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, at: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // at] ^= 1
    plant(path, bytes(data))


def swap_for_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".was"))
    path.symlink_to(path.with_suffix(".was"))


def swap_for_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": lambda path: plant(path, b""),
    "garbage": lambda path: plant(path, b"\x80\x05garbage" * 100),
    "a bit at the end": flip,
    "a bit at the start": lambda path: flip(path, 1),
    "open to the group": lambda path: path.chmod(0o660),
    "open to others": lambda path: path.chmod(0o602),
    "a link": swap_for_a_link,
    "a pipe": swap_for_a_pipe,
}
