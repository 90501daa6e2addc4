"""Open files without a name, a few per folder: state files have ranges of them, as descriptors are scarce."""

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

#: So many files are opened in a folder, one for each state file; later ones share them.
FILES = 16
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
#: FS_IOC_FIEMAP of linux/fiemap.h, what it takes and what it fills in of each extent; the last one has a flag.
_EXTENTS, _ASKED, _EXTENT, _LAST, _AT_ONCE = 0xC020660B, struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL"), 1, 64


class DiskFile:
    """An open file without a name, closed with its last user.

    Args:
        folder: where.

    Attributes:
        number: the descriptor.

    Raises:
        OSError: the folder takes no file.
    """

    def __init__(self, folder: Path) -> None:
        self.number = _open_nameless(folder)
        self.close = weakref.finalize(self, os.close, self.number)
        self._owner = os.getpid()
        self._end = 0
        self._taken: dict[int, int] = {}  # bytes by where they begin
        self._holes = Holes()

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges that are somebody's."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int:
        """Where a range of zeros begins that is nobody else's.

        Raises:
            OSError: no file may be so large; the file is as it was.
        """
        found = self._holes.take(nbytes)
        if found is None:
            os.ftruncate(self.number, self._end + nbytes)
            found, self._end = self._end, self._end + nbytes
        self._taken[found] = nbytes
        return found

    def give_back(self, begin: int) -> None:
        """Free a range that nobody maps any more; where the file system has no holes, its bytes are not taken again.

        Called whenever the last user of a range goes, be it in the middle of :meth:`take`, so it waits for no lock.
        """
        nbytes = self._taken.pop(begin)
        if os.getpid() != self._owner:  # a fork, whose parent has the range still
            return
        with contextlib.suppress(OSError):
            libc.punch_hole(self.number, begin, nbytes)
            self._holes.add(begin, nbytes)

    def bytes_on_disk(self, begin: int, nbytes: int) -> int:
        """Bytes that a range takes on the disk; its share of the file where the file system does not tell."""
        if nbytes == self._end:
            return os.fstat(self.number).st_blocks * 512
        try:
            return sum(min(end, begin + nbytes) - max(start, begin) for start, end in self._extents(begin, nbytes))
        except OSError:
            return os.fstat(self.number).st_blocks * 512 * nbytes // self.nbytes

    def _extents(self, begin: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(begin, end) of every stretch of the file in a range that has space on the disk."""
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


class _Files:
    """The files of this process, by folder; each is there as long as its users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, weakref.WeakSet[DiskFile]] = {}

    def take(self, folder: Path, nbytes: int, first: Callable[[int], object]) -> tuple[DiskFile, int]:
        with self._lock:
            files = self._of.setdefault(os.fspath(folder), weakref.WeakSet())
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


_files = _Files()


def take(folder: Path, nbytes: int, first: Callable[[int], object]) -> tuple[DiskFile, int]:
    """A file in ``folder``, and where in it a range of zeros begins that is the caller's until it gives it back.

    Args:
        first: called with the descriptor of a file that has just been opened and has no byte yet.

    Raises:
        OSError: the folder takes no file, or none so large.
    """
    return _files.take(folder, nbytes, first)


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
    """What a child writes would be in its parent's files; it makes its own."""
    global _files
    _files = _Files()


os.register_at_fork(after_in_child=_after_fork)
