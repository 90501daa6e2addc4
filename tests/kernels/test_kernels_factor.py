"""The kernels of clipped and scaled steps: NVRTC takes them, and the plain ones have not changed for them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import kernel_texts
import numpy as np
import pytest
import torch
from kernel_texts import instance, sums_instance
from support import BF16, DTYPES, F16, F32, F64

from pagedopt.formats.floating import of_dtype
from pagedopt.formats.int8 import INT8
from pagedopt.kernels import cpu, cuda, nvrtc, source
from pagedopt.launch.on_device import FACTOR, Factor
from pagedopt.launch.sums import SquaresList, added
from pagedopt.rules import RULES
from pagedopt.tables.layout import BLOCK, Geometry, HostTable
from tests.card.kernels import build, functors, launch
from tests.tables.test_table import assert_no_padding, assertions, compile_with

SIZES = (0, 1, 31, 4097, 700, 40_000, 33)
SHAPES = {32: Geometry(1024, 32), 512: Geometry(4096, BLOCK)}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_they_compile(arch: str) -> None:
    kernel_texts.nvrtc()
    mixes = [(F32,) * 4, (F64,) * 4, (BF16, F16, F32, F32), (F16, BF16, BF16, BF16)]
    rule = RULES["adamw"]
    names = [
        source.instance(rule, tuple(map(of_dtype, mix)), threads, table, small, scaled=True)
        for mix, threads, table, small in zip(
            mixes, (512, 32, 512, 32), ("TableAt", "TableOf<4096>", "TableOf<32764>", "TableAt"), (False, True) * 2,
            strict=True,
        )
    ]  # fmt: skip
    nvrtc.compile_cuda(source.text(rule, scaled=True), tuple(names), arch)
    blocks = INT8.formats[0]
    formats = (of_dtype(F32), of_dtype(BF16), *(blocks,) * 2)
    name = source.instance(rule, formats, 512, "TableAt", scaled=True)
    nvrtc.compile_cuda(source.text(rule, formats, scaled=True), (name,), arch)


def test_a_plain_kernel_knows_nothing_of_factors_and_formats() -> None:
    """Its text is the key of its cache."""
    rule = RULES["adamw"]
    for text in (source.text(rule), source.text(rule, [of_dtype(F32)] * 4)):
        assert not [word for word in ("Factor", "Philox", "Spot") if word in text]
    assert "Scaled" not in instance(rule, (F32,) * 4, 512, "TableAt")


def test_the_words_of_c_and_numpy_agree() -> None:
    structs = {"Factor": FACTOR, "TotalAt": cuda.TOTAL_AT}
    for dtype in structs.values():
        assert_no_padding(dtype)
    compile_with(assertions(structs), source.text(None, kernel="sums.cu"))


def numbers(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


@pytest.mark.parametrize("max_norm", [1.0, 1e30, float("inf")])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, float("inf"), float("nan")])
def test_the_coefficient_is_that_of_torch(value: float, max_norm: float) -> None:
    """Of the same norm, in the same arithmetic."""
    factor, grad = Factor(max_norm), torch.tensor([value], dtype=F64)
    factor.total(float(grad.square()))
    torch.nn.utils.clip_grads_with_norm_([p := torch.nn.Parameter(torch.ones(1, dtype=F64))], max_norm, grad.norm())
    p.grad = torch.ones(1, dtype=F64)
    torch.nn.utils.clip_grads_with_norm_([p], max_norm, grad.norm())
    ours = torch.tensor([factor._words["coefficient"][0]], dtype=F64)
    torch.testing.assert_close(ours, p.grad, rtol=1e-15, atol=0, equal_nan=True)


@pytest.mark.parametrize("table", ["TableAt", "TableOf<4096>"])
@pytest.mark.parametrize("threads", SHAPES)
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_scaled_kernel_is_the_plain_one_on_products(table: str, threads: int, found_inf: float) -> None:
    """Where a gradient is infinite no bit changes, also of NaN."""
    rule = RULES["adamw"]
    names = tuple(
        source.instance(rule, (of_dtype(F32),) * 4, threads, table, scaled=scaled) for scaled in (False, True)
    )
    text_of_plain, text = functors([rule]), ("\n".join([source._file("factor.cuh"), source._file("factor.cu")]),)
    plain = build(names[:1], text_of_plain)[0]
    scaled = build(names[1:], (*text, *text_of_plain))[0]
    factor = Factor(None)
    factor._words["coefficient"] = 0.3
    factor.scale_by(torch.tensor(8.0), torch.tensor(found_inf))
    by = np.float32(0.3 / 8)
    values = [0.1, 0.5, 0.9, 1e-8, 0.2, 0.7]
    ends = []
    for way in ("plain", "scaled"):
        lists = [numbers(F32) for _ in range(4)]
        lists[3] = [t.abs() for t in lists[3]]
        lists[1][3][17] = float("nan")
        before = [t.clone() for each in lists for t in each]
        if way == "plain":
            lists[1] = [t * by.item() for t in lists[1]]
        host = HostTable(4, SIZES, rule.uniform_count + (way == "scaled"), geometry=SHAPES[threads])
        uniforms = rule.uniforms(
            dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay", "step"), values, strict=True))
        )
        host.set_scalars([[*uniforms, factor.word] if way == "scaled" else uniforms])
        host.rows["address"] = np.array([[t.data_ptr() for t in each] for each in lists], np.uint64).T
        host.rows_changed()
        launch(scaled if way == "scaled" else plain, host, 4096 if table != "TableAt" else 0)
        if way == "scaled" and found_inf:
            for ours, was in zip((t for each in lists for t in each), before, strict=True):
                assert ours.numpy().tobytes() == was.numpy().tobytes()
            return
        ends.append([t.numpy().tobytes() for i in (0, 2, 3) for t in lists[i]])
    assert ends[0] == ends[1]


# --- the sums of norms: the CUDA text, which g++ compiles and fibers play, and the CPU's have the same bits -----------


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


@pytest.mark.parametrize(("first", "backwards"), [(0, False), (1, True)], ids=["aligned", "not aligned, backwards"])
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
