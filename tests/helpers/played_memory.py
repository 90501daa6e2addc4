"""The memory of a played card: one region of this process, what of it is in use, and ranges of it."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from typing import Any

import numpy as np
from played_order import Range

REGION = 1 << 30
_MAP_NORESERVE = 0x4000
#: What memory is full of that nobody has written, or that was given back: as a float it is no number.
NOTHING = 0xFF


class Memory:
    """The region: what of it is in use, and its bytes."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.region = mmap.mmap(-1, REGION, flags)  # it stays while tensors view it
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.region))
        self._next, self._used, self._sizes = self.base, list[int](), dict[int, int]()
        self.faults: list[str] = []

    def knows(self, address: int) -> bool:
        """Whether an address is the card's."""
        return self.base <= address < self.base + REGION

    def reserve(self, nbytes: int, align: int = 512) -> int:
        """Return an address that was never used."""
        address = -(-self._next // align) * align
        self._next = address + nbytes
        assert self._next <= self.base + REGION, "the played card is full"
        return address

    def use(self, address: int, nbytes: int, fill: int | None = NOTHING) -> int:
        """Let memory be used, full of one byte."""
        bisect.insort(self._used, address)
        self._sizes[address] = nbytes
        if fill is not None:
            ctypes.memset(address, fill, nbytes)
        return address

    def take(self, nbytes: int) -> int:
        """Return the address of new memory."""
        return self.use(self.reserve(max(1, nbytes)), nbytes)

    def drop(self, address: int) -> Range:
        """Let memory be used no more; return what it was."""
        self._used.remove(address)
        return address, address + self._sizes.pop(address)

    def size(self, address: int) -> int:
        """Return the bytes of memory in use that begins at an address."""
        return self._sizes[address]

    def check(self, what: str, *ranges: Range) -> None:
        """Note who touches memory that nobody has allocated, or that was freed."""
        for first, end in ranges:
            at = first
            while at < end and (i := bisect.bisect(self._used, at)):
                until = self._used[i - 1] + self._sizes[self._used[i - 1]]
                if until <= at:
                    break
                at = until
            if at < end:
                self.faults.append(f"{what} touches {end - at:,} bytes that are not allocated")

    def at(self, address: int, nbytes: int) -> Any:
        """Return bytes; they keep the region, and nothing in it."""
        raw: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        raw.region = self.region
        return raw


def merged(touched: np.ndarray) -> list[Range]:
    """Return (n, 2) addresses and sizes as ranges, in order, those that overlap or meet as one."""
    if not len(touched):
        return []
    touched = touched[np.argsort(touched[:, 0], kind="stable")]
    first, end = touched[:, 0], np.maximum.accumulate(touched[:, 0] + touched[:, 1])
    begins = np.flatnonzero(np.r_[True, first[1:] > end[:-1]])
    return list(zip(first[begins].tolist(), end[np.r_[begins[1:] - 1, len(end) - 1]].tolist(), strict=True))
