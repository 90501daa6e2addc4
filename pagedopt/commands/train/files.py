"""The folder of a run: files are written all or nothing, links are not followed, and only one run may use it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError

LOCK = ".lock"
SUFFIX = ".unfinished"
LEFT_OVER = f".*.{'[0-9a-f]' * 16}{SUFFIX}"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from some network file systems
NO_FOLDER_SYNC = (errno.EINVAL, errno.EOPNOTSUPP)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block ends, and is removed if the block raises.

    If ``path`` is a link, the link is replaced. The umask applies to ``mode``.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other runs until the block or the process ends, and remove what killed runs left there.

    Raises:
        UsageError: another run has the lock, or the folder cannot be written to.
    """
    descriptor = _open_lock(folder)
    try:
        _lock(descriptor, folder)
        for path in folder.glob(LEFT_OVER):
            with contextlib.suppress(OSError):
                path.unlink()
        yield
    finally:
        os.close(descriptor)  # releases the lock. Its file stays: if it were deleted, two runs could lock two files


def _open_lock(folder: Path) -> int:
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"--out {folder}: {path} is a link, which is not followed; remove it") from error
        raise UsageError(f"--out {folder}: cannot be written to ({error.strerror}: {path})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"--out {folder}: {path} is not a regular file; remove it")
    return descriptor


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--out {folder}: another run is writing there, and two would damage each other's checkpoint. Wait for it "
            "or stop it, or name another folder with --out."
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UsageError(f"--out {folder}: cannot be locked ({error.strerror})") from error
        warnings.warn(
            f"--out {folder}: its file system has no locks ({error.strerror}); start no other run with it meanwhile",
            RuntimeWarning,
            stacklevel=2,
        )
