"""How state is laid out and cut into pages: pure arithmetic, up to sizes no memory would hold."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedopt.paging.pages import ALIGNMENT, GRANULE, STRETCH, Layout, Pieces, Width, cut, lay_out

HUGE = 2**31 + 5
VAST = 2**36  # elements: half a terabyte of float64, in pages of 2 MiB
MIB = 1 << 20

#: Elements of parameters: none, odd ones, multiples of every page, and more than a page of the small granules.
NUMELS = st.lists(st.one_of(st.sampled_from([0, 1, 3, 4097, 8192, 65_536]), st.integers(0, 200_000)), max_size=30)
LARGE = st.lists(st.one_of(st.sampled_from([0, 1, 2**31 - 1, 2**31, HUGE, VAST]), st.integers(0, 2**33)), max_size=6)
NARROW = Fraction(4, 64)
Sizes = tuple[int, ...]
ITEMSIZES = st.sampled_from(
    [
        (4,), (4, 4), (2, 2), (8, 8), (2, 4), (4, 8), (1, 4), (4, 1), (1, 1, 4), (4, 4, 4), (),
        (1, NARROW), (1, NARROW, 1, NARROW), (1, NARROW, 2), (Fraction(1, 2), NARROW), (NARROW,),
    ]
)  # fmt: skip
#: Page boundaries as of an operating system and as of CUDA; 0 is an arena of one page.
GRANULES = st.sampled_from([0, 4096, 64 << 10, GRANULE])
STRETCHES = st.sampled_from([4096, 64 << 10, STRETCH])


def assert_layout_holds(layout: Layout, numels: list[int], granule: int) -> None:
    """Everything a kernel, a mover of pages and a reader of state rely on."""
    unit = granule or ALIGNMENT
    ends = layout.starts + layout.numels
    assert layout.numels.tolist() == numels
    gaps = np.diff(layout.starts) - layout.numels[:-1]
    assert ((gaps >= 0) & (gaps < max(layout.block, ALIGNMENT / min(layout.itemsizes, default=1)))).all()
    assert not (layout.starts % layout.block).any()
    assert layout.page_numel % layout.block == 0
    assert layout.numel == (int(ends[-1]) if numels else 0)
    end = 0
    for section, size in enumerate(layout.itemsizes):
        begin = layout.sections[section]
        assert begin == end, "sections overlap or leave a gap"
        assert begin % unit == 0
        assert not any(int(start) * size % ALIGNMENT for start in layout.starts), "a tensor is not aligned"
        part = layout.page_numel * size
        assert part % unit == 0 or unit % part == 0, "a page has neither whole granules nor a whole part of one"
        at = begin
        for page in range(min(layout.pages, 50)):
            offset, nbytes = layout.stretch(section, page, page + 1)
            assert offset == at
            assert nbytes > 0 or part < unit, "a page has nothing of a section"
            assert_extent_holds(layout, section, page, part, unit)
            at += nbytes
            assert layout.stretch(section, 0, page + 1) == (begin, at - begin), "neighbours do not make one stretch"
        assert layout.stretch(section, layout.pages, layout.pages)[1] == 0
        offset, nbytes = layout.stretch(section, 0, layout.pages)
        end = offset + nbytes
        assert offset == begin
        assert nbytes % unit == 0
        assert 0 <= nbytes - layout.numel * size < unit, "more than the rounding of a section"
    assert end == layout.nbytes
    assert (int(layout.page_bytes().sum()), len(layout.page_bytes())) == (layout.nbytes, layout.pages)
    for resident in {0, 1, layout.pages // 2, layout.pages} & set(range(layout.pages + 1)):
        near = int(layout.page_bytes()[:resident].sum())
        assert layout.divided(resident) == (near, layout.nbytes - near)


def assert_extent_holds(layout: Layout, section: int, page: int, part: Width, unit: int) -> None:
    """A page visits with its own entries, which lie in whole granules or in one, so on one side."""
    offset, nbytes = layout.extents(page)[section]
    begin = offset - layout.sections[section]
    assert begin == page * part
    assert page == layout.pages - 1 or nbytes == part
    assert offset + nbytes <= sum(layout.stretch(section, 0, page + 1)), "an entry rests behind its page"
    assert part % unit == 0 or begin // unit == (begin + max(nbytes, 1) - 1) // unit
    if part % unit == 0:
        assert (offset, nbytes) == layout.stretch(section, page, page + 1)


def assert_pieces_partition(layout: Layout, pieces: Pieces) -> None:
    """Every parameter is cut from its first to its last element, in order, and no piece leaves its page."""
    assert (np.diff(pieces.tensor) >= 0).all()
    assert (np.diff(pieces.page) >= 0).all(), "not in the order of pages"
    first = np.flatnonzero(np.diff(pieces.tensor, prepend=-1))
    assert pieces.tensor[first].tolist() == list(range(len(layout.numels))), "a parameter without a piece"
    assert (pieces.offset[first] == 0).all()
    ends = pieces.offset + pieces.numel
    last = np.append(first[1:], len(pieces))[: len(first)] - 1
    assert (ends[last] == layout.numels).all()
    inner = np.setdiff1d(np.arange(len(pieces)), first)
    assert (pieces.offset[inner] == ends[inner - 1]).all(), "a gap or an overlap"
    some = layout.numels[pieces.tensor] > 0
    assert (pieces.numel[some] > 0).all(), "a piece of nothing"
    begin = layout.starts[pieces.tensor] + pieces.offset
    page = layout.page_numel
    assert (begin[some] // page == pieces.page[some]).all(), "a piece begins outside of its page"
    assert ((begin + pieces.numel - 1)[some] // page == pieces.page[some]).all(), "a piece ends outside of its page"
    assert ((pieces.page >= 0) & (pieces.page < max(layout.pages, 1))).all()
    assert not (pieces.offset % layout.block).any()


#: Elements of parameters, where pages end, and how long they are.
CASES = st.one_of(
    st.tuples(NUMELS, GRANULES, STRETCHES), st.tuples(LARGE, st.sampled_from([0, GRANULE]), st.just(STRETCH))
)


@given(CASES, ITEMSIZES, st.sampled_from([1, 1, 64, 1024]))
@example(([], GRANULE, STRETCH), (4, 4), 1)
@example(([0, 0], GRANULE, STRETCH), (4, 4), 1)
@example(([], 0, STRETCH), (4, 4), 1)
@example(([5], GRANULE, STRETCH), (), 1)
@example(([3, 5], 0, STRETCH), (2, 4), 1)
@example(([65_536, 0], 4096, 4096), (4, 4), 1)  # the one without elements begins behind the last page
@example(([HUGE, 0, VAST, 3], GRANULE, STRETCH), (4, 4), 1)
@settings(deadline=None, max_examples=300)
def test_layouts_hold(case: tuple[list[int], int, int], itemsizes: Sizes, block: int) -> None:
    numels, granule, stretch = case
    layout = lay_out(numels, itemsizes, granule, stretch, block=block)
    assert_layout_holds(layout, numels, granule)
    assert_pieces_partition(layout, cut(layout))


# ---- sizes ----


def test_pages_of_large_state_are_as_long_as_the_link_likes() -> None:
    layout = lay_out([268 * 10**6], (4, 4), GRANULE)
    assert (layout.page_numel * 4, layout.page_bytes()[0], layout.pages) == (STRETCH, 2 * STRETCH, 128)
    mixed = lay_out([268 * 10**6], (2, 4), GRANULE)
    assert mixed.page_numel * 4 == STRETCH  # the widest section counts


def test_small_state_gets_smaller_pages() -> None:
    """A budget of a quarter is met within a sixteenth, down to the granule."""
    layout = lay_out([16 * MIB], (4, 4), GRANULE)  # 64 MiB a section
    assert (layout.page_numel * 4, layout.pages) == (4 * MIB, 16)
    assert lay_out([3 * MIB], (4, 4), GRANULE).page_bytes().tolist() == [4 * MIB] * 6
    assert lay_out([1], (4, 4), GRANULE).page_bytes().tolist() == [4 * MIB]


def test_a_page_is_a_granule_in_the_narrowest_section() -> None:
    layout = lay_out([5 * MIB], (1, 4), GRANULE)
    assert (layout.page_numel, layout.sections) == (2 * MIB, (0, 6 * MIB))
    assert layout.page_bytes().tolist() == [10 * MIB, 10 * MIB, 6 * MIB]  # the last: 2 of bytes, 4 of words


def test_a_hand_case_of_pieces() -> None:
    """Pages of 1,024 elements: the second parameter begins in page 0 and ends in page 3."""
    layout = lay_out([1000, 2500, 0, 4], (4,), 4096, stretch=4096)
    assert (layout.page_numel, layout.starts.tolist()) == (1024, [0, 1000, 3500, 3500])
    pieces = cut(layout)
    assert pieces.tensor.tolist() == [0, 1, 1, 1, 1, 2, 3]
    assert pieces.offset.tolist() == [0, 0, 24, 1048, 2072, 0, 0]
    assert pieces.numel.tolist() == [1000, 24, 1024, 1024, 428, 0, 4]
    assert pieces.page.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert len(pieces) == 7


# ---- room for those that come later ----


def assert_nothing_moved(before: Layout, after: Layout) -> None:
    """But for the parameters that are new, both are alike."""
    count = len(before.numels)
    first = dataclasses.replace(after, numels=after.numels[:count], starts=after.starts[:count])
    for name, value in vars(before).items():
        assert np.array_equal(getattr(first, name), value), name
    assert after.page_bytes().tolist() == before.page_bytes().tolist()


LATER = st.lists(st.lists(st.one_of(st.integers(0, 60), st.integers(0, 30_000)), max_size=4), max_size=8)


@given(NUMELS, ITEMSIZES.filter(len), GRANULES, STRETCHES, st.sampled_from([0, 1, 1000, 100_000]), LATER)
@example([65_536], (4, 4), 4096, 4096, 0, [[0], [1]])  # full to the last byte
@example([3], (2, 4), 0, STRETCH, 0, [[0], [1], [0]])
@settings(deadline=None, max_examples=300)
def test_later_parameters_go_behind_the_others_and_move_none(
    numels: list[int], itemsizes: Sizes, granule: int, stretch: int, spare: int, later: list[list[int]]
) -> None:
    layout = lay_out(numels, itemsizes, granule, stretch, spare)
    assert int(layout.page_bytes().sum()) == layout.nbytes
    for more in later:
        found = layout.extended(more)
        if found is None:
            needed = max(16 // size for size in itemsizes) * len(more) + sum(more)
            assert layout.numel + needed > layout.room, "there was room"
            continue
        assert_nothing_moved(layout, found)
        assert found.numels.tolist() == layout.numels.tolist() + more
        assert_pieces_partition(found, cut(found))
        some = found.numels > 0
        assert (found.starts[1:] >= (found.starts + found.numels)[:-1]).all(), "parameters overlap"
        ends = [*found.sections[1:], found.nbytes]
        for begin, end, size in zip(found.sections, ends, itemsizes, strict=True):
            assert (found.starts * size % ALIGNMENT == 0).all()
            assert (begin + (found.starts + found.numels) * size)[some].max(initial=0) <= end, "beyond its section"
        layout = found


@given(NUMELS, ITEMSIZES.filter(len), GRANULES, st.integers(0, 500_000))
@settings(deadline=None)
def test_spare_room_is_as_large_as_it_says(numels: list[int], itemsizes: Sizes, granule: int, numel: int) -> None:
    spare = numel * sum(itemsizes)
    layout = lay_out(numels, itemsizes, granule, spare=spare)
    assert layout.extended([numel]) is not None
    gaps = (len(numels) + 1) * ALIGNMENT * max(itemsizes) // min(itemsizes)
    limit = sum(numels) * sum(itemsizes) + spare + len(itemsizes) * (gaps + (granule or ALIGNMENT))
    assert layout.nbytes <= limit
    assert layout.extended([math.ceil(limit / min(1, *itemsizes))]) is None


def test_the_narrowest_room_counts() -> None:
    """Of 2 MiB in bytes and 2 MiB in words a quarter of the bytes is room."""
    layout = lay_out([16], (1, 4), GRANULE)
    assert layout.extended([GRANULE // 4 - 16]) is not None
    assert layout.extended([GRANULE // 4 - 15]) is None
