"""Compiled kernels on disk, in a folder that nobody else can write to.

If there is no such folder, nothing is cached.  A file begins with a digest of its name and content, and is used only if
that is right and nobody else can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from .warn import warn_once

VARIABLE = "PAGEDOPT_CACHE_DIR"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CachedFile(NamedTuple):
    """A file of the cache and its content."""

    path: Path
    data: bytes


def cache_folder() -> Path:
    """Return the folder for compiled kernels: $PAGEDOPT_CACHE_DIR, else pagedopt in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        FileNotFoundError: none is set, and there is no home.
    """
    if own := os.environ.get(VARIABLE):
        return Path(own).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "pagedopt"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


def _digest(name: str, data: bytes) -> bytes:
    """Return a digest of a file's content and name, so that a file under another name counts as damaged."""
    return hashlib.sha256(name.encode() + b"\0" + data).hexdigest().encode()


def store(name: str, data: bytes) -> None:
    """Write a file for later processes; warn, the first time that this fails."""
    folder = None
    try:
        folder = cache_folder()
        _make(folder)
        write_atomically(_ours(folder) / name, _digest(name, data) + b"\n" + data)
    except OSError as error:
        problem = f"in {folder}: {error}" if folder else f"({error})"
        warn_once(
            "no place for kernels",
            f"compiled kernels cannot be kept {problem}; every process compiles its own. Set {VARIABLE} to a folder of "
            "yours that has room",
        )


def keeps() -> bool:
    """Return whether :func:`store` writes files for later processes, as far as that is known without writing."""
    try:
        _make(folder := cache_folder())
        return os.access(_ours(folder), os.W_OK)
    except OSError:
        return False


def find(name: str) -> CachedFile | None:
    """Return what :func:`store` wrote under ``name``, if it is there, whole, and nobody else can have written it."""
    try:
        path = _ours(cache_folder()) / name
    except OSError:
        return None
    try:
        mark, _, data = _read(path).partition(b"\n")
        if mark == _digest(name, data):
            return CachedFile(path, data)
        discard(path, "it is damaged")
    except FileNotFoundError:
        pass
    except OSError as error:
        discard(path, str(error))
    return None


def discard(path: Path, why: str) -> None:
    """Delete a file that cannot be used, so that it is compiled anew, and warn once."""
    with contextlib.suppress(OSError):
        path.unlink()
    warn_once("damaged kernels", f"{path} cannot be used ({why}); such files are deleted and compiled anew")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that only this user can read and that other processes see whole or not at all.

    Raises:
        OSError: it cannot be written; nothing is left of it then.
    """
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, 0o600)  # the umask may have taken the owner's bits
            file.write(data)
        os.replace(own, path)
    except BaseException:
        with contextlib.suppress(OSError):
            own.unlink()
        raise


def _read(path: Path) -> bytes:
    """Read a file of ours; OSError if that fails or if others may have written it."""
    # O_NOFOLLOW refuses links.  O_NONBLOCK: a pipe that somebody put there must not make us wait.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        if found.st_uid != os.geteuid():
            raise PermissionError(f"it belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others may write to it, its mode is {stat.S_IMODE(found.st_mode):o}")
        return file.read()


def _ours(folder: Path) -> Path:
    """Return ``folder`` after closing it to everyone else; OSError if it is missing, a link, or in reach of others."""
    found, parent = os.lstat(folder), os.stat(folder.parent)
    if stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{folder} is a symbolic link; name {os.path.realpath(folder)} in its place")
    if _may_be_replaced(parent):
        raise PermissionError(
            f"{folder.parent} has mode {stat.S_IMODE(parent.st_mode):o}, so others could replace {folder.name} in it; "
            f"close it to them: chmod go-w {folder.parent}"
        )
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    open_to_others = found.st_mode & _OTHERS_WRITE
    if open_to_others and found.st_mode & stat.S_ISVTX:  # a shared folder such as /tmp must stay as it is
        raise PermissionError(f"{folder} is open to everybody")
    if open_to_others or found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, stat.S_IRWXU)
    return folder


def _may_be_replaced(parent: os.stat_result) -> bool:
    """Return whether others may rename what lies in a folder.  A group with the user's number is the user's."""
    own_group = parent.st_gid == os.geteuid() != 0
    others = stat.S_IWOTH if own_group else _OTHERS_WRITE
    return bool(parent.st_mode & others) and not parent.st_mode & stat.S_ISVTX


def _make(folder: Path) -> None:
    """Make a folder and its parents, each for this user alone; os.makedirs() would follow the umask."""
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process has just made it, or it is no folder
        os.mkdir(folder, stat.S_IRWXU)
        os.chmod(folder, stat.S_IRWXU)
