"""The layout of an arena: where state lies, and which parts of it are a page.  Arithmetic, with no device and no torch.

An arena is one address range with a *section* for each state name.  Every section holds the parameters in the same
order, so element e of one section belongs to the same parameter element as element e of every other::

    exp_avg     | param 0 | param 1            | param 2 | …
    exp_avg_sq  | param 0 | param 1            | param 2 | …
                 ^ page 0      ^ page 1      ^ page 2

A *page* is the same range of elements in all sections: the unit that moves between device and host.  A parameter may
begin in one page and end in another; a *piece* is its part in one page.  Sections are rounded up to where a page may
end, so there is *room* behind the last parameter, for later ones.

Narrow entries (a scale per block of 64 takes a sixteenth of a byte per element) of several pages may share one granule,
which then rests with the first of them.  So a page has *stretches*, which rest on one side with it, and *extents*: its
own entries, which a visit copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

#: State tensors begin at multiples of this many bytes, because kernels load 16 bytes at a time.
ALIGNMENT = 16
#: The unit in which CUDA maps and migrates memory: page boundaries are multiples of this many bytes.
GRANULE = 2 << 20
#: The largest stretch of a page in one section: two of them (AdamW) keep 97 % of the link's two-way rate.
STRETCH = 8 << 20

Indices = npt.NDArray[np.int64]
#: Bytes per element: less than one if several elements share an entry.
Width = int | Fraction


@dataclass(frozen=True)
class Layout:
    """Sections and pages of one arena.

    Attributes:
        numels: elements of each parameter.
        starts: the element at which each parameter begins, the same in all sections.
        itemsizes: bytes per element, by section; each is a power of two, or one divided by a power of two.
        sections: the byte at which each section begins.
        nbytes: bytes of the whole range.
        page_numel: elements of a full page, in each section; never 0.
        granule: stretches of pages and sections begin and end at multiples of this many bytes.
        room: elements for which every section has memory.
        block: parameters and pages begin at multiples of this many elements.
    """

    numels: Indices
    starts: Indices
    itemsizes: tuple[Width, ...]
    sections: tuple[int, ...]
    nbytes: int
    page_numel: int
    granule: int
    room: int
    block: int = 1

    @property
    def numel(self) -> int:
        """Elements of a section up to the end of its last parameter, including gaps."""
        return int(self.starts[-1] + self.numels[-1]) if len(self.numels) else 0

    @cached_property
    def pages(self) -> int:
        """Number of pages."""
        return -(-self.room // self.page_numel)

    @cached_property
    def _lengths(self) -> list[int]:
        """Bytes of each section."""
        return np.diff([*self.sections, self.nbytes]).tolist()

    def extended(self, numels: Sequence[int]) -> Layout | None:
        """Return this layout with further parameters behind the others; None if there is no room for all of them.

        Parameters and pages stay where they are: only ``numels`` and ``starts`` grow.
        """
        sizes = np.asarray(numels, np.int64)
        starts = _starts(sizes, _alignment(self.itemsizes, self.block), self.numel)
        if (starts + sizes > self.room)[sizes > 0].any():  # what has no elements needs no room
            return None
        return replace(self, numels=np.append(self.numels, sizes), starts=np.append(self.starts, starts))

    def begin(self, section: int, index: int) -> int:
        """Return the byte at which parameter ``index`` begins in a section."""
        return self.sections[section] + int(int(self.starts[index]) * self.itemsizes[section])

    def stretch(self, section: int, first: int, last: int) -> tuple[int, int]:
        """Return (offset, bytes) of what rests with the pages ``first`` … ``last - 1`` in one section."""
        unit, length = self._units[section], self._lengths[section]
        begin = min(-(-first * unit // self.granule) * self.granule, length)
        end = min(-(-last * unit // self.granule) * self.granule, length)
        return self.sections[section] + begin, max(end - begin, 0)

    def extents(self, page: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of a page's own entries in every section, which a visit copies."""
        return [
            (at + page * unit, max(min((page + 1) * unit, length) - page * unit, 0))
            for at, unit, length in zip(self.sections, self._units, self._lengths, strict=True)
        ]

    @cached_property
    def _units(self) -> list[int]:
        """Bytes of a full page in each section."""
        return [int(self.page_numel * size) for size in self.itemsizes]

    def stretches(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return :meth:`stretch` for every section, without empty ones."""
        found = [self.stretch(section, first, last) for section in range(len(self.itemsizes))]
        return [(offset, nbytes) for offset, nbytes in found if nbytes]

    def page_bytes(self) -> Indices:
        """Return the bytes of each page, all sections together; their sum is ``nbytes``."""
        out = np.zeros(self.pages, np.int64)
        for section, length in enumerate(self._lengths):
            bounds = np.arange(self.pages + 1, dtype=np.int64) * self._units[section]
            out += np.diff(np.minimum(-(-bounds // self.granule) * self.granule, length))
        return out

    def divided(self, resident: int) -> tuple[int, int]:
        """Return the bytes of the first ``resident`` pages, and of the others."""
        near = sum(nbytes for _, nbytes in self.stretches(0, resident))
        return near, self.nbytes - near


def lay_out(
    numels: Sequence[int],
    itemsizes: Sequence[Width],
    granule: int = 0,
    stretch: int = STRETCH,
    spare: int = 0,
    block: int = 1,
) -> Layout:
    """Return a layout of parameters with ``numels`` elements in sections with ``itemsizes`` bytes per element.

    Args:
        granule: page boundaries are multiples of this many bytes; 0: one page and no rounding.
        stretch: bytes of a full page in its widest section; small states get smaller pages, to meet a budget closely.
        spare: bytes of room, all sections together, for later parameters (:meth:`Layout.extended`).
        block: a power of two; parameters and pages begin at multiples of this many elements.
    """
    sizes, alignment = np.asarray(numels, np.int64), _alignment(itemsizes, block)
    starts = _starts(sizes, alignment)
    numel = int(starts[-1] + sizes[-1]) if len(sizes) else 0
    if spare and itemsizes:
        numel = _round_up(numel, alignment) + math.ceil(spare / Fraction(sum(itemsizes)))
    if granule:
        wide = max(itemsizes, default=1)
        shared = any(size.denominator > 1 for size in itemsizes)
        least = max(int(granule // (wide if shared else min(itemsizes, default=1))), block)
        page = max(least, int(min(stretch, numel * wide // 16) // wide // least * least))
        if shared:  # so that a page fills whole granules of a section, or granules whole pages
            page = 1 << (page.bit_length() - 1)
    else:
        page = _round_up(max(numel, 1), alignment)  # so that the page ends where the section does
    sections, end = [], 0
    for size in itemsizes:
        sections.append(end)
        end = _round_up(end + math.ceil(numel * size), granule or ALIGNMENT)
    lengths = np.diff([*sections, end]).tolist()
    room = min((int(length // size) for length, size in zip(lengths, itemsizes, strict=True)), default=numel)
    return Layout(sizes, starts, tuple(itemsizes), tuple(sections), end, page, granule or ALIGNMENT, room, block)


@dataclass(frozen=True)
class Pieces:
    """Parts of parameters, each in one page, as parallel arrays."""

    tensor: Indices
    offset: Indices  # from the parameter's first element
    numel: Indices
    page: Indices

    def __len__(self) -> int:
        return len(self.tensor)


def cut(layout: Layout) -> Pieces:
    """Return all pieces in the order of pages.  A parameter without elements has one piece without elements."""
    page = layout.page_numel
    first = layout.starts // page
    last = np.maximum(layout.starts + layout.numels - 1, layout.starts) // page
    counts = last - first + 1
    tensor = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    number = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    pages = first[tensor] + number
    begin = np.maximum(pages * page, layout.starts[tensor])
    end = np.minimum((pages + 1) * page, (layout.starts + layout.numels)[tensor])
    return Pieces(tensor, begin - layout.starts[tensor], end - begin, np.minimum(pages, max(layout.pages - 1, 0)))


def _alignment(itemsizes: Sequence[Width], block: int) -> int:
    """Return the elements at whose multiples parameters begin, so that they are aligned in every section."""
    return max(block, int(ALIGNMENT // min(itemsizes, default=1)))


def _starts(sizes: Indices, alignment: int, behind: int = 0) -> Indices:
    """Return where parameters begin that follow each other from the element ``behind`` on."""
    taken = -(-sizes // alignment) * alignment
    return _round_up(behind, alignment) + np.cumsum(taken) - taken


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
