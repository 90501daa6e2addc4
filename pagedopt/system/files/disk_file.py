"""Open files without a name.  State files are ranges of a few such files, as descriptors are scarce."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from . import libc
from .holes import Holes

#: The most files that are opened in a folder.  Each of the first state files has its own; later ones share them.
FILES = 16
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
#: FS_IOC_FIEMAP of linux/fiemap.h: the struct it takes, the struct of an extent, and the flag of the last extent.
_EXTENTS, _ASKED, _EXTENT, _LAST, _AT_ONCE = 0xC020660B, struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL"), 1, 64


class DiskFile:
    """An open file without a name; ``number`` is its descriptor.  It is closed with its last user."""

    def __init__(self, folder: Path) -> None:
        self.number = _open_nameless(folder)
        self.close = weakref.finalize(self, os.close, self.number)
        self._owner = os.getpid()
        self._end = 0
        self._taken: dict[int, int] = {}  # bytes by begin
        self._holes = Holes()

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges in use."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int:
        """Return the begin of an unused range of zeros; after an OSError the file is as it was."""
        found = self._holes.take(nbytes)
        if found is None:
            os.ftruncate(self.number, self._end + nbytes)
            found, self._end = self._end, self._end + nbytes
        self._taken[found] = nbytes
        return found

    def give_back(self, begin: int) -> None:
        """Free a range that nobody maps.  On a file system without holes it is not used again, as it is not zero.

        Finalizers call this, perhaps in the middle of :meth:`take`, so it takes no lock.
        """
        nbytes = self._taken.pop(begin)
        if os.getpid() != self._owner:  # in a forked child: the parent still uses the range
            return
        with contextlib.suppress(OSError):
            libc.punch_hole(self.number, begin, nbytes)
            self._holes.add(begin, nbytes)

    def bytes_on_disk(self, begin: int, nbytes: int) -> int:
        """Return the disk space of a range; if the file system lists no extents, its share of the file's."""
        if nbytes == self._end:
            return os.fstat(self.number).st_blocks * 512
        try:
            return sum(min(end, begin + nbytes) - max(start, begin) for start, end in self._extents(begin, nbytes))
        except OSError:
            return os.fstat(self.number).st_blocks * 512 * nbytes // self.nbytes

    def _extents(self, begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of every part of the file that has disk space in a range."""
        at, end = begin, begin + nbytes
        while at < end:
            answer = bytearray(_ASKED.size + _AT_ONCE * _EXTENT.size)
            _ASKED.pack_into(answer, 0, at, end - at, 0, 0, _AT_ONCE, 0)
            fcntl.ioctl(self.number, _EXTENTS, answer)
            count = _ASKED.unpack_from(answer)[3]
            for i in range(count):
                start, _, size, _, _, flags, *_ = _EXTENT.unpack_from(answer, _ASKED.size + i * _EXTENT.size)
                yield start, start + size
                at = start + size
                if flags & _LAST:
                    return
            if count < _AT_ONCE:
                return


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
