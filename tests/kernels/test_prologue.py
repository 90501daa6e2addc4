"""What a rule makes of hyperparameters alone, as CUDA text: Python's bits where g++ plays it, and taken by NVRTC."""

from __future__ import annotations

import math
from math import log
from typing import Any

import kernel_texts
import numpy as np
import pytest
import torch
from gpu_support import DEVICES, NEEDED
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_texts import instance
from often import long_but
from support import F32

from pagedopt.kernels import cuda, nvrtc, source
from pagedopt.kernels.cuda import PROLOGUE_AT, PROLOGUE_BLOCK
from pagedopt.rules import RULES, Rule, rule
from pagedopt.system import internals
from tests.card.kernels import build
from tests.kernels.prologue_rows import UNTOUCHED, Launch, Rows, check_runs, mixed_rows, same_bits
from tests.kernels.prologue_rules import EXACT, SUBJECTS, common_sets, raising, sets_of

ALL = {**SUBJECTS, "raising": raising, "square_root": RULES["square_root"]}


def launch_of(subject: Rule, backwards: bool = False, device: str = "cpu") -> Launch:
    """Plays the prologue of one of :data:`ALL`, or launches it on the current stream of a GPU."""
    if device == "cuda":
        index = torch.cuda.current_device()
        kernel = cuda.prologue_kernel(subject, index)
        return lambda argument, rows: kernel(argument, rows, cuda.Stream(internals.current_stream(index)))
    texts = tuple(r.prologue_source() for r in ALL.values())
    plays = build(tuple(map(source.prologue_instance, ALL.values())), texts, kernel="prologue.cu")
    play = plays[list(ALL).index(subject.name)]
    return lambda argument, rows: play(argument, -(-rows // PROLOGUE_BLOCK), backwards)


def python(subject: Rule, scalars: dict[str, float]) -> list[float] | None:
    """The uniforms; None: Python raises."""
    try:
        return subject.uniforms(scalars)
    except (ArithmeticError, ValueError, RuntimeError):
        return None


#: Together they have every operation; common numbers are compared for all.
OFTEN = ("adamw", "sgd_momentum", "lion", "nadam", "many", "smooth", "named", *(subject.name for subject in EXACT))


@pytest.mark.parametrize("name", long_but(SUBJECTS, OFTEN.__contains__))
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_the_bits_are_pythons(name: str, data: Any) -> None:
    """Special values included; where Python raises, nothing is compared."""
    subject = SUBJECTS[name]
    sets = data.draw(st.lists(sets_of(subject), min_size=1, max_size=8))
    got = Rows(subject, sets).run(launch_of(subject))
    for scalars, mine in zip(sets, got, strict=True):
        want = python(subject, scalars)
        assert want is None or same_bits(mine, np.array(want)), (scalars, mine.tolist(), want)


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_bits_of_common_numbers_are_pythons(name: str) -> None:
    """For which Python never raises."""
    subject = SUBJECTS[name]
    sets = common_sets(subject, 200)
    got = Rows(subject, sets).run(launch_of(subject))
    assert same_bits(got, np.array([subject.uniforms(s) for s in sets]))
    assert (got != UNTOUCHED).any()


#: ``a`` and ``b`` -> a / b, a % b, a // b, a**b, sqrt(a), log(a), exp(a)
RAISES: dict[tuple[float, float], list[float]] = {
    (1.0, 0.0): [math.inf, math.nan, math.nan, 1.0, 1.0, 0.0, math.e],
    (0.0, -1.0): [-0.0, -0.0, -0.0, math.inf, 0.0, -math.inf, 1.0],
    (-8.0, 0.5): [-16.0, 0.0, -16.0, math.nan, math.nan, math.nan, math.exp(-8)],
    (1e3, 1e3): [1.0, 0.0, 1.0, math.inf, math.sqrt(1e3), math.log(1e3), math.inf],
    (-0.0, 0.0): [math.nan, math.nan, math.nan, 1.0, -0.0, -math.inf, 1.0],
}


@pytest.mark.parametrize(("a", "b"), RAISES)
def test_where_python_raises_numbers_are_not_finite(a: float, b: float) -> None:
    with pytest.raises((ArithmeticError, ValueError, RuntimeError)):
        raising.uniforms({"a": a, "b": b})
    got = Rows(raising, [{"a": a, "b": b}]).run(launch_of(raising))
    assert same_bits(got, np.array([RAISES[a, b]]))


READ = [
    (name, backwards, "cpu")
    for name in ("adamw", "lion", "nadam", "carrying", "divided", "square_root", "filled")
    for backwards in (False, True)
]
ON_GPU = [pytest.param(name, False, "cuda", marks=NEEDED) for name in ("lion", "sgd_momentum", "carrying")]  # no powers


@pytest.mark.parametrize("count", [1, PROLOGUE_BLOCK, 300])
@pytest.mark.parametrize(("name", "backwards", "device"), [*READ, *ON_GPU])
def test_numbers_are_read_and_written_in_their_types(name: str, count: int, backwards: bool, device: str) -> None:
    """Some float32, some float64; absent rows stay as they are; rows lie in several blocks of threads."""
    subject = ALL[name]
    rows = mixed_rows(subject, common_sets(subject, count), device=device)
    check_runs(rows, launch_of(subject, backwards, device))


def test_without_a_count_the_step_is_zero() -> None:
    subject = RULES["sgd_momentum"]
    scalars = {"lr": 0.3, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.2, "nesterov": 0.0, "maximize": 0.0}
    rows = Rows(subject, [scalars | {"step": 9.0}] * 5, uncounted=(1, 3), spare=1, seed_at=subject.uniform_count)
    check_runs(rows, launch_of(subject), runs=2)
    assert rows.table[:, -1].tolist() == [10, 0, 10, 0, 10]


def test_a_seed_is_written_only_where_there_is_one() -> None:
    subject = RULES["lion"]
    sets = [dict.fromkeys(subject.scalars, 0.5)] * 3
    check_runs(Rows(subject, sets, spare=2), launch_of(subject), runs=1)
    rows = Rows(subject, sets, spare=2, seed_at=subject.uniform_count + 1)
    check_runs(rows, launch_of(subject), runs=2)
    assert rows.table[:, -2:].tolist() == [[UNTOUCHED, 2.0]] * 3


def test_the_text_is_readable() -> None:
    text = SUBJECTS["nadam"].prologue_source()
    assert "struct prologue_nadam {" in text
    assert "const S beta1 = in[1];" in text
    assert "u[7] = ((lr * ahead) / (S(1.0) - (mu_product_2 * ahead)));" in text
    assert RULES["adamw"].out_of_place.prologue == "prologue_adamw_out"


# ---- by NVRTC ----


def bounded(x, most=math.inf, least=-math.inf):  # type: ignore[no-untyped-def]
    return max(min(x, most), least)


@rule
def infinite(x, *, a):  # type: ignore[no-untyped-def]
    """Numbers that C++ has no literals for."""
    return bounded(x) * bounded(a) + (log(-1) if a else 0)


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_75", marks=pytest.mark.long)])
def test_it_compiles(arch: str) -> None:
    kernel_texts.nvrtc()
    rules = [*ALL.values(), infinite]
    text = "\n".join([source.text(None, kernel="prologue.cu"), *(r.prologue_source() for r in rules)])
    text += f"static_assert(BLOCK == {PROLOGUE_BLOCK} && sizeof(PrologueAt) == {PROLOGUE_AT.itemsize});\n"
    cubin, symbols = nvrtc.compile_cuda(text, tuple(map(source.prologue_instance, rules)), arch)
    assert len(set(symbols)) == len(rules)
    assert all(symbol.encode() in cubin for symbol in symbols)


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "lion", "nadam"])
def test_each_compiles_alone(name: str) -> None:
    kernel_texts.nvrtc()
    subject = SUBJECTS[name]
    cubin, (symbol,) = nvrtc.compile_cuda(source.prologue_text(subject), (source.prologue_instance(subject),), "sm_90")
    assert symbol.encode() in cubin


def test_a_rule_with_infinite_numbers_compiles() -> None:
    """NVRTC has no headers, and no INFINITY."""
    kernel_texts.nvrtc()
    nvrtc.compile_cuda(source.text(infinite), (instance(infinite, (F32,), 512, "TableAt"),), "sm_90")


# ---- on a GPU, whose ``pow`` is not the C library's: the host's numbers after rounding to float32 ----


#: Of so many sets one may round to another float32.
ONE_IN = 1000


def sets_of_adamw(count: int) -> list[dict[str, float]]:
    """Random hyperparameters, near their ends, too."""
    generator = np.random.default_rng(11)
    columns = {
        "lr": 10 ** generator.uniform(-6, 0, count),
        "beta1": 1 - 10 ** generator.uniform(-3, -0.2, count),
        "beta2": 1 - 10 ** generator.uniform(-5, -0.5, count),
        "eps": 10 ** generator.uniform(-12, -3, count),
        "weight_decay": np.where(generator.random(count) < 0.2, 0, generator.uniform(0, 0.3, count)),
        "step": np.ceil(10 ** generator.uniform(0, 5, count)),
        "maximize": generator.integers(0, 2, count).astype(float),
    }
    assert tuple(columns) == RULES["adamw"].scalars
    return [dict(zip(columns, values, strict=True)) for values in np.column_stack([*columns.values()]).tolist()]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_numbers_of_adamw_round_to_the_hosts(device: str) -> None:
    subject, sets = RULES["adamw"], sets_of_adamw(ONE_IN)
    steps = [s["step"] for s in sets]
    assert min(steps) < 5
    assert 50_000 < max(steps) <= 100_000
    single = np.zeros((len(sets), 1 + len(subject.scalars)), bool)
    single[:, 0] = True  # torch's step counts
    there = Rows(subject, sets, single, device=device).run(launch_of(subject, device=device))
    host = np.array([subject.uniforms(s) for s in sets])
    np.testing.assert_allclose(there, host, rtol=1e-9, atol=0)
    got, want = there.astype(np.float32), host.astype(np.float32)
    apart = got != want
    assert apart.any(axis=1).sum() <= len(sets) / ONE_IN, f"{apart.sum(axis=0)} of {len(sets)} for each number"
    assert np.array_equal(np.nextafter(want, got)[apart], got[apart]), "more than one float32 apart"


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", ["smooth", "nadam", "adam_amsgrad"])
def test_other_functions_are_near(name: str, device: str) -> None:
    subject = SUBJECTS[name]
    sets = common_sets(subject, 1000)
    got = Rows(subject, sets, device=device).run(launch_of(subject, device=device))
    np.testing.assert_allclose(got, [subject.uniforms(s) for s in sets], rtol=1e-12, atol=1e-13)
