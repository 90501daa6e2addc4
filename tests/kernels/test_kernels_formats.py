"""The text of formats, ours and others': played by g++ it leaves Numba's bits and the oracle's; NVRTC compiles it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import int8_oracle as oracle
import kernel_texts
import numpy as np
import pytest
import torch
from formats_under_test import TwoHalves, WhereItStands
from int8_oracle import Draw
from int8_support import get, put, same
from often import long_but
from support import BF16, F16, F32, F64, scalars_for

import pagedopt
from pagedopt import Sweep
from pagedopt.formats import Column
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FIRST, SECOND
from pagedopt.formats.sixteen import DRAWN, SPLIT
from pagedopt.kernels import cpu_text, nvrtc, source
from pagedopt.launch.sweep import Stored
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import BLOCK, Geometry
from pagedopt.tables.pointers import Rows
from tests.card.kernels import Play, build, functors, launch
from tests.outside.element_format import Fixed16
from tests.outside.format import Int8Blocks

ADAMW, LION = RULES["adamw"], RULES["lion"]
#: Of parameters: parts of quads, whole blocks and parts of them, more than a round of a warp or of a block of threads,
#: and nothing at all.
SIZES = (1, 3, 255, 256, 258, 0, 4096, 1024 + 31, 9000)
NUMBERS = (3, 1, 4, 15, 9, 2, 6, 535, 8)
#: Warps and blocks of threads per chunk; a chunk has several rounds.
SHAPES = {32: Geometry(1024, 32), BLOCK: Geometry(8192, BLOCK)}
SEED = (5 << 32) + 3
#: Of float32: around the largest number, and around what float16 rounds to infinity, of both signs.
EDGES = [
    sign | bits for sign in (0, 1 << 31) for bits in (*range(0x7F7FFFF0, 0x7F800010), *range(0x477FEFF0, 0x477FF010))
]
#: Where the tensors begin in their parameters: at quads, amid them, amid the 256 elements that two calls share, far.
FIRSTS = (0, 4, 1, 128, 130, 7, 3, 0, (256 << 33) + 5)
#: A rule, the format of each of its inputs, and the threads of a block.
Variant = tuple[Rule, tuple[Format, ...], int]
Lists = list[list[torch.Tensor]]


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


def magnitudes(name: str, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary numbers that are not negative, and zeros in some blocks."""
    values = torch.randn(numel, generator=generator).abs()
    values[numel // 2 : numel // 2 + 200] = 0
    return values


@pagedopt.rule
def falling(param, grad, level, *, by):  # type: ignore[no-untyped-def]
    """What is behind the last element, which is 0, becomes the largest of its block."""
    param = param - grad
    level = level - by
    return param, level


def numbers_for(rule: Rule) -> dict[str, float]:
    return {"by": 1.0} if rule is falling else scalars_for(rule)


@dataclass(frozen=True)
class Kernels:
    """Kernels of one text: ``variants`` of them, the ``formats`` whose texts they need, and what they are run on."""

    variants: Sequence[Variant]
    formats: tuple[Format, ...]
    values: Callable[[str, int, torch.Generator], torch.Tensor] = values_of

    @property
    def rules(self) -> list[Rule]:
        return list(dict.fromkeys(rule for rule, *_ in self.variants))

    def play(self, index: int) -> Play:
        """What plays the CUDA text of a variant."""
        names = tuple(source.instance(rule, forms, threads, "TableAt") for rule, forms, threads in self.variants)
        return build(names, functors(self.rules), formats=self.formats)[index]

    def lists_of(self, index: int, gap: int = 0) -> Lists:
        """Columns of parameters of ``SIZES``, ``gap`` entries off their start, with entries of 7 behind."""
        rule, formats, _ = self.variants[index]
        generator = torch.Generator().manual_seed(7)
        columns: list[Lists] = []
        for name, form in zip(rule.inputs, formats, strict=True):
            parts = []
            for n in SIZES:
                encoded = form.encode(self.values(name, n, generator).to(form.arithmetic))
                room = [torch.full((len(t) + gap + 9,), 7).to(t.dtype) for t in encoded]
                parts.append([r[gap : gap + len(t)].copy_(t) for r, t in zip(room, encoded, strict=True)])
            columns.append([list(column) for column in zip(*parts, strict=True)])
        (first, *lost), *rest = columns  # what a parameter has lost comes last
        return [first, *(column for each in rest for column in each), *lost]

    def updated(self, use: str, index: int, gap: int = 0, backwards: bool = False, **how: Any) -> Lists:
        """The lists after one update by Numba or by g++'s play of the CUDA text."""
        rule, formats, threads = self.variants[index]
        lists = self.lists_of(index, gap)
        sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=NUMBERS, **how)
        if use == "Numba":
            sweep.run(numbers_for(rule), seed=SEED)
        else:
            sweep.set_scalars([rule.uniforms(numbers_for(rule))], SEED)
            launch(self.play(index), sweep.table.host, 0, backwards)
        return lists

    def check(self, capfd: pytest.CaptureFixture[str], index: int, first: Lists, *others: Lists) -> None:
        """All lists have the same bits, which differ from those of before, and all around them is still 7."""
        rule, *_ = self.variants[index]
        assert "runtime error" not in (said := capfd.readouterr().err), said
        for other in others:
            assert [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if not same(a, b)] == []
        changed = rule.writes[0]  # nothing in front of it has several columns there
        assert not same(first[changed], self.lists_of(index)[changed])
        for t in (t for lists in others for column in lists for t in column):
            assert (t.as_strided((9,), (1,), t.storage_offset() + len(t)) == 7).all(), "written behind the end"


def variant(
    rule: Rule, param: Format | torch.dtype, grad: torch.dtype | None, threads: int, *states: Format
) -> Variant:
    """A gradient of None: the rule has none."""
    grads = [] if grad is None else [of_dtype(grad)]
    plain = [of_dtype(F32)] * (len(rule.inputs) - 2)
    return rule, (param if isinstance(param, Format) else of_dtype(param), *grads, *(states or plain)), threads


INT8 = Kernels([
    variant(ADAMW, F32, F32, 32, FIRST["nearest"], SECOND["nearest"]),
    variant(ADAMW, F32, F32, 512, FIRST["by step"], SECOND["nearest"]),
    variant(ADAMW, F32, F32, 32, FIRST["by step"], SECOND["by step"]),
    variant(ADAMW, F32, F32, 512, FIRST["by step"], SECOND["by step"]),
    variant(LION, BF16, BF16, 512, FIRST["by data"]), variant(LION, F64, F32, 32, FIRST["nearest"]),
    variant(put, F64, None, 512, SECOND["by step"]), variant(put, F32, None, 32, SECOND["by step"]),
    variant(put, F32, None, 32, FIRST["by step"]), variant(put, F32, None, 512, FIRST["by data"]),
], (FIRST["nearest"], SECOND["nearest"]))  # fmt: skip
DRAWN_INT8 = (FIRST["by step"], SECOND["by step"])
UPDATES = [
    variant(ADAMW, SPLIT["bfloat16+16"], F32, 512), variant(ADAMW, SPLIT["bfloat16+16"], BF16, 32),
    variant(ADAMW, SPLIT["bfloat16+8"], BF16, 512, *DRAWN_INT8), variant(ADAMW, SPLIT["bfloat16+8"], F32, 32),
    variant(ADAMW, DRAWN[BF16], BF16, 512), variant(LION, DRAWN[BF16], F32, 32, FIRST["nearest"]),
    variant(LION, DRAWN[F16], F16, 512), variant(ADAMW, DRAWN[BF16], F64, 32),
]  # fmt: skip
#: They store each format, and load it again.
PATTERNS = [
    variant(rule, form, F32, threads)
    for form in (*SPLIT.values(), *DRAWN.values())
    for rule, threads in ((get, 32), (put, 512))
]
SIXTEEN = Kernels([*UPDATES, *PATTERNS], (*DRAWN_INT8, *SPLIT.values()))
BLOCKS, PLACES, HALVES, FIXED = Int8Blocks(), WhereItStands(), TwoHalves(), Fixed16()
#: What users write.
OTHERS = Kernels([
    variant(ADAMW, F32, F32, 32, BLOCKS, BLOCKS), variant(ADAMW, F32, F32, 512, BLOCKS, BLOCKS),
    variant(ADAMW, BF16, F32, 512, BLOCKS, BLOCKS), variant(LION, F32, F32, 32, BLOCKS),
    variant(LION, F64, F32, 32, PLACES), variant(ADAMW, HALVES, F32, 512),
    variant(ADAMW, F32, F32, 512, PLACES, BLOCKS),  # blocks of different sizes
    variant(falling, F32, F32, 32, BLOCKS), variant(LION, F32, F32, 512, FIXED), variant(LION, F64, F32, 512, FIXED),
], (BLOCKS, PLACES, HALVES, FIXED), magnitudes)  # fmt: skip


def indices(kernels: Kernels, *often: int, long: Sequence[int] = ()) -> list[Any]:
    """Variants, some of which are tried where there is time."""
    names = [f"{rule.name} {forms[0].name} {forms[-1].name} {threads}" for rule, forms, threads in kernels.variants]
    marked = [(i, []) for i in often] + [(i, [pytest.mark.long]) for i in long]
    return [pytest.param(kernels, i, id=names[i], marks=marks) for i, marks in marked]


def rows_of(cut: int) -> Rows:
    """Parameters of ``SIZES`` cut into rows of ``cut`` elements, the last ones first."""
    parts = [(i, at, min(cut, n - at)) for i, n in enumerate(SIZES) for at in range(0, n, cut)][::-1]
    tensor, offset, numel = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    return Rows(tensor, offset, numel, np.zeros((1, 1), np.uint64))


@pytest.mark.parametrize(
    ("kernels", "index"),
    [*indices(INT8, 1, 2, 4, 6, long=(0, 3, 5, 7, 8, 9)), *indices(SIXTEEN, *range(len(UPDATES))),
     *indices(OTHERS, *range(len(OTHERS.variants)))],
)  # fmt: skip
def test_played_threads_leave_the_bits_of_numba(
    kernels: Kernels, index: int, capfd: pytest.CaptureFixture[str]
) -> None:
    _, formats, _ = kernels.variants[index]
    how = {} if any(form.block > 1 for form in formats) else {"firsts": FIRSTS}
    numba = kernels.updated("Numba", index, **how)
    kernels.check(capfd, index, numba, *(kernels.updated("g++", index, gap, gap > 0, **how) for gap in (0, 1)))


@pytest.mark.parametrize(("kernels", "index"), indices(INT8, 2, 6, long=(1, 9)))
def test_rows_that_begin_in_the_middle_of_a_parameter_change_no_bit(
    kernels: Kernels, index: int, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = kernels.updated("Numba", index)
    cut = [
        kernels.updated(use, index, gap, rows=rows_of(numel))
        for use, gap, numel in (("Numba", 0, 256), ("g++", 0, 256), ("g++", 1, 1280), ("g++", 0, 4096))
    ]
    kernels.check(capfd, index, whole, *cut)


@pytest.mark.parametrize("first", [0, 256 << 33], ids=["at the start", "beyond 32 bits"])
@pytest.mark.parametrize("use", ["Numba", "g++"])
@pytest.mark.parametrize(("kernels", "index"), indices(INT8, 6, 8, long=(7, 9)))
def test_elements_are_drawn_for_as_the_oracle_says(kernels: Kernels, index: int, use: str, first: int) -> None:
    """The four words of a counter and both of the key count; so does where in a large parameter a row begins."""
    rule, formats, threads = kernels.variants[index]
    lists, numbers = kernels.lists_of(index), [5, 1 << 31, 3, 2, 0, 70_000, 1, 9, 4]
    sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=numbers)
    sweep.table.host.row_words[:, len(lists) + 1] += first
    seed, step = (1 << 21) - 1, 77_000
    sweep.set_scalars([[]], seed << 32 | step)
    if use == "Numba":
        sweep.launch(None)
    else:
        launch(kernels.play(index), sweep.table.host)
    for i, values in enumerate(lists[0]):
        draw = Draw(seed, None if formats[1] is FIRST["by data"] else step, numbers[i], 1, first)
        want = oracle.encode(4 if formats[1] in SECOND.values() else 3, values.numpy(), draw)
        assert same([lists[1][i], lists[2][i]], want), i


@pytest.mark.parametrize(("kernels", "index"), indices(SIXTEEN, *range(len(UPDATES), len(UPDATES) + len(PATTERNS))))
def test_every_kind_of_number_is_stored_and_loaded_as_by_numba(kernels: Kernels, index: int) -> None:
    """All upper halves, with lower ones at and beside ties: denormals, the largest, infinities, NaN."""
    rule, formats, threads = kernels.variants[index]
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
            launch(kernels.play(index), sweep.table.host)
        results.append([first, level, *lost])
    assert same(*results)


#: What depends on the architecture is in int8 alone.
COMPILED = [("int8", "sm_75"), ("int8", "sm_100"), ("sixteen", "sm_100"), ("others", "sm_75")]
TO_COMPILE = long_but(
    itertools.product(("int8", "sixteen", "others"), ("sm_75", "sm_90", "sm_100")), COMPILED.__contains__
)


@pytest.mark.parametrize("which", TO_COMPILE, ids=" ".join)
def test_nvrtc_compiles_all(which: tuple[str, str]) -> None:
    """The test is skipped where it knows no such GPU."""
    kernels, arch = {"int8": INT8, "sixteen": SIXTEEN, "others": OTHERS}[which[0]], which[1]
    library = kernel_texts.nvrtc()
    if int(arch[3:]) not in (known := library.nvrtcGetSupportedArchs()[1]):
        pytest.skip(f"this NVRTC compiles for {known}, not for {arch}")
    for rule in (rule for rule in kernels.rules if "grad" in rule.inputs):
        mine = [(forms, threads) for one, forms, threads in kernels.variants if one is rule]
        names = {source.instance(rule, *one, "TableAt", small_grid=arch == "sm_75") for one in mine}
        text = source.text(rule, kernels.formats)
        cubin, symbols = nvrtc.compile_cuda(text, tuple(sorted(names)), arch)
        assert cubin[:4] == b"\x7fELF"
        assert len(set(symbols)) == len(names)


# ---- formats of others ----


def test_kernels_share_what_numba_compiles_of_a_format() -> None:
    """A store of 8 bits is most of what it compiles; nothing in it depends on the rule or on the parameter's dtype."""
    drawn = FIRST["by step"]
    shared = []
    for name, dtype in (("adamw", F32), ("adamw", BF16), ("lion", F16), ("adamw", F64)):
        _, formats, _ = variant(RULES[name], dtype, dtype, 512, *[drawn] * (len(RULES[name].inputs) - 2))
        shared.append({*re.findall(r"from (pagedopt_\w+)", cpu_text.source(RULES[name], formats))})
    assert shared[0] == shared[1] == shared[2] != set()
    assert not shared[0] & shared[3], "in float64 a number is rounded once less"


@pytest.mark.parametrize("index", [4, 6], ids=["", "beside larger blocks"])
@pytest.mark.parametrize("rows", [None, rows_of(1024)], ids=["whole", "in parts"])
def test_a_format_is_told_where_an_element_stands(rows: Rows | None, index: int) -> None:
    rule, formats, _ = OTHERS.variants[index]
    lists = OTHERS.lists_of(index)
    Sweep(rule, lists, formats=formats, rows=rows, numbers=range(len(SIZES))).run(scalars_for(rule), seed=2**52 + 1)
    for i, n in enumerate(SIZES):
        assert lists[2][i].tolist() == [i] * n
        assert lists[3][i].tolist() == list(range(n))
        assert lists[4][i].tolist() == [2**52 + 1] * n


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
        dataclasses.replace(BLOCKS, **change)


def test_blocks_that_do_not_go_together_are_refused() -> None:
    wide = dataclasses.replace(BLOCKS, name="wide", block=1024)
    columns = Column("codes", torch.int8), Column("scale", torch.float32, 16)
    narrow = dataclasses.replace(BLOCKS, name="narrow", block=16, columns=columns)
    with pytest.raises(ValueError, match="'narrow' and 'wide' have blocks of 16 and 1024"):
        Stored(ADAMW, (*map(of_dtype, (F32, F32)), wide, narrow))
    for other in (FIRST["by step"], SECOND["nearest"]):
        with pytest.raises(ValueError, match=r"blocks of 64 and 256 elements.* more than 128 must all have the same"):
            Stored(ADAMW, (*map(of_dtype, (F32, F32)), BLOCKS, other))
    with pytest.raises(ValueError, match="chunk_numel is 96; format 'int8 in blocks of 64' needs a multiple of 64"):
        Sweep(ADAMW, OTHERS.lists_of(0), formats=OTHERS.variants[0][1], geometry=Geometry(96, 32))


def test_a_column_of_another_dtype_or_shape_is_refused() -> None:
    rule, forms, _ = OTHERS.variants[3]
    lists = OTHERS.lists_of(3)
    with pytest.raises(TypeError, match=r"exp_avg.codes is torch.uint8; format 'int8 in blocks of 64' has torch.int8"):
        Sweep(rule, [*lists[:2], [t.to(torch.uint8) for t in lists[2]], lists[3]], formats=forms)
    with pytest.raises(ValueError, match=r"tensor 2 of exp_avg.scale has shape \(1,\), the table has \(4,\)"):
        Sweep(rule, [*lists[:3], [t[:1] for t in lists[3]]], formats=forms)
