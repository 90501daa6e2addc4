"""Stochastic rounding of int8 without chance: its expectation over all random bits, and what becomes of it in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import int8_oracle as oracle
import numpy as np
import pytest
from int8_oracle import F32, Array

from pagedopt.formats import int8_text
from pagedopt.kernels import numba_numbers
from pagedopt.system.compile_text import load

DECAYS = (0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999)
CODES = {3: np.arange(1, 128), 4: np.arange(1, 256)}
#: u is drawn among so many.
DRAWS = 2.0**32
#: Draws about a limit that float32 may put on either side of it; and of how many each a generator of 16 bits has one.
FEW, SHORT = 256, 2**16


#: Returns f of each q, and how many draws lift it.
Lifting = Callable[[int, Array], tuple[Array, Array]]


def scales(count: int) -> Array:
    """Magnitudes that a block may have."""
    return (2.0 ** np.random.default_rng(5).uniform(-94, 120, count)).astype(F32)


def decoded(root: int, codes: Array, absmax: Array) -> Array:
    """Values in float32, of codes and magnitudes in the same shape."""
    flat = codes.reshape(-1).astype(np.int64)
    some = oracle.decode(root, np.repeat(flat, oracle.BLOCK), absmax.reshape(-1))
    return some[:: oracle.BLOCK].reshape(codes.shape)


def lifting(root: int, q: Array) -> tuple[Array, Array]:
    """f of each q, and how many of the 2^32 draws lift it, to a few: those before them do, those after them do not."""
    f = oracle.floor_of(root, q)
    wide = f.astype(np.float64)
    limit = (q - wide**root) / ((wide + 1) ** root - wide**root) * DRAWS
    count = np.clip(np.rint(limit), 0, DRAWS).astype(np.int64)
    for off, up in ((-FEW, True), (FEW - 1, False)):
        drawn = np.clip(count + off, 0, 2**32 - 1)
        some = drawn == count + off  # beyond the first and the last draw there is none
        found = oracle.lifted(root, q, (drawn >> 16).astype(F32), (drawn & 0xFFFF).astype(F32))[1]
        assert (found[some] == up).all()
    return f, count


def after_a_step(
    root: int, codes: Array, absmax: Array, decay: float, lifting: Lifting = lifting
) -> tuple[Array, Array]:
    """f, and the share of draws that lift it, of codes that decay."""
    with np.errstate(all="ignore"):
        values = decoded(root, codes, absmax) * F32(decay)
        q = oracle.shares(root, values.reshape(-1, 1), absmax.reshape(-1), True).reshape(codes.shape)
    f, count = lifting(root, q)
    return f, np.minimum(count / DRAWS, 1)


@pytest.mark.parametrize("root", [3, 4])
def test_the_mean_over_all_draws_is_the_number(root: int) -> None:
    """Of every code, at decays up to 0.99999 and 200 scales; of a second moment from the second code on, as the first
    is the least number."""
    codes = CODES[root][root - 3 :]
    grid, absmax = (each.ravel() for each in np.meshgrid(codes, scales(200)))
    for decay in DECAYS[::2] + DECAYS[-1:]:
        f, share = after_a_step(root, grid, absmax, decay)
        low, high = (decoded(root, f + i, absmax).astype(np.float64) for i in (0, 1))
        want = decoded(root, grid, absmax).astype(np.float64) * float(F32(decay))
        assert np.abs((low + share * (high - low)) / want - 1).max() < 5e-7, decay


def drift(root: int, decay: float, steps: int, lifting: Lifting = lifting) -> Array:
    """The mean of each code after some steps without a gradient, over its first number, beside a block's largest."""
    codes = np.append(0, CODES[root])
    one = np.ones(len(codes), F32)
    f, share = after_a_step(root, codes, one, decay, lifting)
    chain = np.zeros((len(codes), len(codes)))
    chain[codes, f.astype(int)] += 1 - share
    chain[codes, np.minimum(f + 1, codes[-1]).astype(int)] += share
    numbers = (codes / codes[-1]) ** root
    return (np.linalg.matrix_power(chain, steps) @ numbers)[1:]


@pytest.mark.parametrize("root", [3, 4])
@pytest.mark.parametrize("steps", [100, 20_000])
def test_a_moment_decays_as_it_should_over_many_steps(root: int, steps: int) -> None:
    """To 1 % of where it began; a second moment stops at its least number."""
    first = (CODES[root] / CODES[root][-1]) ** root
    for decay in DECAYS:
        want = float(F32(decay)) ** steps * first
        assert (np.abs(drift(root, decay, steps) - want) <= 0.01 * first + (root == 4) * first[0]).all(), decay


def test_16_bits_are_not_enough() -> None:
    """With u = h / 65536, which lifts too often, the test above would fail."""

    def short(root: int, q: Array) -> tuple[Array, Array]:
        f, count = lifting(root, q)
        return f, np.ceil(count / SHORT) * SHORT

    first = (CODES[3] / 127) ** 3
    off = np.abs(drift(3, 0.99999, 20_000, short) - float(F32(0.99999)) ** 20_000 * first) / first
    assert off.max() > 0.05


SEARCH = """
import numpy as np
from numba import njit
from pagedopt.kernels.numba_numbers import {functions}

@njit(error_model="numpy")
def kernel(first, last, power, top):
    wrong, magic, scale = 0, np.float32(12582912), np.float32(1)
    for i in range(first, last):
{between}
        size, share = np.float64(low), np.float64(share)
        below = size * size * size * (size if power == 4 else 1.0)
        above = (size + 1) * (size + 1) * (size + 1) * (size + 1 if power == 4 else 1.0)
        wrong += not (below <= share and (share < above or size == top))
    return wrong
"""


def searched(root: int) -> Callable[..., int]:
    """A loop over floats by their bits that counts those whose f is wrong, made of the kernel's own statements."""
    between = int8_text._ROOTS[root].between.replace("np.float32(x[i])", "float_of(np.uint32(i))")
    names = [name for name in dir(numba_numbers) if name.startswith("element_")]
    text = SEARCH.format(between=between, functions=", ".join([*names, "float_of", "bits_of"]))
    made: Any = load(text, f"searched {root}", "pagedopt.kernels.numba_numbers")
    return made


@pytest.mark.parametrize("root", [3, 4])
def test_every_share_lies_between_its_codes(root: int) -> None:
    """Of all floats from a thousandth (of root 4 from 1) up to a little more than the largest code's power."""
    first = F32(0.001 if root == 3 else 1).view(np.uint32)
    last = np.nextafter(oracle.WHOLE[root] * F32(1.001), F32(np.inf)).view(np.uint32)
    assert int(last) - int(first) > 24 * 2**23
    search = searched(root)
    assert search(int(first), int(last), root, float(oracle.TOP[root])) == 0
    assert search(0, 1 << 20, root, float(oracle.TOP[root])) == 0, "zero and the first denormals"
