"""The two norm kernels under g++: fibers play the shuffles and barriers, too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from host_build import build, launch
from kernel_names import norm_instance
from support import BF16, F16, F32, F64

from pagedopt.tables.layout import BLOCK, Geometry, HostTable

SIZES = (0, 1, 31, 4097, 700, 40_000, 33)
SHAPES = {32: Geometry(1024, 32), 512: Geometry(2048, BLOCK)}
#: (dtype of the tensors, dtype of the results, dtype of the arithmetic)
DTYPES = ((F32, F32, F32), (F64, F64, F64), (BF16, BF16, F32), (F16, F32, F32), (F32, F64, F64))
ORDERS = {1: 1, 2: 2, math.inf: 0}
VARIANTS = [(d, order, threads) for d in DTYPES for order in ORDERS for threads in SHAPES]


def instances() -> tuple[str, ...]:
    return tuple(
        norm_instance(stage, ORDERS[order], kind, number, threads, "TableAt")
        for (dtype, out, number), order, threads in VARIANTS
        for stage, kind in (("chunks", dtype), ("rows", out))
    )


def played_norm(tensors: list[torch.Tensor], variant: int, backwards: bool) -> torch.Tensor:
    (_, out, number), _, threads = VARIANTS[variant]
    chunks, rows = build(instances(), kernel="norm.cu")[2 * variant : 2 * variant + 2]
    table = HostTable(3, [t.numel() for t in tensors], geometry=SHAPES[threads])
    counts = np.bincount(table.chunks["row"], minlength=len(tensors))
    partials = torch.full((len(table.chunks) + 1,), 77.0, dtype=number)
    result = torch.zeros(len(tensors), dtype=out)
    table.rows["address"][:, 0] = [t.data_ptr() for t in tensors]
    table.rows["address"][:, 1] = partials.data_ptr() + (np.cumsum(counts) - counts) * number.itemsize
    table.rows["address"][:, 2] = result.data_ptr() + np.arange(len(tensors)) * out.itemsize
    launch(chunks, table, backwards=backwards)
    launch(rows, table, backwards=backwards)
    assert partials[-1] == 77, "a partial too many"
    return result


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=lambda v: str(VARIANTS[v]).replace("torch.", ""))
def test_norms_are_those_of_torch(variant: int, backwards: bool, capfd: pytest.CaptureFixture[str]) -> None:
    (dtype, out, number), order, _ = VARIANTS[variant]
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
    tensors[2][7] = -9.0  # the largest is negative
    got = played_norm(tensors, variant, backwards)
    assert "runtime error" not in (said := capfd.readouterr().err), said
    wide = [t.double().abs().numpy().astype(np.longdouble) for t in tensors]
    exact = {1: np.sum, 2: lambda x: np.sqrt(np.sum(x * x)), math.inf: lambda x: np.max(x, initial=0)}[order]
    want = torch.tensor([float(exact(x)) for x in wide], dtype=F64)
    eps = torch.finfo(out).eps * 0.51 + (24 if order != math.inf else 0) * torch.finfo(number).eps
    torch.testing.assert_close(got.double(), want, rtol=eps, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_the_norm(order: float, value: float) -> None:
    for threads in SHAPES:
        tensors = [torch.ones(n) for n in (4097, 50, 4097)]
        tensors[0][4096] = value
        tensors[1][33] = value
        got = played_norm(tensors, VARIANTS.index((DTYPES[0], order, threads)), False)
        want = torch.stack([torch.linalg.vector_norm(t, order) for t in tensors])
        torch.testing.assert_close(got, want, equal_nan=True)
