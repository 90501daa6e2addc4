"""What was compiled, kept on disk between runs, in a folder that nobody else can write to.

Where there is no such folder, things are kept in a private temporary one until the process ends, and where nothing can
be written at all, not on disk.  What is found is not believed: a file must be ours alone, and be what was written.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .warn import warn_once

VARIABLE = "PAGEDOPT_CACHE_DIR"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CachedFile(NamedTuple):
    """A file of ours and what is in it."""

    path: Path
    data: bytes


def cache_folder() -> Path:
    """Where compiled kernels are to be kept: $PAGEDOPT_CACHE_DIR, else pagedopt in $XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        FileNotFoundError: none is set, and there is no home.
    """
    if own := os.environ.get(VARIABLE):
        return Path(own).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "pagedopt"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


def digest(name: str, data: bytes) -> str:
    """A digest of data and the name it is kept under: under another name the same bytes count as damaged."""
    return hashlib.sha256(name.encode() + b"\0" + data).hexdigest()


def seal(name: str, data: bytes) -> bytes:
    """Data with its digest in front, for :func:`unseal`."""
    return digest(name, data).encode() + b"\n" + data


def unseal(kept: CachedFile) -> bytes | None:
    """The data of a sealed file; None, and the file deleted, if it is damaged."""
    mark, _, data = kept.data.partition(b"\n")
    if mark == digest(kept.path.name, data).encode():
        return data
    discard(kept.path, "it is damaged")
    return None


def keep(name: str, data: bytes) -> Path | None:
    """Write a file for later processes, or at least for this one; None where nothing can be written.

    The first time that it cannot be kept where it should, there is a warning.
    """
    path, folder, problem = None, None, ""
    for place in (cache_folder, _temporary_folder):
        try:
            folder = place()
            path = write_atomically(_ours(folder, make=True) / name, data)
            break
        except OSError as error:
            problem = problem or (f"in {folder}: {error}" if folder else f"({error})")
    if problem:
        where = f"this process has its own in {path.parent} until it ends" if path else "every process compiles its own"
        warn_once(
            "no place for kernels",
            f"compiled kernels cannot be kept {problem}; {where}. Set {VARIABLE} to a folder of yours that has room",
        )
    return path


def find(name: str) -> CachedFile | None:
    """What :func:`keep` wrote under ``name``, if it is there and nobody else can have written it."""
    for folder in _folders():
        path = folder / name
        try:
            return CachedFile(path, _read(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            discard(path, str(error))
    return None


def discard(path: Path, why: str) -> None:
    """Delete what cannot be used, so that it is made anew; with a warning, once."""
    with contextlib.suppress(OSError):
        path.unlink()
    warn_once("damaged kernels", f"{path} cannot be used ({why}); such files are deleted and compiled anew")


def write_atomically(path: Path, data: bytes) -> Path:
    """Write a file of ours alone that other processes see whole or not at all.

    Raises:
        OSError: it cannot be written; nothing is left of it then.
    """
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, 0o600)  # the umask may have taken our own bits
            file.write(data)
        os.replace(own, path)
    except BaseException:
        with contextlib.suppress(OSError):
            own.unlink()
        raise
    return path


def in_memory(data: bytes) -> Path:
    """A path to bytes that are on no disk, for as long as this process lives."""
    handle = os.memfd_create("pagedopt")
    with open(handle, "wb", closefd=False) as file:
        file.write(data)
    return Path(f"/proc/self/fd/{handle}")


def _read(path: Path) -> bytes:
    """The content of a file of ours.

    Raises:
        OSError: it cannot be read, or others may have written it.
    """
    # A link is not followed, and a pipe that somebody put there does not make us wait.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no plain file")
        if found.st_uid != os.geteuid():
            raise PermissionError(f"it belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others may write to it, its mode is {stat.S_IMODE(found.st_mode):o}")
        return file.read()


def _ours(folder: Path, make: bool = False) -> Path:
    """``folder``, if need be made now, and closed to everyone else.

    Raises:
        OSError: it is not there and cannot be made, or belongs to others.
    """
    if make:
        _make(folder)
    found = os.stat(folder)
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    open_to_others = found.st_mode & _OTHERS_WRITE
    if open_to_others and found.st_mode & stat.S_ISVTX:  # such as /tmp, which must stay what it is
        raise PermissionError(f"{folder} is open to everybody")
    if open_to_others or found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, stat.S_IRWXU)
    return folder


def _make(folder: Path) -> None:
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process has just made it, or it is no folder
        os.mkdir(folder, stat.S_IRWXU)
        os.chmod(folder, stat.S_IRWXU)  # whatever the umask


def _folders() -> Iterator[Path]:
    """Where to look: what there is of the two places to keep things, if nobody else can write there."""
    with contextlib.suppress(OSError):
        yield _ours(cache_folder())
    if _temporary is not None and _temporary[0] == os.getpid():
        yield _temporary[1]


_temporary: tuple[int, Path] | None = None


def _temporary_folder() -> Path:
    """The private folder of this process; a child after a fork has its own."""
    global _temporary
    if _temporary is None or _temporary[0] != os.getpid():
        _temporary = (os.getpid(), Path(tempfile.mkdtemp(prefix="pagedopt-")))
        atexit.register(_remove, *_temporary)
    return _temporary[1]


def _remove(process: int, folder: Path) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["CachedFile", "cache_folder", "digest", "discard", "find", "in_memory", "keep", "seal", "unseal"]
