"""The CUDA text of parameters of 16 bits: played by g++, it leaves Numba's bits; NVRTC compiles it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_build import launch
from int8_support import get, put, same
from played_formats import ARCHS, SEED, SHAPES, Kernels, Variant
from support import BF16, F16, F32, F64

from pagedopt import Sweep
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FIRST, SECOND
from pagedopt.formats.sixteen import DRAWN, SPLIT
from pagedopt.kernels import source
from pagedopt.rules import RULES, Rule

ADAMW, LION = RULES["adamw"], RULES["lion"]
#: Of float32: around the largest number, and around what float16 rounds to infinity, of both signs.
EDGES = [
    sign | bits for sign in (0, 1 << 31) for bits in (*range(0x7F7FFFF0, 0x7F800010), *range(0x477FEFF0, 0x477FF010))
]
#: Where the tensors begin in their parameters: at quads, amid them, amid the 256 elements that two calls share, far.
FIRSTS = (0, 4, 1, 128, 130, 7, 3, 0, (256 << 33) + 5)


def variant(rule: Rule, param: Format, grad: torch.dtype, threads: int, *states: Format) -> Variant:
    return rule, (param, of_dtype(grad), *(states or [of_dtype(F32)] * (len(rule.inputs) - 2))), threads


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
KERNELS = Kernels([*UPDATES, *PATTERNS], (*DRAWN_INT8, *SPLIT.values()))
IDS = [f"{rule.name} {forms[0].name} {forms[-1].name} {threads}" for rule, forms, threads in KERNELS.variants]


@pytest.mark.parametrize("index", range(len(UPDATES)), ids=IDS[: len(UPDATES)])
def test_played_threads_leave_the_bits_of_numba(index: int, capfd: pytest.CaptureFixture[str]) -> None:
    _, formats, _ = UPDATES[index]
    how = {} if any(form.block > 1 for form in formats) else {"firsts": FIRSTS}
    numba = KERNELS.updated("Numba", index, **how)
    KERNELS.check(
        capfd, index, numba, *(KERNELS.updated("g++", index, gap, gap > 0, **how) for gap in (0, 1))
    )  # fmt: skip


@pytest.mark.parametrize("index", range(len(UPDATES), len(IDS)), ids=IDS[len(UPDATES) :])
def test_every_kind_of_number_is_stored_and_loaded_as_by_numba(index: int) -> None:
    """All upper halves, with lower ones at and beside ties: denormals, the largest, infinities, NaN."""
    rule, formats, threads = KERNELS.variants[index]
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
            launch(KERNELS.play(index), sweep.table.host)
        results.append([first, level, *lost])
    assert same(*results)


def test_a_kernel_of_float32_has_no_more_text_than_before() -> None:
    """Formats of parameters are no part of what is compiled for plain numbers."""
    plain = source.text(ADAMW, [of_dtype(F32)] * 4)
    assert "Philox" not in plain
    assert "Spot" not in plain


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles_all(arch: str) -> None:
    KERNELS.compile(arch)
