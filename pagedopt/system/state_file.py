"""Mapped files without a name, parts of which can be replaced by ordinary memory at the same addresses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import operator
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import libc
from .host import file_system
from .interrupts import Uninterrupted
from .warn import lost_in_move

# --- memory that is filled first and then replaces parts of a mapped file in one system call each ---------------------

#: (offset, bytes) of a part of the file.
Stretch = tuple[int, int]
_bytes = operator.itemgetter(1)


class Fresh:
    """Memory for parts of a state file that are to become ordinary memory.

    It is one mapping for all parts: otherwise Linux does not join them again at their targets, and mappings run out.

    Args:
        stretches: the parts; each is taken from its beginning on.

    Raises:
        OSError: the system gives less.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._left: dict[int, tuple[int, int]] = {}  # by offset in the file: address, bytes
        self._give_back = weakref.finalize(self, unmap_all, self._left)
        needed = total(stretches)
        with Uninterrupted():
            address = libc.map_anonymous(needed) if needed else 0
            for offset, nbytes in filled(stretches):
                self._left[offset] = (address, nbytes)
                address += nbytes

    def part(self, stretch: Stretch) -> ctypes.Array[ctypes.c_ubyte]:
        """Return the memory for the next stretch, to be filled."""
        return (ctypes.c_ubyte * stretch[1]).from_address(self._left[stretch[0]][0])

    def put(self, stretch: Stretch, target: int) -> None:
        """Move the memory of a stretch to ``target``; OSError if refused, and ``target`` may be unmapped then."""
        offset, nbytes = stretch
        address, left = self._left.pop(offset)  # first: from here on this object must not unmap it
        if left > nbytes:
            self._left[offset + nbytes] = (address + nbytes, left - nbytes)
        try:
            libc.put(address, nbytes, target)
        except OSError:
            libc.unmap(address, nbytes)
            raise

    def __enter__(self) -> Fresh:
        return self

    def __exit__(self, *_: object) -> None:
        """Unmap what was not used."""
        self._give_back()


def unmap_all(parts: dict[int, tuple[int, int]]) -> None:
    """Unmap the (address, bytes) of each part, and remove it from the dict."""
    with Uninterrupted():
        while parts:
            libc.unmap(*parts.popitem()[1])


def total(stretches: Sequence[Stretch]) -> int:
    """Return the bytes of all stretches."""
    return sum(map(_bytes, stretches))


def filled(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Return the stretches that are not empty."""
    return filter(_bytes, stretches)


def joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Return the stretches that are not empty; those that follow each other without a gap are one."""
    found: list[Stretch] = []
    for offset, nbytes in filled(stretches):
        if found and sum(found[-1]) == offset:
            offset, before = found.pop()
            nbytes += before
        found.append((offset, nbytes))
    return found


# --- the mapped range -------------------------------------------------------------------------------------------------

#: The variable that names the folder of state files.
FOLDER_VARIABLE = "PAGEDOPT_STATE_DIR"
#: File systems whose files are in memory.
_IN_RAM = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
#: File systems on which sync_file_range() has no effect, as a mapping belongs to a file of the layer below.
_STACKED = ("overlay",)
#: Copy-on-write file systems: a changed page goes to another block, so reserving space is useless unless that is off.
_COPYING = ("btrfs",)
_SET_FLAGS, _NO_COPY = 0x40086602, 0x00800000  # FS_IOC_SETFLAGS, FS_NOCOW_FL of linux/fs.h
#: The kernel may cut a request to read ahead to this, its default.
_READ_AHEAD = 128 << 10
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def state_folder() -> Path:
    """Return the folder for state files: $PAGEDOPT_STATE_DIR, else /var/tmp or the folder for temporary files.

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
    """Return why ``folder`` cannot hold a state file; "" if it can."""
    if not os.path.isdir(folder):
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written to"
    fs_type = file_system(folder)
    return f"is in memory ({fs_type})" if fs_type in _IN_RAM else ""


def _open_nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    file, name = tempfile.mkstemp(prefix="pagedopt-", dir=folder)
    os.unlink(name)
    return file


class StateFile:
    """A mapped file without a name: its disk space is freed however the process ends.

    All of it begins as a hole, which may be read; call :meth:`reserve` or :meth:`bring_in` for a part before writing
    to it.  After a fork parent and child see the same file, and only the parent may write (:meth:`check_owner`).
    Lack of memory or disk space is a MemoryError, a failing disk an OSError; each says what to do.

    Args:
        folder: a folder on the disk to use.
        nbytes: of the mapping, a multiple of the operating system's page.

    Attributes:
        memory: the whole range; it is mapped as long as anything views it, with or without this object.
        address: where it begins.

    Raises:
        MemoryError: a file may not be so large.
        OSError: the folder takes no file.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self._owner = os.getpid()
        fs_type = file_system(folder)
        self._through_mapping = fs_type in _STACKED
        with self._explained(nbytes):
            self._file = _open_nameless(folder)
            try:
                if fs_type in _COPYING:  # while it has no byte
                    fcntl.ioctl(self._file, _SET_FLAGS, struct.pack("l", _NO_COPY))
                os.ftruncate(self._file, nbytes)
                self.address = libc.map_file(nbytes, self._file)
            except BaseException:
                os.close(self._file)
                raise
        self.memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        #: Unmaps the file and frees its space now.  Nothing may view the mapping.
        self.close = weakref.finalize(self.memory, _end, {0: (self.address, nbytes)}, self._file)
        self.close.atexit = False  # views may be read, and functions that run at exit may write, until the process ends

    def check_owner(self) -> None:
        """Refuse to go on in another process than the one that made the file.

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
        """Return the bytes that the file takes on the disk."""
        return os.fstat(self._file).st_blocks * 512

    def reserve(self, stretches: Sequence[Stretch]) -> None:
        """Allocate disk space, so that writing there later cannot fail for lack of it.

        Raises:
            MemoryError, OSError: there is not enough; all of the stretches are holes then.
        """
        try:
            with self._explained(total(stretches)):
                for offset, nbytes in filled(stretches):
                    os.posix_fallocate(self._file, offset, nbytes)
        except BaseException:
            self.release(stretches)
            raise

    def fetch(self, stretches: Sequence[Stretch]) -> None:
        """Begin to read.  An access to a byte that is not there yet waits for it."""
        with self._explained(total(stretches)):
            for offset, nbytes in joined(stretches):
                for begin in range(offset, offset + nbytes, _READ_AHEAD):
                    libc.read_ahead(self.address + begin, min(_READ_AHEAD, offset + nbytes - begin))

    def drop(self, stretches: Sequence[Stretch], rest: bool = False) -> None:
        """Write changes to the disk, wait, and remove the pages from this process and from the page cache.

        Args:
            stretches: which pages; empty stretches are skipped.
            rest: also drop all other pages of the file that nobody maps and that are on the disk.  The kernel caches a
                file in folios larger than a page and drops only those that lie wholly in the range it is given, so
                neighbours of the stretches, and holes, must be named as well.

        Raises:
            MemoryError, OSError: writing failed.  The pages are in the page cache still, and nowhere else.
        """
        try:
            for offset, nbytes in joined(stretches):
                # Unmapped first: the kernel has less work to write pages that nobody maps.
                libc.let_go(self.address + offset, nbytes)
                if self._through_mapping:
                    libc.sync(self.address + offset, nbytes)
                else:
                    libc.write_out(self._file, offset, nbytes)
                os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._explain(error, total(stretches))
            raise
        if rest:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def fresh(self, stretches: Sequence[Stretch]) -> Fresh:
        """Return memory for :meth:`bring_in`; MemoryError if the system has none."""
        with self._explained(total(stretches)):
            return Fresh(stretches)

    def bring_in(self, stretches: Sequence[Stretch], fresh: Fresh, zeros: bool = False) -> None:
        """Replace parts of the file by ordinary memory with the same bytes, all or none.  The file is not changed.

        Args:
            zeros: fill the memory with zeros instead.

        Raises:
            MemoryError: the system gives no memory.
            OSError: reading failed.  Nothing has changed in either case.
            StateLost: some pages were replaced and could not be put back.
        """
        with self._explained(total(stretches)):
            parts = list(filled(stretches))
            for stretch in parts:  # first, for all parts, what may fail
                part = fresh.part(stretch)
                if zeros:
                    ctypes.memset(part, 0, stretch[1])  # touches every page, so that it has memory from now on
                else:
                    self._read(stretch[0], part)
            self._try_mappings(len(parts))
            begun: list[Stretch] = []
            try:
                for stretch in parts:
                    begun.append(stretch)
                    fresh.put(stretch, self.address + stretch[0])
            except BaseException:
                try:
                    for stretch in begun:
                        self._show(stretch)
                except OSError as error:
                    raise lost_in_move(total(begun), error) from error
                raise

    def release(self, stretches: Sequence[Stretch]) -> None:
        """Free the disk space of parts that are ordinary memory; call it once the arena counts them as resident."""
        for offset, nbytes in filled(stretches):
            with contextlib.suppress(OSError):  # a file system without holes keeps the space
                libc.punch_hole(self._file, offset, nbytes)

    def send_out(self, stretches: Sequence[Stretch], joined: Sequence[Stretch]) -> None:
        """Write parts that are ordinary memory to the disk, and map the file in their place.

        Args:
            joined: the ranges to map: each part with the mapped parts of the file that follow it, as one mapping,
                because the number of mappings of a process is limited.

        Raises:
            MemoryError, OSError: there is no room, or writing failed.  Nothing has changed.
            StateLost: some pages were replaced and could not be put back.
        """
        self.reserve(stretches)
        shown = 0
        try:
            with self._explained(total(stretches)):
                self._write(stretches)
                self._try_mappings(len(stretches))
                for stretch in joined:
                    shown += 1
                    self._show(stretch)
        except BaseException:
            self._take_back(stretches[:shown])
            self.release(stretches)
            raise

    def _write(self, stretches: Sequence[Stretch]) -> None:
        """Copy ordinary memory to the disk, not only to the page cache, whose write-back may still fail."""
        with memoryview(self.memory) as view:
            for offset, nbytes in filled(stretches):
                done = 0
                while done < nbytes:
                    with view[offset + done : offset + nbytes] as part:
                        done += os.pwrite(self._file, part, offset + done)
                if not self._through_mapping:
                    libc.write_out(self._file, offset, nbytes)
        if self._through_mapping:
            os.fdatasync(self._file)
        for offset, nbytes in filled(stretches):
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _show(self, stretch: Stretch) -> None:
        """Map the file in place of ordinary memory."""
        libc.map_file_at(self.address + stretch[0], stretch[1], self._file, stretch[0])

    def _take_back(self, stretches: Sequence[Stretch]) -> None:
        """Bring parts that the file holds completely back into memory."""
        if not stretches:
            return
        try:
            with self.fresh(stretches) as fresh:
                self.bring_in(stretches, fresh)
        except (OSError, MemoryError) as error:
            raise lost_in_move(total(stretches), error) from error

    def _try_mappings(self, count: int) -> None:
        """Check that the system allows ``count`` more mappings, while a refusal does no harm.

        Each may split another one in three, and Linux moves no mapping if fewer than six are left.
        """
        tried: list[int] = []
        try:
            for _ in range(2 * count + 7):
                tried.append(libc.map_file(libc.PAGE, self._file))  # always the same part, so that none are joined
        finally:
            for address in tried:
                libc.unmap(address, libc.PAGE)

    @contextlib.contextmanager
    def _explained(self, nbytes: int) -> Iterator[None]:
        """Say what to do if the disk or the memory is full."""
        try:
            yield
        except OSError as error:
            self._explain(error, nbytes)
            raise

    def _explain(self, error: OSError, nbytes: int) -> None:
        """Raise an error that says what to do if ``error`` is a lack of disk space, memory or files; else return."""
        if error.errno == errno.ENOMEM:
            raise MemoryError(
                f"the system gave no {nbytes:,} bytes of memory for optimizer state ({error.strerror}); free some "
                "or lower device_budget; if there is enough, this process has too many mappings, of which "
                "vm.max_map_count allows more"
            ) from error
        if error.errno == errno.EMFILE:
            raise OSError(
                error.errno,
                f"{error.strerror}: an optimizer with state in a file has one open file or more; raise the limit "
                "(ulimit -n), or make one optimizer of many: optimizer.attach(model, overlap='backward') updates each "
                "parameter as its gradient comes",
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
                    count = os.preadv(self._file, [rest], offset + done)
                if not count:
                    raise OSError(errno.EIO, f"the state file in {self.folder} ends early")
                done += count


def _end(mapping: dict[int, tuple[int, int]], file: int) -> None:
    with Uninterrupted():
        unmap_all(mapping)
        os.close(file)
