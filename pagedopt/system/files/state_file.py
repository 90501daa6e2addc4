"""A file without a name, mapped at one address, of which parts may be ordinary memory instead."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..state_lost import StateLost
from . import disk_file, libc
from .disk_file import DiskFile
from .fresh import Fresh, Stretch, filled, total, unmap_all
from .mounts import file_system

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


def state_folder() -> Path:
    """The folder for state files: what $PAGEDOPT_STATE_DIR names, else /var/tmp or the folder of temporary files.

    Raises:
        ValueError: no such folder can be written to, or it is in memory, where a file would save nothing.
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


class StateFile:
    """A mapped range of a file that goes with its last user, however the process ends: it has no name.

    Few files are opened (:mod:`.disk_file`): where there are many ranges, several have one.  All of it
    begins as a hole, which may be read; :meth:`reserve` or :meth:`bring_in` a part before writing to it.  After a fork
    parent and child see the same file, and only the parent may write (:meth:`check_owner`).  Every error says what to
    do: a MemoryError where there is no room, be it memory or disk, an OSError where a disk fails.

    Args:
        folder: on whose disk.
        nbytes: of the mapping, a multiple of the operating system's page.

    Attributes:
        memory: the whole range; it is there as long as anything that views it, with or without this object.
        address: where it begins.

    Raises:
        MemoryError: a file may not be so large.
        OSError: the folder takes no file.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self._owner = os.getpid()
        kind = file_system(folder)
        self._through_mapping = kind in _STACKED
        self._disk: DiskFile | None = None  # kept open, as the mapping keeps it
        with self._explained(nbytes):
            self._disk, self._begin = disk_file.take(folder, nbytes, _do_not_copy if kind in _COPYING else bool)
            self._file = self._disk.number
            try:
                self.address = libc.map_file(nbytes, self._file, self._begin)
            except BaseException:
                self._disk.give_back(self._begin)
                self._disk = None
                raise
        self.memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        mapping = {0: (self.address, nbytes)}
        self._unmap = weakref.finalize(self.memory, _give_back, mapping, self._disk, self._begin)
        self._unmap.atexit = False  # who still reads it at the end of the process may do so

    def close(self) -> None:
        """Give everything back at once.  Nothing may view the mapping."""
        self._unmap()
        self._disk = None

    def check_owner(self) -> None:
        """Refuse what only the process may do that made the file.

        Raises:
            RuntimeError: this process was forked from that one.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"optimizer state of process {self._owner} is in a file, which process {os.getpid()}, forked from it, "
                "shares: a step, a load or a change of budget here would change the state there. Make the optimizer "
                "in this process, or copy it here (copy.deepcopy) and use the copy"
            )

    def disk_bytes(self) -> int:
        """Bytes that the file takes on its disk."""
        assert self._disk is not None, "the file is closed"
        return self._disk.bytes_on_disk(self._begin, self.nbytes)

    def reserve(self, stretches: Sequence[Stretch]) -> None:
        """Take space on the disk, so that writing there later cannot fail for want of it.

        Raises:
            MemoryError, OSError: there is not enough; what was taken in this call is given back.
        """
        try:
            with self._explained(total(stretches)):
                for offset, nbytes in filled(stretches):
                    os.posix_fallocate(self._file, self._begin + offset, nbytes)
        except BaseException:
            self._punch(stretches)
            raise

    def fetch(self, stretches: Sequence[Stretch]) -> None:
        """Begin to read; who touches a byte that is not there yet waits for it."""
        with self._explained(total(stretches)):
            for offset, nbytes in filled(stretches):
                for begin in range(offset, offset + nbytes, _READ_AHEAD):
                    libc.read_ahead(self.address + begin, min(_READ_AHEAD, offset + nbytes - begin))

    def drop(self, stretches: Sequence[Stretch], rest: bool = False) -> None:
        """Write changes to the disk, wait, and take the pages out of this process and out of the page cache.

        Args:
            stretches: which pages; empty ones do not count.
            rest: take everything else out of the page cache, too, that nobody maps and that is on the disk.  The kernel
                keeps files in pieces larger than its pages, and a piece that is not all within what it is told to drop
                stays whole.  So what is beside the stretches, or a hole now, has to be named as well.

        Raises:
            MemoryError, OSError: writing failed.  The pages are in the page cache still, and nowhere else.
        """
        try:
            for offset, nbytes in stretches:
                if not nbytes:
                    continue
                # First: the kernel writes pages that nobody maps with less work.
                libc.let_go(self.address + offset, nbytes)
                if self._through_mapping:
                    libc.sync(self.address + offset, nbytes)
                else:
                    libc.write_out(self._file, self._begin + offset, nbytes)
                os.posix_fadvise(self._file, self._begin + offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._explain(error, total(stretches))
            raise
        if rest:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def fresh(self, stretches: Sequence[Stretch]) -> Fresh:
        """Memory for :meth:`bring_in`.

        Raises:
            MemoryError: the system gives no memory.
        """
        with self._explained(total(stretches)):
            return Fresh(stretches)

    def bring_in(self, stretches: Sequence[Stretch], fresh: Fresh, zeros: bool = False) -> None:
        """Make parts ordinary memory with the same bytes (``zeros``: with zeros).  The file keeps what it has.

        Raises:
            MemoryError: the system gives no memory.
            OSError: reading failed.  Nothing has changed in either case.
            StateLost: pages were changed in part, and could not be put back.
        """
        with self._explained(total(stretches)):
            self._put(stretches, fresh, zeros)

    def release(self, stretches: Sequence[Stretch]) -> None:
        """Give the disk space of parts back that are ordinary memory by now, and counted as such."""
        self._punch(stretches)

    def send_out(self, stretches: Sequence[Stretch], joined: Sequence[Stretch]) -> None:
        """Move parts that are ordinary memory to the disk, and show the file in their place.

        Args:
            joined: each of the parts with what follows it and is in the file already.  It is mapped anew in one, as a
                process has a limited number of mappings.

        Raises:
            MemoryError, OSError: there is no room, or writing failed.  Nothing has changed.
            StateLost: pages were changed in part, and could not be put back.
        """
        self.reserve(stretches)
        shown = 0
        try:
            with self._explained(total(stretches)):
                self._write(stretches)
                self._try_mappings(len(stretches))
                for offset, nbytes in joined:
                    shown += 1
                    libc.map_file_at(self.address + offset, nbytes, self._file, self._begin + offset)
        except BaseException:
            self._take_back(stretches[:shown])
            self._punch(stretches)
            raise

    def _write(self, stretches: Sequence[Stretch]) -> None:
        """Copy ordinary memory to the disk.  Not only into the page cache: a write that fails later would lose it."""
        with memoryview(self.memory) as view:
            for offset, nbytes in filled(stretches):
                done = 0
                while done < nbytes:
                    with view[offset + done : offset + nbytes] as part:
                        done += os.pwrite(self._file, part, self._begin + offset + done)
                if not self._through_mapping:
                    libc.write_out(self._file, self._begin + offset, nbytes)
        if self._through_mapping:
            os.fdatasync(self._file)
        for offset, nbytes in filled(stretches):
            os.posix_fadvise(self._file, self._begin + offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _put(self, stretches: Sequence[Stretch], fresh: Fresh, zeros: bool = False) -> None:
        """Let memory take the place of parts, all of them or none.  The file keeps what it has."""
        parts = list(filled(stretches))
        for stretch in parts:  # what may fail comes first, for all of them
            part = fresh.part(stretch)
            if zeros:
                ctypes.memset(part, 0, stretch[1])  # so that it is there from now on
            else:
                self._read(stretch[0], part)
        self._try_mappings(len(parts))
        begun: list[Stretch] = []
        try:
            for stretch in parts:
                begun.append(stretch)
                fresh.put(stretch, self.address + stretch[0])
        except BaseException:
            self._show(begun)
            raise

    def _show(self, stretches: Sequence[Stretch]) -> None:
        try:
            for offset, nbytes in stretches:
                libc.map_file_at(self.address + offset, nbytes, self._file, self._begin + offset)
        except OSError as error:
            raise self._lost(stretches, error) from error

    def _take_back(self, stretches: Sequence[Stretch]) -> None:
        """Bring parts of which the file has everything back into memory."""
        if not stretches:
            return
        try:
            with self.fresh(stretches) as fresh:
                self._put(stretches, fresh)
        except (OSError, MemoryError) as error:
            raise self._lost(stretches, error) from error

    def _try_mappings(self, count: int) -> None:
        """See that the system lets this process put ``count`` mappings amidst others, while a refusal does no harm.

        Each may cut another in three, and Linux moves none when fewer than six are left.
        """
        tried: list[int] = []
        try:
            for _ in range(2 * count + 7):
                tried.append(libc.map_file(libc.PAGE, self._file))  # the same part each time: these are never joined
        finally:
            for address in tried:
                libc.unmap(address, libc.PAGE)

    @staticmethod
    def _lost(stretches: Sequence[Stretch], error: Exception) -> StateLost:
        return StateLost(
            f"{total(stretches):,} bytes of optimizer state were neither moved nor left where they were ({error}); "
            "load a checkpoint"
        )

    @contextlib.contextmanager
    def _explained(self, nbytes: int) -> Iterator[None]:
        """Say what to do when there is no room on the disk or in memory."""
        try:
            yield
        except OSError as error:
            self._explain(error, nbytes)
            raise

    def _explain(self, error: OSError, nbytes: int) -> None:
        """
        Raises:
            MemoryError: there was no room for so many bytes, on the disk or in memory; with what to do.
        """
        if error.errno == errno.ENOMEM:
            raise MemoryError(
                f"the system gave no {nbytes:,} bytes of memory for optimizer state ({error.strerror}); free some "
                "or lower device_budget; if there is enough, this process has too many mappings, of which "
                "vm.max_map_count allows more"
            ) from error
        if error.errno in _NO_ROOM:
            free = shutil.disk_usage(self.folder).free
            raise MemoryError(
                f"the disk of {self.folder} gave no {nbytes:,} bytes for a state file ({os.strerror(error.errno)}; "
                f"{free:,} are free, quotas and limits aside); free some, or name a folder "
                f"on another disk with {FOLDER_VARIABLE}"
            ) from error

    def _read(self, offset: int, out: ctypes.Array[ctypes.c_ubyte]) -> None:
        done = 0
        with memoryview(out) as view:
            while done < view.nbytes:
                with view[done:] as rest:
                    count = os.preadv(self._file, [rest], self._begin + offset + done)
                if not count:
                    raise OSError(errno.EIO, f"the state file in {self.folder} ends early")
                done += count

    def _punch(self, stretches: Sequence[Stretch]) -> None:
        for offset, nbytes in filled(stretches):
            with contextlib.suppress(OSError):  # a file system without holes keeps the space
                libc.punch_hole(self._file, self._begin + offset, nbytes)


def _do_not_copy(file: int) -> None:
    fcntl.ioctl(file, _SET_FLAGS, struct.pack("l", _NO_COPY))


def _give_back(mapping: dict[int, tuple[int, int]], file: DiskFile, begin: int) -> None:
    unmap_all(mapping)
    file.give_back(begin)
