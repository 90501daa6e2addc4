"""A file without a name, mapped at one address, of which parts may be ordinary memory instead."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import libc

#: The variable that names the folder of state files.
FOLDER_VARIABLE = "PAGEDOPT_STATE_DIR"
#: File systems whose files are in memory.
_IN_RAM = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
#: File systems that pass a mapping on to another file but not the call that writes a range out.
_STACKED = ("overlay",)
#: File systems that write a changed page to another place unless told not to, so that reserved space would not do.
_COPYING = ("btrfs",)
_SET_FLAGS, _NO_COPY = 0x40086602, 0x00800000  # FS_IOC_SETFLAGS, FS_NOCOW_FL of linux/fs.h
#: A request to read ahead may be cut to this, the kernel's default.
_READ_AHEAD = 128 << 10
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)

#: (offset, bytes) of a part of the file.
Stretch = tuple[int, int]


def state_folder() -> Path:
    """The folder for state files: what $PAGEDOPT_STATE_DIR names, else /var/tmp or the folder of temporary files.

    Raises:
        ValueError: it cannot be written to, or is in memory and so could not save any.
    """
    if named := os.environ.get(FOLDER_VARIABLE):
        if reason := _unfit(named):
            raise ValueError(f"{FOLDER_VARIABLE} is {named!r}, which {reason}; name a folder on a disk")
        return Path(named)
    reasons = []
    for folder in dict.fromkeys(("/var/tmp", tempfile.gettempdir())):
        if not (reason := _unfit(folder)):
            return Path(folder)
        reasons.append(f"{folder} {reason}")
    raise ValueError(f"no folder for a state file: {', '.join(reasons)}; name one on a disk with {FOLDER_VARIABLE}")


def _unfit(folder: str) -> str:
    """Why no state file can be in ``folder``; "" if it can."""
    if not os.path.isdir(folder):
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written to"
    kind = file_system(folder)
    return f"is in memory ({kind})" if kind in _IN_RAM else ""


def file_system(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """The type of the file system that ``path`` is on, e.g. ``ext4``; "" if unknown.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``; None: read it.
    """
    if mountinfo is None:
        with contextlib.suppress(OSError):
            mountinfo = Path("/proc/self/mountinfo").read_text()
    real = Path(os.path.realpath(path))
    best, kind = -1, ""
    for line in (mountinfo or "").splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4]))  # a space is \040
        if real.is_relative_to(point) and len(point.parts) >= best:  # of several on one point the last is seen
            best, kind = len(point.parts), right.split()[0]
    return kind


class StateFile:
    """A mapped file that goes with its last user, however the process ends: it has no name.

    All of it begins as a hole, which may be read; :meth:`reserve` or :meth:`bring_in` a part before writing to it.
    After a fork parent and child see the same file.

    Args:
        folder: on whose disk.
        nbytes: of the mapping, a multiple of the operating system's page.

    Attributes:
        mapping: the whole range; it lives as long as anything that views it, with or without this object.
        address: where it begins.

    Raises:
        MemoryError: a file may not be so large.
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self._file = _open_nameless(folder)
        self._close = weakref.finalize(self, os.close, self._file)
        kind = file_system(folder)
        self._through_mapping = kind in _STACKED
        try:
            if kind in _COPYING:
                fcntl.ioctl(self._file, _SET_FLAGS, struct.pack("l", _NO_COPY))
            with self._explained(nbytes):
                os.ftruncate(self._file, nbytes)
            self.mapping = mmap.mmap(self._file, nbytes)
        except BaseException:
            self._close()
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    def close(self) -> None:
        """Give everything back at once.  Nothing may view the mapping."""
        self.mapping.close()
        self._close()

    def disk_bytes(self) -> int:
        """Bytes that the file takes on its disk."""
        return os.fstat(self._file).st_blocks * 512

    def reserve(self, stretches: Sequence[Stretch]) -> None:
        """Take space on the disk, so that writing there later cannot fail for want of it.

        Raises:
            MemoryError: there is not enough; what was taken in this call is given back.
        """
        try:
            with self._explained(sum(n for _, n in stretches)):
                for offset, nbytes in _filled(stretches):
                    os.posix_fallocate(self._file, offset, nbytes)
        except BaseException:
            self._punch(stretches)
            raise

    def fetch(self, stretches: Sequence[Stretch]) -> None:
        """Begin to read; who touches a byte that is not there yet waits for it."""
        for offset, nbytes in _filled(stretches):
            for begin in range(offset, offset + nbytes, _READ_AHEAD):
                libc.read_ahead(self.address + begin, min(_READ_AHEAD, offset + nbytes - begin))

    def drop(self, stretches: Sequence[Stretch]) -> None:
        """Write changes to the disk, wait, and take the pages out of this process and out of the page cache.

        Raises:
            OSError: writing failed.  The pages are in the page cache still, and nowhere else.
        """
        for offset, nbytes in _filled(stretches):
            libc.let_go(self.address + offset, nbytes)  # first: the kernel writes pages that nobody maps with less work
            if self._through_mapping:
                libc.sync(self.address + offset, nbytes)
            else:
                libc.write_out(self._file, offset, nbytes)
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def bring_in(self, stretches: Sequence[Stretch], zeros: bool = False) -> None:
        """Make parts ordinary memory with the same bytes (``zeros``: with zeros), and give their disk space back.

        Raises:
            MemoryError: there is no memory.
            OSError: reading failed.  Nothing has changed in either case.
        """
        contents: list[bytearray] = []
        tried: list[tuple[int, int]] = []
        try:
            for offset, nbytes in _filled(stretches):
                contents.append(bytearray() if zeros else self._read(offset, nbytes))
                # Mapped elsewhere first, to see whether the system gives as much: in its place that would be too late.
                tried.append((libc.map_anonymous(nbytes), nbytes))
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"the system gave no {sum(n for _, n in stretches):,} bytes of memory") from error
            raise
        finally:
            for address, nbytes in tried:
                libc.unmap(address, nbytes)
        for (offset, nbytes), content in zip(_filled(stretches), contents, strict=True):
            libc.map_anonymous(nbytes, self.address + offset)
            if zeros:
                ctypes.memset(self.address + offset, 0, nbytes)  # so that it is there from now on
            else:
                self.mapping[offset : offset + nbytes] = content
        self._punch(stretches)

    def copy_out(self, stretches: Sequence[Stretch]) -> None:
        """Copy parts that are ordinary memory into the file, for :meth:`map_out` to follow.

        Raises:
            MemoryError, OSError: see :meth:`reserve`, or writing failed; nothing has changed.
        """
        self.reserve(stretches)
        try:
            for offset, nbytes in _filled(stretches):
                done = 0
                while done < nbytes:
                    with memoryview(self.mapping) as view, view[offset + done : offset + nbytes] as part:
                        done += os.pwrite(self._file, part, offset + done)
        except BaseException:
            self._punch(stretches)
            raise

    def map_out(self, stretches: Sequence[Stretch]) -> None:
        """Show the file's bytes where ordinary memory was.  Parts that already do may be among these.

        Give all that are adjacent in one: a process has a limited number of mappings.
        """
        for offset, nbytes in _filled(stretches):
            libc.map_file_at(self.address + offset, nbytes, self._file, offset)

    @contextlib.contextmanager
    def _explained(self, nbytes: int) -> Iterator[None]:
        """Say what to do when there is no room on the disk."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            found = os.statvfs(self.folder)
            raise MemoryError(
                f"the disk of {self.folder} gave no {nbytes:,} bytes for a state file ({os.strerror(error.errno)}; "
                f"{found.f_bavail * found.f_frsize:,} are free, quotas and limits aside); free some, or name a folder "
                f"on another disk with {FOLDER_VARIABLE}"
            ) from error

    def _read(self, offset: int, nbytes: int) -> bytearray:
        out = bytearray(nbytes)
        done = 0
        with memoryview(out) as view:
            while done < nbytes:
                count = os.preadv(self._file, [view[done:]], offset + done)
                if not count:
                    raise OSError(errno.EIO, f"the state file in {self.folder} ends early")
                done += count
        return out

    def _punch(self, stretches: Sequence[Stretch]) -> None:
        for offset, nbytes in _filled(stretches):
            with contextlib.suppress(OSError):  # a file system without holes keeps the space
                libc.punch_hole(self._file, offset, nbytes)


def _filled(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    return (stretch for stretch in stretches if stretch[1])


def _open_nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    file, name = tempfile.mkstemp(prefix="pagedopt-", dir=folder)
    os.unlink(name)
    return file
