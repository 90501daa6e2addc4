"""Copies between addresses that the device knows: of one range of bytes, or of several at equal distances."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from .driver import Call, bindings, check

#: Least bytes between rows that the driver refuses: ``CU_DEVICE_ATTRIBUTE_MAX_PITCH`` is one less, on all devices.
_PITCH_END = 1 << 31


class Copy(NamedTuple):
    """A copy of one or several ``ranges`` of ``nbytes`` each.

    They begin ``source_gap`` bytes after each other, and their copies ``target_gap``.
    """

    target: int
    source: int
    nbytes: int
    ranges: int = 1
    target_gap: int = 0
    source_gap: int = 0

    def back(self) -> Copy:
        """Return the copy in the other direction."""
        return Copy(self.source, self.target, self.nbytes, self.ranges, self.source_gap, self.target_gap)

    def queue(self, stream: int) -> None:
        """Queue it on a stream, in one call of the driver; CudaError if that refuses."""
        d = bindings()
        if self.ranges == 1:
            check("cuMemcpyAsync", d.cuMemcpyAsync(self.target, self.source, self.nbytes, stream))
        else:
            check("cuMemcpy3DAsync", d.cuMemcpy3DAsync(self.parameters(), stream))

    def calls(self, stream: int) -> list[Call]:
        """Return the calls that queue it range by range.

        A ``cuMemcpy3DAsync`` of two ranges took an H200's host 150 µs (notes/seven_billion.md).
        """
        starts = [(self.target + i * self.target_gap, self.source + i * self.source_gap) for i in range(self.ranges)]
        return [("cuMemcpyAsync", target, source, self.nbytes, stream) for target, source in starts]

    def parameters(self) -> Any:
        """Return the driver's ``CUDA_MEMCPY3D``: each range is a slice of one row."""
        d = bindings()
        p, unified = d.CUDA_MEMCPY3D(), d.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        p.srcMemoryType, p.srcDevice, p.dstMemoryType, p.dstDevice = unified, self.source, unified, self.target
        if self.ranges == 1:  # as rows side by side: one may be too long for the driver
            width, rows = _pitch_and_height(self.nbytes)
            p.WidthInBytes, p.Height, p.Depth = width, rows, 1
            p.srcPitch, p.srcHeight = p.dstPitch, p.dstHeight = width, rows
        else:
            p.WidthInBytes, p.Height, p.Depth = self.nbytes, 1, self.ranges
            p.srcPitch, p.srcHeight = _pitch_and_height(self.source_gap)
            p.dstPitch, p.dstHeight = _pitch_and_height(self.target_gap)
        return p


def _pitch_and_height(gap: int) -> tuple[int, int]:
    """Return two factors of a distance of slices, of which the first is one that the driver takes between rows."""
    height = 1
    while gap // height >= _PITCH_END and gap % (2 * height) == 0:
        height *= 2
    return gap // height, height


def joined(copies: list[Copy]) -> list[Copy]:
    """Join copies of ranges of one size, where those are at equal distances; copies of nothing are left out."""
    found: list[Copy] = []
    for size in dict.fromkeys(copy.nbytes for copy in copies if copy.nbytes):
        alike = [copy for copy in copies if copy.nbytes == size]
        first = alike[0]
        gaps = {(b.target - a.target, b.source - a.source) for a, b in itertools.pairwise(alike)}
        target_gap, source_gap = next(iter(gaps), (0, 0))
        if len(gaps) == 1 and _fits(target_gap, size) and _fits(source_gap, size):
            found.append(Copy(first.target, first.source, size, len(alike), target_gap, source_gap))
        else:
            found += alike
    return found


def _fits(gap: int, nbytes: int) -> bool:
    """Return whether the driver can copy slices of ``nbytes`` at this distance."""
    return gap >= nbytes and nbytes <= _pitch_and_height(gap)[0] < _PITCH_END
