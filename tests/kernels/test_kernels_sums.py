"""The sums of norms: the CUDA text, which g++ compiles and fibers play, and the CPU's have the same bits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from host_build import build, launch
from kernel_names import sums_instance
from support import DTYPES, F32

from pagedopt.kernels import cpu, cuda
from pagedopt.launch.on_device import Factor
from pagedopt.launch.sums import SquaresList, added
from pagedopt.tables.layout import BLOCK, Geometry, HostTable

SIZES = (0, 1, 31, 4097, 700, 40_000, 33)
SHAPES = {32: Geometry(1024, 32), 512: Geometry(4096, BLOCK)}
#: What the kernels call a norm's order, and torch.
ORDERS = {0: math.inf, 1: 1, 2: 2}
VARIANTS = [*itertools.product(ORDERS, DTYPES, SHAPES)]


def play_of(variant: int) -> Any:
    return build(tuple(sums_instance(*each, "TableAt") for each in VARIANTS), kernel="sums.cu")[variant]


def chunk_sums(tensors: list[torch.Tensor], variant: int, played: bool, backwards: bool = False) -> np.ndarray:
    """The sum of each chunk's terms: by the CUDA text, or on the CPU."""
    order, dtype, threads = VARIANTS[variant]
    numels = np.array([t.numel() for t in tensors])
    each = SquaresList(dtype, numels)
    each.table = HostTable(2, numels, geometry=SHAPES[threads])
    each.chunks = len(each.table.chunk_words)
    sums = np.full(each.chunks + 1, 77.0)
    each.begin_at(sums.ctypes.data)
    each.take(np.array([t.data_ptr() for t in tensors], np.uint64))
    if played:
        launch(play_of(variant), each.table, backwards=backwards)
    else:
        cpu.run(cpu.sums_kernel(order, each.form, threads), each.table)
    assert sums[-1] == 77, "a sum too many"
    return sums[:-1]


def exact(tensors: list[torch.Tensor], order: int) -> float:
    """The sum of all terms, in extended precision."""
    wide = np.concatenate([t.double().abs().numpy() for t in tensors]).astype(np.longdouble)
    return float(wide.max() if order == 0 else (wide**order).sum())


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=lambda v: str(VARIANTS[v]).replace("torch.", ""))
def test_both_texts_add_in_one_order(
    variant: int, first: int, backwards: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same bits on CPU and GPU; and nearer to float128 than one part in 10^14."""
    order, dtype, _ = VARIANTS[variant]
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(n + first, generator=generator).to(dtype)[first:] for n in SIZES]
    tensors[2][7] = -9.0  # the largest magnitude is a negative number's
    played, ours = chunk_sums(tensors, variant, True, backwards), chunk_sums(tensors, variant, False)
    assert played.tobytes() == ours.tobytes()
    assert "runtime error" not in (said := capfd.readouterr().err), said
    assert (ours.max() if order == 0 else added(ours)) == pytest.approx(exact(tensors, order), rel=1e-14)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-45])
def test_what_is_not_finite_or_far_from_one_reaches_the_sum(order: int, value: float) -> None:
    """In each place of a thread's and a warp's: the first of a chunk, one amid it, and the last."""
    for threads, played in itertools.product(SHAPES, (True, False)):
        tensors = [torch.zeros(n) for n in (4097, 50, 33, 8000)]
        for tensor, at in zip(tensors, (4096, 33, 0, 7998), strict=True):
            tensor[at] = value
        sums = chunk_sums(tensors, VARIANTS.index((order, F32, threads)), played)
        term = torch.tensor(value, dtype=F32).double().abs() ** (order or 1)
        want = [term.item()] * len(tensors) + [0.0] * (len(sums) - len(tensors))
        np.testing.assert_array_equal(np.sort(sums), np.sort(want))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("count", [0, 1, 511, 5000])
def test_one_block_adds_as_the_host_does(count: int, backwards: bool) -> None:
    (play,) = build((f"total<{BLOCK}>",), kernel="sums.cu")
    sums = np.random.default_rng(3).random(count) * 10.0 ** np.random.default_rng(4).integers(-8, 8, count)
    device, host, target = Factor(3.0), Factor(3.0), np.zeros(1)
    scale = torch.tensor(8.0)
    device.scale_by(scale, None)
    host.scale_by(scale, None)
    at = np.zeros(1, cuda.TOTAL_AT)
    at[0] = sums.ctypes.data, count, target.ctypes.data, device.address
    play(at, 1, backwards)
    host.total(added(sums))
    assert target[0] == added(sums)
    assert device._words.tobytes() == host._words.tobytes()
