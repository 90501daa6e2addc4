"""The codes of int8: torch's conversion and the CPU's kernels leave the bits of an oracle in NumPy."""

from __future__ import annotations

from typing import Any

import int8_oracle as oracle
import numpy as np
import pytest
import torch
from int8_oracle import Array, Draw
from int8_support import get, put, same

from pagedopt import Sweep
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import NEAREST, ROOT2, STOCHASTIC

DRAW = Draw(seed=9, step=77, number=5, input=1)
GENERATOR = np.random.default_rng(3)
TINY = 1e-42  # a denormal
FORMATS = {"root 2": ROOT2, "root 4": NEAREST, "root 4, stochastic": STOCHASTIC}


def spread(numel: int, width: float) -> Array:
    """Numbers of both signs, whose logarithms vary by ``width``."""
    return GENERATOR.standard_normal(numel) * np.exp(width * GENERATOR.standard_normal(numel))


def with_some(*some: float, numel: int = 600) -> Array:
    """Ordinary numbers, some of which are replaced in the first and in the last block."""
    values = spread(numel, 1)
    values[[3, numel - 1]] = some[0]
    values[10 : 10 + len(some)] = some
    return values


def ties(power: int, codes: int) -> Array:
    """Blocks of numbers between two codes and their neighbours, where one rounding more or less shows."""
    between = ((np.arange(min(codes, 255)) + 0.5) / codes) ** power
    largest = np.exp(GENERATOR.uniform(-60, 80, (300, 1))).astype(np.float32)
    values = np.append(between, 1.0).astype(np.float32) * largest
    values[1::3, :-1] = np.nextafter(values[1::3, :-1], np.float32(0))
    values[2::3, :-1] = np.nextafter(values[2::3, :-1], np.float32(np.inf))
    return np.pad(values, ((0, 0), (0, 255 - len(between)))).ravel()


VALUES = {
    "ordinary": spread(3000, 1), "wide": spread(3000, 12), "one": spread(1, 0), "255": spread(255, 1),
    "257": spread(257, 1), "none": spread(0, 1), "zeros": np.zeros(700), "some zeros": spread(700, 1).round(),
    "minus zeros": np.full(300, -0.0), "1e-30": spread(600, 0.1) * 1e-30, "1e25": spread(600, 3) * 1e25,
    "denormal": spread(600, 1) * TINY, "one denormal": np.eye(1, 300, 7)[0] * TINY, "NaN": with_some(np.nan, -np.nan),
    "infinity": with_some(np.inf, -np.inf, 1e39, -1e39), "both": with_some(np.inf, np.nan, 0.0, 3e38),
    "all NaN": np.full(300, np.nan), "all infinite": np.full(256, np.inf), "NaN and zeros": np.eye(1, 300)[0] * np.nan,
    "ties of root 2": ties(2, 127), "ties of root 4": ties(4, 255),
    "zeros between": np.concatenate([spread(256, 1), np.zeros(256), spread(256, 1) * 1e-30, spread(100, 1) * 1e30]),
}  # fmt: skip


def stored_by_kernel(form: Format, values: torch.Tensor, draw: Draw = DRAW) -> tuple[Array, Array]:
    """The columns that the CPU's kernel stores."""
    lists = [[values], *[[torch.zeros(c.entries(len(values)), dtype=c.dtype)] for c in form.columns]]
    for column in lists[1:]:
        column[0].fill_(99)
    sweep = Sweep(put, lists, formats=[of_dtype(values.dtype), form], numbers=[draw.number])
    sweep.run({}, seed=draw.seed << 32 | draw.step)
    return lists[1][0].numpy(), lists[2][0].numpy()


def loaded_by_kernel(form: Format, codes: Array, absmax: Array) -> Array:
    """The elements that the CPU's kernel loads."""
    lists = [[torch.full((len(codes),), 7.0)], [torch.from_numpy(codes)], [torch.from_numpy(absmax)]]
    Sweep(get, lists, formats=[of_dtype(torch.float32), form]).run({})
    return lists[0][0].numpy()


def values_for(form: Format, name: str) -> Array:
    """Of a second moment none is negative."""
    return VALUES[name] if form is ROOT2 else np.abs(VALUES[name])


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(ROOT2, torch.float32, id="root 2"),
        pytest.param(NEAREST, torch.float32, id="root 4", marks=pytest.mark.long),  # the next one with another draw
        pytest.param(STOCHASTIC, torch.float32, id="root 4, stochastic"),
        pytest.param(STOCHASTIC, torch.float64, id="root 4, stochastic, of float64", marks=pytest.mark.long),
    ],
)
def test_a_kernel_stores_and_loads_the_bits_of_the_oracle(form: Format, dtype: torch.dtype) -> None:
    for name in VALUES:
        values = torch.from_numpy(values_for(form, name)).to(dtype)
        draw = DRAW if form is STOCHASTIC else None
        want = oracle.encode2(values.numpy()) if form is ROOT2 else oracle.encode4(values.numpy(), draw)
        assert same(stored_by_kernel(form, values), want), name
        decode = oracle.decode2 if form is ROOT2 else oracle.decode4
        assert same([loaded_by_kernel(form, *want)], [decode(*want)]), name


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_torch_converts_to_the_bits_of_the_oracle_and_rounds_to_nearest(form: Format) -> None:
    for name in VALUES:
        values = values_for(form, name)
        want = oracle.encode2(values) if form is ROOT2 else oracle.encode4(values)
        columns = form.encode(torch.from_numpy(values))
        assert same(columns, want), name
        decode = oracle.decode2 if form is ROOT2 else oracle.decode4
        assert same([form.decode(*columns, numel=len(values))], [decode(*want)]), name


def absmaxes() -> Array:
    """Magnitudes that a block may have: the ends, powers of two and their neighbours, and random ones."""
    powers = np.float32(2.0) ** np.arange(-94, 128, dtype=np.float32)
    above, below = (np.nextafter(powers, np.float32(side)) for side in (np.inf, 0))
    random = 2.0 ** GENERATOR.uniform(-94, 127.999, 2000)
    found = np.concatenate([powers, above, below[1:], [np.finfo(np.float32).max], random]).astype(np.float32)
    assert found.min() == 2.0**-94
    return found


@pytest.mark.parametrize("form", [ROOT2, NEAREST], ids=["root 2", "root 4"])
def test_encoding_what_was_decoded_changes_nothing(form: Format) -> None:
    """Over all codes, of a NaN and of infinity, too."""
    absmax = torch.from_numpy(absmaxes())
    codes = torch.arange(256, dtype=torch.uint8).view(form.columns[0].dtype).repeat(len(absmax))
    again = form.encode(form.decode(codes, absmax, numel=len(codes)))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], absmax)
    values = oracle.decode2(codes.numpy(), absmax.numpy()) if form is ROOT2 else oracle.decode4(
        codes.numpy(), absmax.numpy()
    )  # fmt: skip
    assert same(stored_by_kernel(form, torch.from_numpy(values)), (codes.numpy(), absmax.numpy()))


@pytest.mark.parametrize(("form", "error"), [(ROOT2, 1 / 127), (NEAREST, 2 / 254), (STOCHASTIC, 4 / 254)])
def test_a_code_is_near_its_number(form: Format, error: float) -> None:
    """In units of the block's largest, by the codes' distance where it is widest; the sign stays."""
    values = values_for(form, "ordinary").astype(np.float32)
    codes, absmax = stored_by_kernel(form, torch.from_numpy(values))
    got = oracle.decode2(codes, absmax) if form is ROOT2 else oracle.decode4(codes, absmax)
    largest = np.repeat(absmax, 256)[: len(values)]
    assert (np.abs(got - values) <= error * largest).all()
    assert (got * values >= 0).all()
    assert (got[np.abs(values) == largest] == values[np.abs(values) == largest]).all()


@pytest.mark.parametrize("form", [NEAREST, STOCHASTIC], ids=["nearest", "stochastic"])
def test_no_second_moment_becomes_zero_unless_all_of_its_block_are(form: Format) -> None:
    values = np.zeros(512, np.float32)
    values[:2] = 1, 1e-30
    codes, absmax = stored_by_kernel(form, torch.from_numpy(values))
    assert codes[0] == 255
    assert codes[1:256].min() == 1
    assert not codes[256:].any()
    assert absmax.tolist() == [1, 0]
    assert (oracle.decode4(codes, absmax)[:256] > 0).all()


def test_the_largest_of_a_block_stays_what_it_is_whatever_is_drawn() -> None:
    """So rounding never moves an absmax: not for magnitudes either whose product with T / a is not T."""
    largest = np.exp(GENERATOR.uniform(-60, 80, 400)).astype(np.float32)
    values = (largest[:, None] * GENERATOR.uniform(0, 1, (400, 256)).astype(np.float32)).astype(np.float32)
    values[:, 17] = largest
    for step in range(1, 65):
        codes, absmax = stored_by_kernel(STOCHASTIC, torch.from_numpy(values.ravel()), DRAW._replace(step=step))
        assert (codes.reshape(400, 256)[:, 17] == 255).all()
        assert np.array_equal(absmax, largest)


def test_the_mean_of_stochastic_rounding_is_the_number() -> None:
    """By five standard errors of so many draws, and the 16 bits of one; to nearest it would be ten times as far off."""
    shares, blocks, steps = GENERATOR.uniform(2, 254.5, 40), 64, 4
    shares[:2] = 1.5, 254.9
    values = np.repeat(((shares / 255) ** 4).astype(np.float32), 256 * blocks)
    values[::256] = 1
    total = np.zeros(len(values))
    for step in range(1, steps + 1):
        total += oracle.decode4(*stored_by_kernel(STOCHASTIC, torch.from_numpy(values), DRAW._replace(step=step)))
    drawn = total.reshape(len(shares), blocks, 256)[:, :, 1:].mean((1, 2)) / steps
    low, high = ((np.floor(shares + i) / 255) ** 4 for i in (0, 1))
    part = (values[1 :: 256 * blocks].astype(np.float64) - low) / (high - low)
    error = np.sqrt(part * (1 - part) / (steps * blocks * 255))
    off = (drawn - values[1 :: 256 * blocks]) / (high - low)
    assert (np.abs(off) <= 5 * error + 2.0**-16 + 1e-4).all(), off
    assert (5 * error).max() < 0.02


@pytest.mark.parametrize("change", [{"seed": 10}, {"step": 78}, {"number": 6}], ids=str)
def test_another_seed_step_or_parameter_rounds_otherwise(change: dict[str, int]) -> None:
    values = torch.from_numpy(np.abs(spread(5000, 1)).astype(np.float32))
    one, other = (stored_by_kernel(STOCHASTIC, values, draw)[0] for draw in (DRAW, DRAW._replace(**change)))
    again = stored_by_kernel(STOCHASTIC, values)[0]
    assert np.array_equal(one, again)
    assert 0.2 < (one != other).mean() < 0.5  # of two draws a third differ


ZERO, ONES, PI = 0, 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN: list[tuple[Any, Any, str]] = [
    ((ZERO,) * 4, (ZERO,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_oracle_s_philox_gives_the_known_answers_of_random123(counter: Any, key: Any, words: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in oracle.philox(counter, key)) == words


def test_draws_are_spread_evenly_over_elements() -> None:
    """Their mean is a half, no number comes too often, and the index in the parameter counts beyond 32 bits."""
    drawn = oracle.halves(1 << 16, DRAW)
    assert abs(drawn.mean() / 65536 - 0.5) < 5 * 0.29 / 256
    assert len(np.unique(drawn)) > 0.62 * 65536  # 1 - 1/e of all, as of random numbers
    beyond = oracle.halves(512, DRAW._replace(first=1 << 40))
    assert not np.array_equal(beyond, oracle.halves(512, DRAW))
