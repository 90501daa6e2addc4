"""The CUDA text of parameters of 16 bits: played by g++, it leaves Numba's bits; NVRTC compiles it."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvrtc_support
import pytest
import torch
from host_build import build, functors, launch
from int8_support import get, put, same
from support import BF16, F32, scalars_for

from pagedopt import Sweep
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FIRST, SECOND
from pagedopt.formats.sixteen import DRAWN, SPLIT
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import BLOCK, Geometry

#: Parts of quads, whole rounds, several chunks, nothing.
SIZES = (1, 3, 255, 256, 258, 0, 4096, 1024 + 31, 9000)
SHAPES = {32: Geometry(1024, 32), BLOCK: Geometry(8192, BLOCK)}
ADAMW, LION = RULES["adamw"], RULES["lion"]
SEED = (5 << 32) + 3
#: Of float32: around the largest number, and around what float16 rounds to infinity, of both signs.
EDGES = [
    sign | bits for sign in (0, 1 << 31) for bits in (*range(0x7F7FFFF0, 0x7F800010), *range(0x477FEFF0, 0x477FF010))
]
#: Where the tensors begin in their parameters: at quads, amid them, amid the 256 elements that two calls share, far.
FIRSTS = (0, 4, 1, 128, 130, 7, 3, 0, (256 << 33) + 5)

Variant = tuple[Rule, tuple[Format, ...], int]


def variant(rule: Rule, param: Format, grad: torch.dtype, threads: int, *states: Format) -> Variant:
    return rule, (param, of_dtype(grad), *(states or [of_dtype(F32)] * (len(rule.inputs) - 2))), threads


DRAWN_INT8 = (FIRST["by step"], SECOND["by step"])
VARIANTS = [
    variant(ADAMW, SPLIT["bfloat16+16"], F32, 512), variant(ADAMW, SPLIT["bfloat16+16"], BF16, 32),
    variant(ADAMW, SPLIT["bfloat16+8"], BF16, 512, *DRAWN_INT8), variant(ADAMW, SPLIT["bfloat16+8"], F32, 32),
    variant(ADAMW, DRAWN[BF16], BF16, 512), variant(LION, DRAWN[BF16], F32, 32, FIRST["nearest"]),
    variant(LION, DRAWN[torch.float16], torch.float16, 512), variant(ADAMW, DRAWN[BF16], torch.float64, 32),
]  # fmt: skip
#: They store each format, and load it again.
PATTERNS = [
    variant(rule, form, F32, threads)
    for form in (*SPLIT.values(), *DRAWN.values())
    for rule, threads in ((get, 32), (put, 512))
]
VARIANTS += PATTERNS
FORMATS = (*DRAWN_INT8, *SPLIT.values())
NAMES = tuple(source.instance(rule, forms, threads, "TableAt") for rule, forms, threads in VARIANTS)
IDS = [f"{rule.name} {forms[0].name} {forms[-1].name} {threads}" for rule, forms, threads in VARIANTS]


def lists_of(rule: Rule, formats: tuple[Format, ...], gap: int = 0) -> list[list[torch.Tensor]]:
    """Columns in the order of a table: what a parameter has lost comes last."""
    generator = torch.Generator().manual_seed(7)
    columns: list[list[list[torch.Tensor]]] = []
    for form in formats:
        parts = []
        for n in SIZES:
            values = torch.randn(n, generator=generator).abs() * 0.02
            if form is formats[1] and n > 100:
                values[50:54] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
            encoded = form.encode(values.to(form.arithmetic))
            room = [torch.full((len(t) + gap + 9,), 7).to(t.dtype) for t in encoded]
            parts.append([r[gap : gap + len(t)].copy_(t) for r, t in zip(room, encoded, strict=True)])
        columns.append([list(column) for column in zip(*parts, strict=True)])
    (first, *lost), *rest = columns
    return [first, *(column for each in rest for column in each), *lost]


def updated(use: str, index: int, gap: int = 0, backwards: bool = False) -> list[list[torch.Tensor]]:
    """The lists after one update by Numba or by g++'s play of the CUDA text."""
    rule, formats, threads = VARIANTS[index]
    lists = lists_of(rule, formats, gap)
    how: dict[str, Any] = {"geometry": SHAPES[threads], "numbers": [3, 1, 4, 15, 9, 2, 6, 535, 8]}
    if not any(form.block > 1 for form in formats):
        how["firsts"] = FIRSTS
    sweep = Sweep(rule, lists, formats=formats, **how)
    if use == "Numba":
        sweep.run(scalars_for(rule), seed=SEED)
    else:
        play = build(NAMES, functors([ADAMW, LION, get, put]), formats=FORMATS)[index]
        sweep.set_scalars([rule.uniforms(scalars_for(rule))], SEED)
        launch(play, sweep.table.host, 0, backwards)
    return lists


@pytest.mark.parametrize("index", range(len(VARIANTS) - len(PATTERNS)), ids=IDS[: -len(PATTERNS)])
def test_played_threads_leave_the_bits_of_numba(index: int, capfd: pytest.CaptureFixture[str]) -> None:
    numba = updated("Numba", index)
    for gap, backwards in ((0, False), (1, True)):
        played = updated("g++", index, gap, backwards)
        assert "runtime error" not in (said := capfd.readouterr().err), said
        assert [i for i, (a, b) in enumerate(zip(numba, played, strict=True)) if not same(a, b)] == []
        for t in (t for column in played for t in column):
            assert (t.as_strided((9,), (1,), t.storage_offset() + len(t)) == 7).all(), "written behind the end"
    rule, formats, _ = VARIANTS[index]
    assert not same(numba[0], lists_of(rule, formats)[0])


@pytest.mark.parametrize("index", range(len(VARIANTS) - len(PATTERNS), len(VARIANTS)), ids=IDS[-len(PATTERNS) :])
def test_every_kind_of_number_is_stored_and_loaded_as_by_numba(index: int) -> None:
    """All upper halves, with lower ones at and beside ties: denormals, the largest, infinities, NaN."""
    rule, formats, threads = VARIANTS[index]
    lows = (0, 1, 0x7FFF, 0x8000, 0xFF80, 0xFFFF)
    bits = np.array([high << 16 | low for low in lows for high in range(0, 1 << 16, 7)] + EDGES, np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    results = []
    for use in ("Numba", "g++"):
        (first, *lost), level = formats[0].encode(values), values.clone()
        if rule is put and lost:  # what no step leaves: any rest beside any parameter
            lost[0].view(torch.uint8).copy_(torch.arange(lost[0].nbytes, dtype=torch.int64).mul(41).to(torch.uint8))
        lists = [[first], [level], *[[column] for column in lost]]
        sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=[3])
        if use == "Numba":
            sweep.run({}, seed=SEED)
        else:
            sweep.set_scalars([[]], SEED)
            launch(build(NAMES, functors([ADAMW, LION, get, put]), formats=FORMATS)[index], sweep.table.host)
        results.append([first, level, *lost])
    assert same(*results)


def test_a_kernel_of_float32_has_no_more_text_than_before() -> None:
    """Formats of parameters are no part of what is compiled for plain numbers."""
    plain = source.text(ADAMW, [of_dtype(F32)] * 4)
    assert "Philox" not in plain
    assert "Spot" not in plain


@pytest.mark.parametrize("arch", ["sm_75", pytest.param("sm_90", marks=pytest.mark.long), "sm_100"])
def test_nvrtc_compiles_all(arch: str) -> None:
    library = nvrtc_support.nvrtc()
    if int(arch[3:]) not in (known := library.nvrtcGetSupportedArchs()[1]):
        pytest.skip(f"this NVRTC compiles for {known}, not for {arch}")
    for rule in (ADAMW, LION):
        names = {name for name, (one, *_) in zip(NAMES, VARIANTS, strict=True) if one is rule}
        cubin, symbols = nvrtc.compile_cuda(source.text(rule, FORMATS), tuple(sorted(names)), arch)
        assert cubin[:4] == b"\x7fELF"
        assert len(set(symbols)) == len(names)
