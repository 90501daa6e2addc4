"""The CUDA text of int8: played by g++, it leaves Numba's bits and the oracle's; NVRTC compiles it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import int8_oracle as oracle
import numpy as np
import nvrtc_support
import pytest
import torch
from host_build import build, functors, launch
from int8_oracle import Draw
from int8_support import put, same
from support import BF16, F32, F64, scalars_for

from pagedopt import Sweep
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FIRST, SECOND
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import BLOCK, Geometry
from pagedopt.tables.pointers import Rows

#: Whole blocks and parts of them, more than a round of a warp or of a block of threads, and nothing at all.
SIZES = (1, 255, 256, 257, 0, 4096, 1024 + 31, 9000)
#: Warps and blocks of threads per chunk; a chunk has several rounds.
SHAPES = {32: Geometry(1024, 32), BLOCK: Geometry(8192, BLOCK)}
ADAMW, LION = RULES["adamw"], RULES["lion"]
SEED = (5 << 32) + 3

Variant = tuple[Rule, tuple[Format, ...], int]


def variant(rule: Rule, param: torch.dtype, threads: int, *states: Format) -> Variant:
    """A rule on parameters of a dtype; gradients are float32, or bfloat16 beside such parameters."""
    grads = [of_dtype(BF16 if param is BF16 else F32)] * (len(rule.inputs) - 1 - len(states))
    return rule, (of_dtype(param), *grads, *states), threads


VARIANTS = [
    variant(ADAMW, F32, 32, FIRST["nearest"], SECOND["nearest"]),
    variant(ADAMW, F32, 512, FIRST["by step"], SECOND["nearest"]),
    variant(ADAMW, F32, 32, FIRST["by step"], SECOND["by step"]),
    variant(ADAMW, F32, 512, FIRST["by step"], SECOND["by step"]),
    variant(LION, BF16, 512, FIRST["by data"]), variant(LION, F64, 32, FIRST["nearest"]),
    variant(put, F64, 512, SECOND["by step"]), variant(put, F32, 32, SECOND["by step"]),
    variant(put, F32, 32, FIRST["by step"]), variant(put, F32, 512, FIRST["by data"]),
]  # fmt: skip
FORMATS = (FIRST["nearest"], SECOND["nearest"])
NAMES = tuple(source.instance(rule, forms, threads, "TableAt") for rule, forms, threads in VARIANTS)
PLAYED = [
    f"{rule.name} {forms[0].name} {' '.join(form.name[6:] for form in forms if not form.plain)} {threads}"
    for rule, forms, threads in VARIANTS
]


def indices(*often: int, long: Sequence[int]) -> list[Any]:
    """Variants, some of which are tried where there is time."""
    marked = [(i, []) for i in often] + [(i, [pytest.mark.long]) for i in long]
    return [pytest.param(i, id=PLAYED[i], marks=marks) for i, marks in marked]


def values_of(name: str, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary numbers, with zeros in the middle; gradients have some that are not finite, and a block of tiny ones."""
    values = torch.randn(numel, generator=generator)
    if name in ("exp_avg_sq", "value"):
        values.abs_()
    values[numel // 2 : numel // 2 + 300] = 0
    if numel > 4000 and name in ("grad", "value"):
        values[:256] *= 1e-25
        values[600], values[601], values[numel - 1] = torch.nan, torch.inf, 1e30
    return values


def lists_of(rule: Rule, formats: Sequence[Format], gap: int = 0) -> list[list[torch.Tensor]]:
    """Columns of parameters of ``SIZES``, ``gap`` entries off their start, with entries of 7 behind."""
    generator = torch.Generator().manual_seed(7)
    lists: list[list[torch.Tensor]] = []
    for name, form in zip(rule.inputs, formats, strict=True):
        parts = []
        for n in SIZES:
            encoded = form.encode(values_of(name, n, generator).to(form.arithmetic))
            room = [torch.full((len(t) + gap + 9,), 7).to(t.dtype) for t in encoded]
            parts.append([r[gap : gap + len(t)].copy_(t) for r, t in zip(room, encoded, strict=True)])
        lists += [list(column) for column in zip(*parts, strict=True)]
    return lists


def rows_of(cut: int, columns: int) -> Rows:
    """Parameters of ``SIZES`` cut into rows of ``cut`` elements, the last ones first."""
    parts = [(i, at, min(cut, n - at)) for i, n in enumerate(SIZES) for at in range(0, n, cut)][::-1]
    tensor, offset, numel = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    return Rows(tensor, offset, numel, np.zeros((len(parts), columns), np.uint64))


def updated(use: str, index: int, gap: int = 0, backwards: bool = False, **how: Any) -> list[list[torch.Tensor]]:
    """The lists after one update by Numba or by g++'s play of the CUDA text."""
    rule, formats, threads = VARIANTS[index]
    lists = lists_of(rule, formats, gap)
    numbers = [3, 1, 4, 15, 9, 2, 6, 535]
    sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=numbers, **how)
    if use == "Numba":
        sweep.run(scalars_for(rule), seed=SEED)
    else:
        play = build(NAMES, functors([ADAMW, LION, put]), formats=FORMATS)[index]
        sweep.set_scalars([rule.uniforms(scalars_for(rule))], SEED)
        launch(play, sweep.table.host, 0, backwards)
    return lists


def check(capfd: pytest.CaptureFixture[str], index: int, *others: list[list[torch.Tensor]]) -> None:
    """All lists have the same bits, which differ from those of before, and all around them is still 7."""
    rule, formats, _ = VARIANTS[index]
    assert "runtime error" not in (said := capfd.readouterr().err), said
    first = others[0]
    for other in others[1:]:
        assert [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if not same(a, b)] == []
    changed = rule.writes[0]  # nothing in front of it has several columns
    assert not same(first[changed], lists_of(rule, formats)[changed])
    for t in (t for lists in others for column in lists for t in column):
        assert (t.as_strided((9,), (1,), t.storage_offset() + len(t)) == 7).all(), "written behind the end"


@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("index", indices(1, 2, 4, 6, long=(0, 3, 5, 7, 8, 9)))
def test_played_threads_leave_the_bits_of_numba(index: int, backwards: bool, capfd: pytest.CaptureFixture[str]) -> None:
    numba = updated("Numba", index)
    check(capfd, index, numba, *(updated("g++", index, gap, backwards) for gap in (0, 1)))


@pytest.mark.parametrize("index", indices(2, 6, long=(1, 9)))
def test_rows_that_begin_in_the_middle_of_a_parameter_change_no_bit(
    index: int, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = updated("Numba", index)
    cut = [
        updated(use, index, gap, rows=rows_of(numel, len(whole)))
        for use, gap, numel in (("Numba", 0, 256), ("g++", 0, 256), ("g++", 1, 1280), ("g++", 0, 4096))
    ]
    check(capfd, index, whole, *cut)


@pytest.mark.parametrize("first", [0, 256 << 33], ids=["at the start", "beyond 32 bits"])
@pytest.mark.parametrize("use", ["Numba", "g++"])
@pytest.mark.parametrize("index", indices(6, 8, long=(7, 9)))
def test_elements_are_drawn_for_as_the_oracle_says(index: int, use: str, first: int) -> None:
    """The four words of a counter and both of the key count; so does where in a large parameter a row begins."""
    rule, formats, _ = VARIANTS[index]
    threads = VARIANTS[index][2]
    lists, numbers = lists_of(rule, formats), [5, 1 << 31, 3, 2, 0, 70_000, 1, 9]
    sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=numbers)
    sweep.table.host.row_words[:, len(lists) + 1] += first
    seed, step = (1 << 21) - 1, 77_000
    sweep.set_scalars([[]], seed << 32 | step)
    if use == "Numba":
        sweep.launch(None)
    else:
        launch(build(NAMES, functors([ADAMW, LION, put]), formats=FORMATS)[index], sweep.table.host)
    for i, values in enumerate(lists[0]):
        draw = Draw(seed, None if formats[1] is FIRST["by data"] else step, numbers[i], 1, first)
        want = oracle.encode(4 if formats[1] in SECOND.values() else 3, values.numpy(), draw)
        assert same([lists[1][i], lists[2][i]], want), i


@pytest.mark.parametrize("arch", ["sm_75", pytest.param("sm_90", marks=pytest.mark.long), "sm_100"])
def test_nvrtc_compiles_all(arch: str) -> None:
    library = nvrtc_support.nvrtc()
    if int(arch[3:]) not in (known := library.nvrtcGetSupportedArchs()[1]):
        pytest.skip(f"this NVRTC compiles for {known}, not for {arch}")
    for rule in (ADAMW, LION):
        mine = [(forms, threads) for one, forms, threads in VARIANTS if one is rule]
        names = {source.instance(rule, *one, "TableAt", small_grid=arch == "sm_75") for one in mine}
        text = source.text(rule, FORMATS)
        cubin, symbols = nvrtc.compile_cuda(text, tuple(sorted(names)), arch)
        assert cubin[:4] == b"\x7fELF"
        assert len(set(symbols)) == len(names)
