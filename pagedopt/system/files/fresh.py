"""Memory prepared elsewhere, to be put in the place of parts of a mapped file at once."""

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
    """Memory elsewhere, for parts of a state file that are to become ordinary memory, one behind the other.

    It is one mapping, whatever the number of parts: only then the system joins the parts again in their places.

    Args:
        stretches: each to be taken from its beginning on.

    Raises:
        OSError: the system gives less.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._left: dict[int, tuple[int, int]] = {}  # by where it goes in the file: address, bytes
        self._give_back = weakref.finalize(self, unmap_all, self._left)
        needed = total(stretches)
        with Uninterrupted():
            address = libc.map_anonymous(needed) if needed else 0
            for offset, nbytes in filled(stretches):
                self._left[offset] = (address, nbytes)
                address += nbytes

    def part(self, stretch: Stretch) -> ctypes.Array[ctypes.c_ubyte]:
        """What is to take the place of the next stretch, to be filled."""
        return (ctypes.c_ubyte * stretch[1]).from_address(self._left[stretch[0]][0])

    def put(self, stretch: Stretch, target: int) -> None:
        """Let it do so.

        Raises:
            OSError: the system refuses.  There may be nothing at ``target`` then.
        """
        offset, nbytes = stretch
        address, left = self._left.pop(offset)  # before it is somebody else's
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
        """Give back what was not taken."""
        self._give_back()


def unmap_all(parts: dict[int, tuple[int, int]]) -> None:
    """Give memory back: (address, bytes) of each part, which goes from the dictionary with it."""
    with Uninterrupted():
        while parts:
            libc.unmap(*parts.popitem()[1])


def total(stretches: Sequence[Stretch]) -> int:
    """Bytes of all of them."""
    return sum(map(_bytes, stretches))


def filled(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Those that are not empty."""
    return filter(_bytes, stretches)
