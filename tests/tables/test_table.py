"""The layout of a pointer table: pure arithmetic, up to sizes no memory would hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import kernel_texts
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedopt.kernels import nvrtc, source
from pagedopt.tables.layout import (
    BLOCK,
    CHUNK,
    HEADER,
    WORD,
    Batch,
    Geometry,
    HostTable,
    batches,
    choose_geometry,
    chunks,
    row_dtype,
)
from pagedopt.tables.pointers import PointerTable
from pagedopt.transports.by_value import ARGUMENT_BYTES, StructTransport
from pagedopt.transports.transport import TABLE_AT

HUGE = 2**31 + 5
LIMITS = [StructTransport(0, nbytes).words for nbytes in ARGUMENT_BYTES]  # words of a launch: 508 and 4,091

ORDINARY = st.lists(st.one_of(st.sampled_from([0, 1, 3, 1023, 1024, 1025, 4097]), st.integers(0, 40_000)), max_size=40)
VAST = st.lists(st.one_of(st.sampled_from([0, 1, 4097, 2**31 - 1, 2**31, HUGE]), st.integers(0, 2**33)), max_size=6)


def assert_covered_once(numels: list[int], cut: np.ndarray, chunk_numel: int) -> None:
    """Chunks are in order and tile every row from 0 to its end, without touching a byte per element."""
    position = [0] * len(numels)
    last = -1
    for row, offset in cut.tolist():
        assert row >= last, "rows go back"
        last = row
        assert offset == position[row], "a gap or an overlap"
        assert offset < numels[row], "a chunk of nothing"
        position[row] = min(offset + chunk_numel, numels[row])
    assert position == numels


@given(st.one_of(st.tuples(ORDINARY, st.sampled_from([7, 1000, 1024, 2048, 32768])), st.tuples(VAST, st.just(1 << 24))))
@example(([0, 1, 3, 4097], 1))
@example(([HUGE, 0, HUGE, 3], 1 << 24))
@example(([2**31 - 1, 1, 2**31], 1 << 24))
@settings(deadline=None, max_examples=100)
def test_chunks_cover_every_element_once(case: tuple[list[int], int]) -> None:
    numels, chunk_numel = case
    cut = chunks(numels, chunk_numel)
    assert cut["offset"].dtype == np.int64
    assert_covered_once(numels, cut, chunk_numel)


@given(st.one_of(ORDINARY, VAST))
def test_geometry_fits_the_kernels(numels: list[int]) -> None:
    geometry = choose_geometry(numels)
    assert geometry.threads in (32, BLOCK)
    assert BLOCK % geometry.threads == 0
    assert geometry.chunk_numel % 1024 == 0  # a chunk starts where the tensor's own alignment holds
    assert geometry.chunk_numel < 2**30  # the kernel counts within a chunk in 32 bits
    if geometry.threads == 32:
        assert max(numels, default=0) <= geometry.chunk_numel, "a warp for more than one chunk of a tensor"


MANY = [4 * 1056 * 1024]
#: Elements, bytes of one of them, whether the table is read over the link, and the geometry.
GEOMETRIES = [
    # A large GPU is filled before reading is saved.
    ([], 4, False, (1024, 32)), ([5, 1024], 4, False, (1024, 32)), ([1025], 4, False, (2048, BLOCK)),
    (MANY, 4, False, (4096, BLOCK)), (MANY, 2, False, (4096, BLOCK)),
    *(([HUGE], size, False, (chunk, BLOCK)) for size, chunk in ((4, 32768), (8, 32768), (2, 65536), (1, 65536))),
    # Over the link there are fewer and larger chunks.
    ([1024], 4, True, (1024, 32)), ([1025], 4, True, (2048, BLOCK)), ([HUGE], 4, True, (32768, BLOCK)),
    ([1 << 20], 4, True, (16384, BLOCK)), ([1 << 20], 2, True, (16384, BLOCK)),
    ([1 << 20] * 2, 4, True, (32768, BLOCK)), ([1 << 20] * 64, 4, True, (32768, BLOCK)),
]  # fmt: skip


@pytest.mark.parametrize(("numels", "itemsize", "over_link", "geometry"), GEOMETRIES)
def test_a_geometry_by_hand(numels: list[int], itemsize: int, over_link: bool, geometry: tuple[int, int]) -> None:
    assert choose_geometry(numels, itemsize, over_link=over_link) == Geometry(*geometry)


def test_a_cpu_has_no_link() -> None:
    tensors = [torch.zeros(1 << 18)]
    assert PointerTable([tensors], over_link=True).host.geometry == PointerTable([tensors]).host.geometry


@pytest.mark.parametrize(
    "geometry", [(0, 32), (-16, 32), (1001, 512), (24, 512), (2**30, 512), (1024, 64), (1024, 0)], ids=str
)
def test_a_geometry_the_kernels_could_not_work_with_is_refused(geometry: tuple[int, int]) -> None:
    """A chunk must begin as aligned as its tensor, whatever the dtype."""
    with pytest.raises(ValueError, match="it must be"):
        Geometry(*geometry)


# ---- the words ----


def test_the_words_hold_scalars_rows_and_chunks_in_this_order() -> None:
    table = HostTable(2, [5000, 3], uniforms=3, sets=2, geometry=Geometry(4096, BLOCK))
    table.set_scalars([[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]])
    table.rows["address"] = [[0x1000, 0x2000], [0x3000, 0x4000]]
    table.rows["set"] = [0, 1]
    signed = table.words.view(np.int64).tolist()
    assert table.words[:6].view(np.float64).tolist() == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert signed[6:14] == [0x1000, 0x2000, 5000, 0, 0x3000, 0x4000, 3, 1]
    assert signed[14:] == [0, 0, 0, 4096, 1, 0]
    assert table.header().tolist() == [(6, 14, 3, 4096)]


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize(
    ("numels", "listed"), [((1, 1024, 7), False), ((1, 1025), True), ((1025, 3), True), ((1, 0, 7), True), ((), False)]
)
def test_chunks_are_listed_only_where_they_say_more_than_the_rows(
    numels: tuple[int, ...], listed: bool, lists: int
) -> None:
    """Where chunk i is row i they are left out."""
    uniforms = 2 - lists
    table = HostTable(lists, numels, uniforms, geometry=Geometry(1024, 32))
    rows_end = uniforms + (lists + 2) * len(numels)
    assert table.lists_chunks is listed
    assert len(table.words) == rows_end + 2 * len(table.chunks) * listed
    assert int(table.header()["chunks"][0]) == (rows_end if listed else -1)
    if not listed:
        assert table.chunks.tolist() == [(row, 0) for row in range(len(numels))]


def test_stamps_say_what_changed() -> None:
    table = HostTable(2, [10, 10], uniforms=2)
    table.set_scalars([[1.0, 2.0]])
    first = table.stamp
    table.set_scalars([[1.0, 2.0]])
    assert table.stamp == first, "the same scalars are no change"
    table.set_scalars([[1.0, 2.5]])
    assert table.stamp > first
    assert table.rows_stamp < table.stamp, "scalars alone leave the rows as they were sent"
    table.rows_changed()
    assert table.rows_stamp == table.stamp > first + 1
    before = table.stamp
    for _ in range(2):
        table.set_scalars([[1.0, float("nan")]])
    assert table.stamp == before + 1
    for stamp, zero in enumerate((-0.0, 0.0), before + 2):
        table.set_scalars([[zero, 1.0]])
        assert (table.stamp, math.copysign(1, table.scalars[0, 0])) == (stamp, math.copysign(1, zero))


@pytest.mark.parametrize("values", [["1.0"], [1j], [1.0, 2.0], []])
@pytest.mark.parametrize("sets", [1, 2])
def test_scalars_that_are_no_set_of_numbers_are_refused(values: list[Any], sets: int) -> None:
    table = HostTable(1, [10], uniforms=1, sets=2)
    with pytest.raises(TypeError):
        table.set_scalars([values] * sets)
    assert table.stamp == 0


def test_fewer_sets_than_the_table_holds_leave_the_others() -> None:
    table = HostTable(1, [10], uniforms=1, sets=3)
    table.set_scalars([[1.0], [2.0], [3.0]])
    table.set_scalars([[7.0]])
    assert table.scalars.tolist() == [[7.0], [2.0], [3.0]]
    without = HostTable(1, [10])
    without.set_scalars([[]])
    assert (without.stamp, without.rows_at) == (0, 0)


# ---- batches ----


def check_batches(table: HostTable, words: int) -> list[Batch]:
    """Batches fit the limit, hold whole chunks in order, each once, and the rows of those chunks."""
    found = list(batches(table, words))
    row_words, chunk_words = table.rows.itemsize // WORD, 2 if table.lists_chunks else 0
    expected_chunk = 0
    for batch in found:
        assert batch.chunk == expected_chunk
        assert batch.chunk_end > batch.chunk, "a launch of nothing"
        expected_chunk = batch.chunk_end
        rows = table.chunks["row"][batch.chunk : batch.chunk_end]
        assert batch.row == rows[0]
        assert batch.row_end == rows[-1] + 1
        size = table.rows_at + (batch.row_end - batch.row) * row_words + chunk_words * (batch.chunk_end - batch.chunk)
        assert size <= words
        if batch.chunk_end < len(table.chunks):  # greedy: one more chunk would not fit
            more = (int(table.chunks["row"][batch.chunk_end]) + 1 - batch.row_end) * row_words + chunk_words
            assert size + more > words, "a launch carries less than it could"
    assert expected_chunk == len(table.chunks)
    return found


@pytest.mark.parametrize("words", LIMITS)
@given(
    numels=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60_000)), max_size=300),
    lists=st.integers(1, 6),
    uniforms=st.integers(0, 10),
    sets=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_batches_fit_and_cover_all_chunks(words: int, numels: list[int], lists: int, uniforms: int, sets: int) -> None:
    check_batches(HostTable(lists, numels, uniforms, sets, Geometry(1024, 32)), words)


@pytest.mark.parametrize("words", LIMITS)
def test_batches_of_a_tensor_beyond_32_bits(words: int) -> None:
    found = check_batches(HostTable(4, [3, HUGE, 0, 5], 9, 1, Geometry(1 << 20, BLOCK)), words)
    assert len(found) > 1 or words > 2000


def test_a_row_of_absent_tensors_travels_with_its_chunks() -> None:
    table = HostTable(1, [5, 5, 5])
    table.rows["numel"][1] = 0  # absent now; the chunks were cut when it was there
    assert list(batches(table, 100)) == [Batch(0, 3, 0, 3)]


def test_what_cannot_hold_one_row_is_refused() -> None:
    table = HostTable(3, [5, 0], uniforms=10, sets=60)
    with pytest.raises(ValueError, match=r"carries 4064 bytes; 600 scalars and one row of 3 lists need 4856"):
        list(batches(table, LIMITS[0]))
    least = table.rows_at + 5 + 2
    assert len(list(batches(table, least))) == 1
    with pytest.raises(ValueError, match="another transport or fewer sets"):
        list(batches(table, least - 1))


@given(ORDINARY, st.integers(1, 40), st.data())
def test_shares_of_a_span_are_all_of_it_and_about_equal(numels: list[int], count: int, data: st.DataObject) -> None:
    table = HostTable(1, numels, geometry=Geometry(1024, 32))
    if not len(table.chunks):
        return
    first = data.draw(st.integers(0, len(table.chunks) - 1))
    last = data.draw(st.integers(first + 1, len(table.chunks)))
    shares = table.shares((first, last), count)
    assert [shares[0][0], *(end for _, end in shares)] == [*(begin for begin, _ in shares), last]
    assert shares[0][0] == first
    assert len(shares) <= count
    row, offset = table.chunks["row"], table.chunks["offset"]
    work = np.minimum(np.array(numels)[row] - offset, 1024) + 64
    most = max(int(work[begin:end].sum()) for begin, end in shares)
    assert most <= int(work[first:last].sum()) / count + int(work[first:last].max())


def test_shares_do_not_depend_on_who_is_absent_when_they_are_asked_for() -> None:
    """They are kept for as long as the table lives; who is absent now comes back."""
    table = HostTable(1, [50_000, 50_000], geometry=Geometry(1024, 32))
    want = table.shares((0, len(table.chunks)), 8)
    table.rows["numel"][0] = 0
    assert table.shares((0, len(table.chunks)), 8) == want


# --- the C structs are the NumPy dtypes: size of each, width and order of its fields, checked by the compiler ---------


STRUCTS: dict[str, np.dtype] = {
    "Header": HEADER,
    "Chunk": CHUNK,
    "TableAt": TABLE_AT,
    **{f"Row<{k}>": row_dtype(k) for k in (1, 2, 3, 5, 8)},
    **{f"TableOf<{n}>": StructTransport(0, n).dtype for n in ARGUMENT_BYTES},
}


def assertions(structs: Mapping[str, np.dtype] = STRUCTS) -> str:
    """static_asserts made from the NumPy side, of structs without padding."""
    lines = [f'static_assert(BLOCK == {BLOCK}, "BLOCK");', "template <class T> constexpr T zero{};"]
    for name, dtype in structs.items():
        lines.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "size of {name}");')
        for field, (inner, _) in dtype.fields.items():
            lines.append(f'static_assert(sizeof({name}::{field}) == {inner.itemsize}, "width of {name}::{field}");')
        for field, behind in itertools.pairwise(_by_offset(dtype)):
            places = f"(const void*)&zero<{name}>.{field} < (const void*)&zero<{name}>.{behind}"
            lines.append(f'static_assert({places}, "{name}::{field} before {behind}");')
    return "\n".join(lines)


def _by_offset(dtype: np.dtype) -> list[str]:
    return sorted(dtype.fields, key=lambda field: dtype.fields[field][1])


@pytest.mark.parametrize("dtype", STRUCTS.values(), ids=STRUCTS)
def test_no_struct_has_padding(dtype: np.dtype) -> None:
    assert_no_padding(dtype)


def assert_no_padding(dtype: np.dtype) -> None:
    """Else widths and order would not say where a field is."""
    end = 0
    for field in _by_offset(dtype):
        inner, offset = dtype.fields[field][:2]
        assert offset == end
        end = offset + inner.itemsize
    assert end == dtype.itemsize


def compile_with(extra: str, text: str | None = None) -> None:
    kernel_texts.nvrtc()
    nvrtc.compile_cuda(f"{text or source.text(None)}\n{extra}\n", (), "sm_90")


def test_structs_are_laid_out_alike_on_both_sides() -> None:
    compile_with(assertions())


@pytest.mark.parametrize("nbytes", ARGUMENT_BYTES)
def test_an_argument_by_value_fits_what_cuda_takes(nbytes: int) -> None:
    assert StructTransport(0, nbytes).dtype.itemsize <= nbytes
    assert nbytes - StructTransport(0, nbytes).dtype.itemsize < 8, "a word more would fit"
