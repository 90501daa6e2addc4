"""Calls of the C library that Python lacks, or makes while it holds the interpreter lock (GIL)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_INT, _SIZE, _POINTER, _OFFSET = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
#: Types of the result and the arguments.  Addresses are returned as signed numbers, so that every failure is -1.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mmap": (ctypes.c_ssize_t, _POINTER, _SIZE, _INT, _INT, _INT, _OFFSET),
    "munmap": (_INT, _POINTER, _SIZE),
    "mremap": (ctypes.c_ssize_t, _POINTER, _SIZE, _SIZE, _INT, _POINTER),
    "madvise": (_INT, _POINTER, _SIZE, _INT),
    "mincore": (_INT, _POINTER, _SIZE, _POINTER),
    "msync": (_INT, _POINTER, _SIZE, _INT),
    "sync_file_range": (_INT, _INT, _OFFSET, _OFFSET, ctypes.c_uint),
    "fallocate": (_INT, _INT, _INT, _OFFSET, _OFFSET),
    "uselocale": (_POINTER, _POINTER),
    "sem_init": (_INT, _POINTER, _INT, ctypes.c_uint),
    "sem_getvalue": (_INT, _POINTER, _POINTER),
    "sem_post": (_INT, _POINTER),
}
_PROT_READ_WRITE = 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_WILLNEED, _MADV_DONTNEED = 3, 4
_MS_SYNC = 4
_SYNC_WAIT_BEFORE_WRITE_WAIT_AFTER = 1 | 2 | 4
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

#: Bytes of a page of the operating system.
PAGE = os.sysconf("SC_PAGESIZE")


@functools.cache
def function(name: str) -> Any:
    """Return a function of :data:`_SIGNATURES`, as ctypes calls it."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name)
    found.restype, *found.argtypes = _SIGNATURES[name]
    return found


def call(name: str, *arguments: int | None) -> int:
    """Return the result of a call, repeated if a signal interrupts it; OSError with its name if it fails."""
    while True:
        result: int = function(name)(*arguments)
        if result != -1:
            return result
        _raise_unless_interrupted(name)


def _raise_unless_interrupted(name: str) -> None:
    if (code := ctypes.get_errno()) != errno.EINTR:
        raise OSError(code, f"{name}: {os.strerror(code)}")


def map_anonymous(nbytes: int) -> int:
    """Return the address of new private memory."""
    return call("mmap", None, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)


def map_file(nbytes: int, file: int) -> int:
    """Map the begin of an open file and return its address."""
    return call("mmap", None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, file, 0)


def map_file_at(address: int, nbytes: int, file: int, offset: int) -> None:
    """Map a part of an open file over what is mapped at ``address``."""
    call("mmap", address, nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, file, offset)


def put(source: int, nbytes: int, target: int) -> None:
    """Move memory over what is mapped at ``target``.  No thread sees a state in between.

    If it fails, the memory is where it was, but ``target`` may be unmapped.
    """
    call("mremap", source, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)


def unmap(address: int, nbytes: int) -> None:
    """Unmap memory."""
    call("munmap", address, nbytes)


def read_ahead(address: int, nbytes: int) -> None:
    """Begin to read a mapped part of a file.  The kernel may read no more than the first 128 KiB."""
    call("madvise", address, nbytes, _MADV_WILLNEED)


# Steps over files call the next two for every page, so they have the loop of call() written out.


def let_go(address: int, nbytes: int) -> None:
    """Remove mapped pages of a file from this process; the page cache still has them, changes included."""
    while function("madvise")(address, nbytes, _MADV_DONTNEED) == -1:
        _raise_unless_interrupted("madvise")


def write_out(file: int, offset: int, nbytes: int) -> None:
    """Write changed pages to their disk blocks and wait, without journal and without flushing the disk's own cache."""
    while function("sync_file_range")(file, offset, nbytes, _SYNC_WAIT_BEFORE_WRITE_WAIT_AFTER) == -1:
        _raise_unless_interrupted("sync_file_range")


def sync(address: int, nbytes: int) -> None:
    """Write changed pages of a mapped file to the disk and wait until they would survive a loss of power."""
    call("msync", address, nbytes, _MS_SYNC)


def punch_hole(file: int, offset: int, nbytes: int) -> None:
    """Give the disk space of a part of a file back; the part then reads as zeros."""
    call("fallocate", file, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


def in_memory(address: int, nbytes: int) -> npt.NDArray[np.bool_]:
    """Return for each page of a range of whole pages whether it is in memory (for a file: in the page cache)."""
    out = np.empty(nbytes // PAGE, np.uint8)
    call("mincore", address, nbytes, out.ctypes.data)
    return (out & 1).astype(np.bool_)


@contextlib.contextmanager
def same_locale() -> Iterator[None]:
    """Restore this thread's locale, which decides the encoding of ``open()``, at the end of the block."""
    use = function("uselocale")
    before = use(None)
    try:
        yield
    finally:
        use(before)
