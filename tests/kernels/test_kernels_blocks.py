"""Kernels over formats of blocks: the same text for NVRTC, g++ and, to the same bits, Numba."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from formats_under_test import TwoHalves, WhereItStands
from often import MARKS
from support import BF16, F16, F32, F64, same_bits, scalars_for, threads

from pagedopt import Sweep, rule
from pagedopt.formats import Column, Format
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.int8 import FIRST, SECOND
from pagedopt.kernels import cpu_text, nvrtc, source
from pagedopt.launch.sweep import Stored
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import BLOCK, Geometry
from pagedopt.tables.pointers import Rows
from tests.card.kernels import build, functors, launch
from tests.outside.element_format import Fixed16
from tests.outside.format import Int8Blocks

INT8 = Int8Blocks()
SIZES = (1, 63, 64, 65, 0, 4097, 1024, 2048 + 31, 130)
SHAPES = {32: Geometry(1024, 32), 512: Geometry(2048, BLOCK)}


def formats_of(rule: Rule, dtypes: tuple[torch.dtype, torch.dtype], form: Format = INT8) -> tuple[Format, ...]:
    """Parameter and gradient of some dtypes, all state in one format."""
    return (*map(of_dtype, dtypes), *[form] * (len(rule.inputs) - 2))


@rule
def falling(param, grad, level, *, by):  # type: ignore[no-untyped-def]
    """What is behind the last element, which is 0, becomes the largest of its block."""
    param = param - grad
    level = level - by
    return param, level


PLACES = WhereItStands()
CASES = (
    ("adamw", (F32, F32), INT8), ("lion", (F32, F32), INT8), ("adamw", (BF16, F32), INT8), ("lion", (F64, F32), PLACES),
)  # fmt: skip
VARIANTS = [
    (RULES[name], formats_of(RULES[name], dtypes, form), threads) for name, dtypes, form in CASES for threads in SHAPES
]
HALVES = TwoHalves()
VARIANTS.append((RULES["adamw"], (HALVES, *[of_dtype(F32)] * 3), 512))
VARIANTS.append((RULES["adamw"], (*[of_dtype(F32)] * 2, PLACES, INT8), 512))  # blocks of different sizes
VARIANTS.append((falling, (*[of_dtype(F32)] * 2, INT8), 32))
FIXED = Fixed16()
VARIANTS += [(RULES["lion"], formats_of(RULES["lion"], (dtype, F32), FIXED), 512) for dtype in (F32, F64)]
FORMATS = (INT8, PLACES, HALVES, FIXED)
NAMES = tuple(source.instance(rule, forms, threads, "TableAt") for rule, forms, threads in VARIANTS)


def lists_of(rule: Rule, formats: tuple[Format, ...], gap: int = 0) -> list[list[torch.Tensor]]:
    """Columns of parameters of ``SIZES``, whose gradients are zero in some blocks, ``gap`` elements off their start."""
    generator = torch.Generator().manual_seed(7)
    lists: list[list[torch.Tensor]] = []
    for form in formats:
        parts: list[tuple[torch.Tensor, ...]] = []
        for n in SIZES:
            values = torch.randn(n, generator=generator).abs()
            values[n // 2 : n // 2 + 200] = 0
            room = [torch.zeros(len(t) + gap, dtype=t.dtype) for t in form.encode(values)]
            parts.append(tuple(r[gap:].copy_(t) for r, t in zip(room, form.encode(values), strict=True)))
        lists += [list(column) for column in zip(*parts, strict=True)]
    behind = len(formats[0].columns)
    return [lists[0], *lists[behind:], *lists[1:behind]]  # what else stores the parameter comes last


@pytest.mark.parametrize(
    ("variant", "backwards", "gap"),
    [
        pytest.param(variant, backwards, (variant + backwards) % 2, marks=MARKS[not backwards])
        for variant in range(len(VARIANTS))
        for backwards in (False, True)
    ],
)
def test_played_threads_leave_the_bits_of_numba(
    variant: int, backwards: bool, gap: int, capfd: pytest.CaptureFixture[str]
) -> None:
    rule, formats, threads = VARIANTS[variant]
    scalars = {"by": 1.0} if rule is falling else scalars_for(rule)
    play = build(NAMES, functors([RULES["adamw"], RULES["lion"], falling]), formats=FORMATS)[variant]
    results = []
    for use in ("g++", "numba"):
        lists = lists_of(rule, formats, gap)
        sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads])
        if use == "numba":
            sweep.run(scalars, seed=5)
        else:
            seed = [] if all(form.plain for form in formats) else [5.0]
            sweep.table.host.set_scalars([[*rule.uniforms(scalars), *seed]])
            launch(play, sweep.table.host, 0, backwards)
        results.append(lists)
    assert "runtime error" not in (said := capfd.readouterr().err), said
    for key, mine, theirs in zip(Stored(rule, formats).keys, *results, strict=True):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"{key} {i}"
    assert any(not torch.equal(a, b) for a, b in zip(results[0][0], lists_of(rule, formats, gap)[0], strict=True))


def test_kernels_share_what_numba_compiles_of_a_format() -> None:
    """A store of 8 bits is most of what it compiles; nothing in it depends on the rule or on the parameter's dtype."""
    drawn = FIRST["by step"]
    shared = [
        {
            *re.findall(
                r"from (pagedopt_\w+)", cpu_text.source(RULES[name], formats_of(RULES[name], (dtype,) * 2, drawn))
            )
        }
        for name, dtype in (("adamw", F32), ("adamw", BF16), ("lion", F16), ("adamw", F64))
    ]
    assert shared[0] == shared[1] == shared[2] != set()
    assert not shared[0] & shared[3], "in float64 a number is rounded once less"


@pytest.mark.parametrize("arch", [pytest.param("sm_75", marks=pytest.mark.long), "sm_90"])
def test_blocks_compile(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    for name in ("adamw", "lion"):
        rule = RULES[name]
        mine = [(forms, threads) for one, forms, threads in VARIANTS if one is rule]
        for small in (False, True):
            names = {source.instance(rule, forms, threads, "TableAt", small_grid=small) for forms, threads in mine}
            cubin, _ = nvrtc.compile_cuda(source.text(rule, FORMATS), tuple(sorted(names)), arch)
            assert cubin[:4] == b"\x7fELF"


def test_a_parameter_and_what_it_has_lost_are_a_float32() -> None:
    rule = RULES["adamw"]
    wide, split = (of_dtype(F32),) * 4, (HALVES, *[of_dtype(F32)] * 3)
    whole, halves = lists_of(rule, wide), lists_of(rule, split)
    for step in range(1, 4):
        for lists, formats in ((whole, wide), (halves, split)):
            Sweep(rule, lists, formats=formats).run(scalars_for(rule, step))
    for i, want in enumerate(whole[0]):
        assert torch.equal(HALVES.decode(halves[0][i], halves[-1][i], numel=len(want)), want)
        assert halves[0][i].dtype is BF16


def rows_of(numels: Sequence[int], cut: int) -> Rows:
    """Tensors cut into rows of ``cut`` elements, the last ones first."""
    parts = [(i, at, min(cut, n - at)) for i, n in enumerate(numels) for at in range(0, n, cut)][::-1]
    tensor, offset, numel = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    return Rows(tensor, offset, numel, np.zeros((len(parts), 5), np.uint64))


@pytest.mark.parametrize("rows", [None, rows_of(SIZES, 1024)], ids=["whole", "in parts"])
def test_a_format_is_told_where_an_element_stands(rows: Rows | None) -> None:
    rule = RULES["lion"]
    lists = lists_of(rule, formats_of(rule, (F32, F32), PLACES))
    sweep = Sweep(rule, lists, formats=formats_of(rule, (F32, F32), PLACES), rows=rows)
    sweep.run(scalars_for(rule), seed=2**52 + 1)
    for i, n in enumerate(SIZES):
        assert lists[2][i].tolist() == [i] * n
        assert lists[3][i].tolist() == list(range(n))
        assert lists[4][i].tolist() == [2**52 + 1] * n


def test_a_format_is_told_so_beside_one_with_larger_blocks() -> None:
    rule, forms = RULES["adamw"], (*map(of_dtype, (F32, F32)), PLACES, INT8)
    lists = lists_of(rule, forms)
    Sweep(rule, lists, formats=forms).run(scalars_for(rule), seed=7)
    assert [t.tolist() for t in lists[3]] == [list(range(n)) for n in SIZES]


def test_blocks_do_not_depend_on_how_the_work_is_cut() -> None:
    rule = RULES["adamw"]
    forms = formats_of(rule, (F32, F32))
    results = []
    for rows, count in ((None, 1), (None, 3), (rows_of(SIZES, 128), 2)):
        if rows is not None:
            rows = Rows(rows.tensor, rows.offset, rows.numel, np.zeros((len(rows.tensor), 6), np.uint64))
        lists = lists_of(rule, forms)
        with threads(count):
            Sweep(rule, lists, formats=forms, rows=rows).run(scalars_for(rule))
        results.append(lists)
    assert all(same_bits(results[0], other) for other in results[1:])


NOT_TO_BE_FOLLOWED = [
    ({"block": 48}, ValueError, "block is 48; it must be a power of two up to 1024"),
    ({"block": 2048}, ValueError, "block is 2048"),
    ({"columns": ()}, ValueError, "has no columns"),
    ({"columns": (Column("a", torch.int8), Column("", torch.int8))}, ValueError, "only the first may be ''"),
    ({"columns": (Column("a", torch.int8, 128),)}, ValueError, "an entry per 128 elements; a block has 64"),
    ({"columns": (Column("a", torch.complex64),)}, ValueError, "is real"),
    ({"columns": (Column("live", torch.int8),)}, ValueError, "a name that a variable may have, and none of S, "),
    ({"columns": (Column("two words", torch.int8),)}, ValueError, "a name that a variable may have"),
    ({"columns": (Column("lambda", torch.int8),)}, ValueError, "a name that a variable may have"),
    ({"arithmetic": torch.bfloat16}, ValueError, "arithmetic is torch.bfloat16"),
]


@pytest.mark.parametrize(("change", "error", "text"), NOT_TO_BE_FOLLOWED)
def test_a_format_that_kernels_could_not_follow_is_refused(change: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        dataclasses.replace(INT8, **change)


def test_blocks_that_do_not_go_together_are_refused() -> None:
    rule = RULES["adamw"]
    wide = dataclasses.replace(INT8, name="wide", block=1024)
    columns = Column("codes", torch.int8), Column("scale", torch.float32, 16)
    narrow = dataclasses.replace(INT8, name="narrow", block=16, columns=columns)
    with pytest.raises(ValueError, match="'narrow' and 'wide' have blocks of 16 and 1024"):
        Stored(rule, (*map(of_dtype, (F32, F32)), wide, narrow))
    for other in (FIRST["by step"], SECOND["nearest"]):
        with pytest.raises(ValueError, match=r"blocks of 64 and 256 elements.* more than 128 must all have the same"):
            Stored(rule, (*map(of_dtype, (F32, F32)), INT8, other))
    with pytest.raises(ValueError, match="chunk_numel is 96; format 'int8 in blocks of 64' needs a multiple of 64"):
        Sweep(rule, lists_of(rule, formats_of(rule, (F32, F32))), formats=formats_of(rule, (F32, F32)),
              geometry=Geometry(96, 32))  # fmt: skip


def test_a_column_of_another_dtype_or_shape_is_refused() -> None:
    rule = RULES["lion"]
    forms = formats_of(rule, (F32, F32))
    lists = lists_of(rule, forms)
    with pytest.raises(TypeError, match=r"exp_avg.codes is torch.uint8; format 'int8 in blocks of 64' has torch.int8"):
        Sweep(rule, [*lists[:2], [t.to(torch.uint8) for t in lists[2]], lists[3]], formats=forms)
    with pytest.raises(ValueError, match=r"tensor 3 of exp_avg.scale has shape \(1,\), the table has \(2,\)"):
        Sweep(rule, [*lists[:3], [t[:1] for t in lists[3]]], formats=forms)
