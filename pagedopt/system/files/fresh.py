"""Anonymous memory that is filled first and then replaces parts of a mapped file in one system call each."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Iterator, Sequence

from ..interrupts import Uninterrupted
from . import libc

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
