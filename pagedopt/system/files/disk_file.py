"""Open files without a name.  State files are ranges of a few such files, as descriptors are scarce."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from . import libc

#: The most files that are opened in a folder.  Each of the first state files has its own; later ones share them.
FILES = 16
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class DiskFile:
    """An open file without a name; ``number`` is its descriptor.  It is closed with its last user.

    A range that is given back leaves a hole on the disk.  Later ranges begin behind all others.
    """

    def __init__(self, folder: Path) -> None:
        self.number = _open_nameless(folder)
        self.close = weakref.finalize(self, os.close, self.number)
        self.close.atexit = False  # functions that run at exit may still use it
        self._owner = os.getpid()
        self._end = 0
        self._taken: dict[int, int] = {}  # bytes by begin

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges in use."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int:
        """Return the begin of a new range of zeros; after an OSError the file is as it was."""
        begin = self._end
        os.ftruncate(self.number, begin + nbytes)
        self._end = begin + nbytes
        self._taken[begin] = nbytes
        return begin

    def give_back(self, begin: int) -> None:
        """Free the disk space of a range that nobody maps.  A file system without holes keeps it until the file ends.

        Finalizers call this, perhaps in the middle of :meth:`take`, so it takes no lock.
        """
        nbytes = self._taken.pop(begin)
        if os.getpid() == self._owner:  # in a forked child: the parent still uses the range
            with contextlib.suppress(OSError):
                libc.punch_hole(self.number, begin, nbytes)

    def bytes_on_disk(self, begin: int) -> int:
        """Return the disk space of a range: the file's, divided among all ranges in use by their sizes."""
        return os.fstat(self.number).st_blocks * 512 * self._taken[begin] // self.nbytes


_lock = threading.Lock()
_files: dict[str, weakref.WeakSet[DiskFile]] = {}  # by folder; a file stays as long as its users


def take(folder: Path, nbytes: int, first: Callable[[int], object]) -> tuple[DiskFile, int]:
    """Return a file in ``folder`` and the begin of a range of zeros in it, which is the caller's until given back.

    Args:
        first: called with the descriptor of a new file before it has any byte.

    Raises:
        OSError: the folder takes no file, or none so large.
    """
    with _lock:
        files = _files.setdefault(os.fspath(folder), weakref.WeakSet())
        if len(there := list(files)) >= FILES:
            file = min(there, key=lambda each: each.nbytes)
            return file, file.take(nbytes)
        file = DiskFile(folder)
        try:
            first(file.number)
            begin = file.take(nbytes)
        except BaseException:
            file.close()
            raise
        files.add(file)
        return file, begin


def _open_nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    file, name = tempfile.mkstemp(prefix="pagedopt-", dir=folder)
    os.unlink(name)
    return file


def _after_fork() -> None:
    """Forget the files: what a child writes would be in its parent's.  Another thread may have held the lock."""
    global _lock, _files
    _lock, _files = threading.Lock(), {}


os.register_at_fork(after_in_child=_after_fork)
