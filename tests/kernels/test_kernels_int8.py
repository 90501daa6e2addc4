"""The CUDA text of int8: played by g++, it leaves Numba's bits and the oracle's; NVRTC compiles it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import int8_oracle as oracle
import numpy as np
import pytest
import torch
from host_build import launch
from int8_oracle import Draw
from int8_support import put, same
from played_formats import ARCHS, SHAPES, SIZES, Kernels, Variant
from support import BF16, F32, F64

from pagedopt import Sweep
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FIRST, SECOND
from pagedopt.rules import RULES, Rule
from pagedopt.tables.pointers import Rows

ADAMW, LION = RULES["adamw"], RULES["lion"]


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
KERNELS = Kernels(VARIANTS, (FIRST["nearest"], SECOND["nearest"]))
PLAYED = [
    f"{rule.name} {forms[0].name} {' '.join(form.name[6:] for form in forms if not form.plain)} {threads}"
    for rule, forms, threads in VARIANTS
]


def indices(*often: int, long: Sequence[int]) -> list[Any]:
    """Variants, some of which are tried where there is time."""
    marked = [(i, []) for i in often] + [(i, [pytest.mark.long]) for i in long]
    return [pytest.param(i, id=PLAYED[i], marks=marks) for i, marks in marked]


def rows_of(cut: int, columns: int) -> Rows:
    """Parameters of ``SIZES`` cut into rows of ``cut`` elements, the last ones first."""
    parts = [(i, at, min(cut, n - at)) for i, n in enumerate(SIZES) for at in range(0, n, cut)][::-1]
    tensor, offset, numel = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    return Rows(tensor, offset, numel, np.zeros((len(parts), columns), np.uint64))


@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("index", indices(1, 2, 4, 6, long=(0, 3, 5, 7, 8, 9)))
def test_played_threads_leave_the_bits_of_numba(index: int, backwards: bool, capfd: pytest.CaptureFixture[str]) -> None:
    numba = KERNELS.updated("Numba", index)
    KERNELS.check(capfd, index, numba, *(KERNELS.updated("g++", index, gap, backwards) for gap in (0, 1)))


@pytest.mark.parametrize("index", indices(2, 6, long=(1, 9)))
def test_rows_that_begin_in_the_middle_of_a_parameter_change_no_bit(
    index: int, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = KERNELS.updated("Numba", index)
    cut = [
        KERNELS.updated(use, index, gap, rows=rows_of(numel, len(whole)))
        for use, gap, numel in (("Numba", 0, 256), ("g++", 0, 256), ("g++", 1, 1280), ("g++", 0, 4096))
    ]
    KERNELS.check(capfd, index, whole, *cut)


@pytest.mark.parametrize("first", [0, 256 << 33], ids=["at the start", "beyond 32 bits"])
@pytest.mark.parametrize("use", ["Numba", "g++"])
@pytest.mark.parametrize("index", indices(6, 8, long=(7, 9)))
def test_elements_are_drawn_for_as_the_oracle_says(index: int, use: str, first: int) -> None:
    """The four words of a counter and both of the key count; so does where in a large parameter a row begins."""
    rule, formats, _ = VARIANTS[index]
    threads = VARIANTS[index][2]
    lists, numbers = KERNELS.lists_of(index), [5, 1 << 31, 3, 2, 0, 70_000, 1, 9, 4]
    sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=numbers)
    sweep.table.host.row_words[:, len(lists) + 1] += first
    seed, step = (1 << 21) - 1, 77_000
    sweep.set_scalars([[]], seed << 32 | step)
    if use == "Numba":
        sweep.launch(None)
    else:
        launch(KERNELS.play(index), sweep.table.host)
    for i, values in enumerate(lists[0]):
        draw = Draw(seed, None if formats[1] is FIRST["by data"] else step, numbers[i], 1, first)
        want = oracle.encode(4 if formats[1] in SECOND.values() else 3, values.numpy(), draw)
        assert same([lists[1][i], lists[2][i]], want), i


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles_all(arch: str) -> None:
    KERNELS.compile(arch)
