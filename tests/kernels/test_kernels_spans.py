"""Parts of a table: the CUDA text over spans of chunks and on small grids, and rows that are parts of tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_texts import instance
from support import F32, Lists, clone, lists_for, same_bits, scalars_for

from pagedopt import Sweep
from pagedopt.rules import RULES
from pagedopt.tables.layout import BLOCK, Geometry, Span, table_type
from pagedopt.tables.pointers import Rows
from pagedopt.transports.by_value import StructTransport
from tests.card.kernels import build, functors, table_at

ADAMW = RULES["adamw"]
DTYPES = (F32,) * 4
UNIFORMS = [ADAMW.uniforms(scalars_for(ADAMW))]
SIZES = (5000, 0, 1, 700, 4097, 33, 8, 2048, 130, 1) * 3
SHAPES = {32: Geometry(1024, 32), 512: Geometry(2048, BLOCK)}


def sweep_over(lists: Lists, threads: int, rows: Rows | None = None) -> Sweep:
    sweep = Sweep(ADAMW, lists, geometry=SHAPES[threads], rows=rows)
    sweep.table.host.set_scalars(UNIFORMS)
    return sweep


def updated(lists: Lists, threads: int) -> Lists:
    """What one whole run on the CPU makes of copies."""
    lists = clone(lists)
    sweep_over(lists, threads).run(UNIFORMS)
    return lists


def cut(count: int, pieces: int) -> list[Span]:
    bounds = np.linspace(0, count, pieces + 1).astype(int).tolist()
    return list(itertools.pairwise(bounds))


NAMES = [(threads, nbytes, small) for threads in SHAPES for nbytes in (0, 4096) for small in (False, True)]


def play_of(threads: int, nbytes: int, small: bool):  # type: ignore[no-untyped-def]
    names = tuple(instance(ADAMW, DTYPES, t, table_type(n), small_grid=s) for t, n, s in NAMES)
    return build(names, functors([ADAMW]))[NAMES.index((threads, nbytes, small))]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("threads", SHAPES)
def test_a_small_grid_does_all_the_work(threads: int, blocks: int) -> None:
    before = lists_for(ADAMW, SIZES, DTYPES)
    for backwards in (False, True):
        lists = clone(before)
        table = sweep_over(lists, threads).table.host
        play_of(threads, 0, True)(table_at(table), blocks, backwards)
        assert same_bits(lists, updated(before, threads))
    assert not same_bits(lists, before)


@pytest.mark.parametrize("sizes", [SIZES, (700, 1, 3, 33, 1024) * 9], ids=["chunks listed", "one chunk each"])
@pytest.mark.parametrize("nbytes", [0, 4096])
@pytest.mark.parametrize("threads", SHAPES)
def test_spans_together_are_the_whole(threads: int, nbytes: int, sizes: tuple[int, ...]) -> None:
    before = lists_for(ADAMW, sizes, DTYPES)
    lists = clone(before)
    table = sweep_over(lists, threads).table.host
    assert table.lists_chunks == (sizes is SIZES)
    play, per_block = play_of(threads, nbytes, False), BLOCK // threads
    spans = cut(len(table.chunks), 4)
    done: list[Span] = []

    def one_by_one():  # type: ignore[no-untyped-def]
        for span in spans:
            assert same_bits(lists, before) == (not done)
            yield span
            done.append(span)

    if nbytes:
        with StructTransport(0, nbytes).lend(table, 0) as lent:
            for span in one_by_one():
                for argument, count in lent.parts(span):
                    play(argument, -(-count // per_block), False)
    else:
        for first, last in one_by_one():
            argument = table_at(table)
            argument["header"] = table.header(first, last)[0]
            play(argument, -(-(last - first) // per_block), False)
    assert done == spans
    assert same_bits(lists, updated(before, threads))


def test_chunks_of_rows() -> None:
    table = sweep_over(lists_for(ADAMW, SIZES, DTYPES), 512).table.host
    for first, last in [(0, 0), (0, 1), (1, 2), (0, len(SIZES)), (4, 9)]:
        ((begin, end),) = table.chunks_of([(first, last)])
        assert set(table.chunks["row"][begin:end].tolist()) == {i for i in range(first, last) if SIZES[i]}
        assert (end - begin) == sum(-(-SIZES[i] // 2048) for i in range(first, last))


def parts(sizes: tuple[int, ...]) -> Rows:
    """Every tensor in two or three parts, the rows in an order of their own."""
    rows = []
    for i, size in enumerate(sizes):
        bounds = sorted({0, size // 3 // 4 * 4, size // 2 // 4 * 4, size})
        rows += [(i, a, b - a) for a, b in itertools.pairwise(bounds)] or [(i, 0, 0)]
    tensor, offset, numel = (np.array(x, np.int64) for x in zip(*rows[::-1], strict=True))
    return Rows(tensor, offset, numel, np.zeros((len(rows), 4), np.uint64))


def test_a_shift_sends_the_kernel_elsewhere() -> None:
    sizes = (700, 33)
    before = lists_for(ADAMW, sizes, DTYPES)
    lists, slot = clone(before), clone(before)
    rows = parts(sizes)
    for row, tensor in enumerate(rows.tensor):
        for j in (2, 3):
            away = slot[j][tensor].data_ptr() - lists[j][tensor].data_ptr()  # type: ignore[union-attr]
            rows.shift[row, j] = np.uint64(away % 2**64)
    sweep_over(lists, 512, rows).run(UNIFORMS)
    want = updated(before, 512)
    assert same_bits([lists[0], *slot[2:], *lists[2:]], [want[0], *want[2:], *before[2:]])
