"""The codes of int8: torch's conversion and the CPU's kernels leave the bits of an oracle in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import int8_oracle as oracle
import numpy as np
import pytest
import torch
from int8_oracle import F32, Array, Draw
from int8_support import get, put, same

from pagedopt import Sweep
from pagedopt.formats import int8_text
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.format import Format
from pagedopt.formats.int8 import FIRST, HOWS, SECOND, Root3
from pagedopt.formats.int8_text import How
from pagedopt.kernels import numba_numbers
from pagedopt.system.compile_text import load

DRAW = Draw(seed=9, step=77, number=5, input=1)
GENERATOR = np.random.default_rng(3)
TINY = 1e-42  # a denormal
FORMATS = {form.name: form for forms in (FIRST, SECOND) for form in forms.values()}


def root_of(form: Format) -> int:
    return 3 if isinstance(form, Root3) else 4


def drawn_by(form: Format, draw: Draw = DRAW) -> Draw | None:
    """What the oracle draws as this format does."""
    (how,) = (how for forms in (FIRST, SECOND) for how, each in forms.items() if each is form)
    drawn: dict[How, Draw | None] = {"nearest": None, "by step": draw, "by data": draw._replace(step=None)}
    return drawn[how]


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
    "ties of root 3": ties(3, 127), "ties of root 4": ties(4, 255),
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
    return VALUES[name] if root_of(form) == 3 else np.abs(VALUES[name])


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(FORMATS[name], dtype, id=f"{name}, of {str(dtype)[6:]}", marks=[pytest.mark.long] if long else [])
        for name, dtype, long in (
            ("int8, root 3, nearest", torch.float32, False), ("int8, root 3, stochastic by step", torch.float64, True),
            ("int8, root 3, stochastic by data", torch.float32, False), ("int8, root 4, nearest", torch.float32, True),
            ("int8, root 4, stochastic by step", torch.float32, False),
            ("int8, root 4, stochastic by data", torch.float64, True),
        )
    ],
)  # fmt: skip
def test_a_kernel_stores_and_loads_the_bits_of_the_oracle(form: Format, dtype: torch.dtype) -> None:
    for name in VALUES:
        values, root = torch.from_numpy(values_for(form, name)).to(dtype), root_of(form)
        want = oracle.encode(root, values.numpy(), drawn_by(form))
        assert same(stored_by_kernel(form, values), want), name
        assert same([loaded_by_kernel(form, *want)], [oracle.decode(root, *want)]), name


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_torch_converts_to_the_bits_of_the_oracle_and_rounds_to_nearest(form: Format) -> None:
    for name in VALUES:
        values, root = values_for(form, name), root_of(form)
        want = oracle.encode(root, values)
        columns = form.encode(torch.from_numpy(values))
        assert same(columns, want), name
        assert same([form.decode(*columns, numel=len(values))], [oracle.decode(root, *want)]), name


def test_kernels_that_round_otherwise_are_others() -> None:
    assert len(set(FORMATS.values())) == len({form.cuda_type for form in FORMATS.values()}) == 2 * len(HOWS)


def test_bits_are_drawn_anew_where_16_are_not_enough() -> None:
    """Of so many elements a few are so near that the lower bits decide, and lift some of them."""
    form, values = FIRST["by step"], np.abs(spread(1 << 18, 1)).astype(np.float32)
    blocks = oracle.in_blocks(values)
    q = oracle.shares(3, blocks, oracle.absmax_of(blocks), True)
    h, low = oracle.halves(blocks, DRAW), oracle.halves(blocks, DRAW, lower=True)
    ends = [oracle.lifted(3, q, h, np.full_like(h, end))[1] for end in (0, 65535)]
    near = ends[0] != ends[1]
    assert 1 < near.sum() < 20, "one in 65,536"
    assert 0 < oracle.lifted(3, q, h, low)[1][near].mean() < 1
    assert same(stored_by_kernel(form, torch.from_numpy(values)), oracle.encode(3, values, DRAW))


def absmaxes() -> Array:
    """Magnitudes that a block may have: the ends, powers of two and their neighbours, and random ones."""
    powers = np.float32(2.0) ** np.arange(-94, 128, dtype=np.float32)
    above, below = (np.nextafter(powers, np.float32(side)) for side in (np.inf, 0))
    random = 2.0 ** GENERATOR.uniform(-94, 127.999, 2000)
    found = np.concatenate([powers, above, below[1:], [np.finfo(np.float32).max], random]).astype(np.float32)
    assert found.min() == 2.0**-94
    return found


@pytest.mark.parametrize("form", [FIRST["nearest"], SECOND["nearest"]], ids=["root 3", "root 4"])
def test_encoding_what_was_decoded_changes_nothing(form: Format) -> None:
    """Over all codes, of a NaN and of infinity, too."""
    absmax = torch.from_numpy(absmaxes())
    codes = torch.arange(256, dtype=torch.uint8).view(form.columns[0].dtype).repeat(len(absmax))
    again = form.encode(form.decode(codes, absmax, numel=len(codes)))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], absmax)
    values = oracle.decode(root_of(form), codes.numpy(), absmax.numpy())
    assert same(stored_by_kernel(form, torch.from_numpy(values)), (codes.numpy(), absmax.numpy()))


@pytest.mark.parametrize("how", HOWS[:2])
def test_no_second_moment_becomes_zero_unless_all_of_its_block_are(how: How) -> None:
    values = np.zeros(512, np.float32)
    values[:2] = 1, 1e-30
    codes, absmax = stored_by_kernel(SECOND[how], torch.from_numpy(values))
    assert codes[0] == 255
    assert codes[1:256].min() == 1
    assert not codes[256:].any()
    assert absmax.tolist() == [1, 0]
    assert (oracle.decode(4, codes, absmax)[:256] > 0).all()


@pytest.mark.parametrize("root", [3, 4])
def test_the_largest_of_a_block_stays_what_it_is_whatever_is_drawn(root: int) -> None:
    """So rounding never moves an absmax: not for magnitudes either whose product with T / a is not T."""
    form, most = ({3: FIRST, 4: SECOND}[root]["by step"], {3: 127, 4: 255}[root])
    largest = np.exp(GENERATOR.uniform(-60, 80, 400)).astype(np.float32)
    values = (largest[:, None] * GENERATOR.uniform(0, 1, (400, 256)).astype(np.float32)).astype(np.float32)
    values[:, 17] = largest
    for step in range(1, 65):
        codes, absmax = stored_by_kernel(form, torch.from_numpy(values.ravel()), DRAW._replace(step=step))
        assert (codes.reshape(400, 256)[:, 17] == most).all()
        assert np.array_equal(absmax, largest)


ZERO, ONES, PI = 0, 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN: list[tuple[Any, Any, str]] = [
    ((ZERO,) * 4, (ZERO,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_oracle_s_philox_gives_the_known_answers_of_random123(counter: Any, key: Any, words: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in oracle.philox(counter, key)) == words


@pytest.mark.parametrize("lower", [False, True], ids=["h", "l"])
def test_draws_are_spread_evenly_over_elements(lower: bool) -> None:
    """Their mean is a half, no number comes too often, and the index in the parameter counts beyond 32 bits."""
    rows = np.zeros((256, 256), np.float32)
    drawn = oracle.halves(rows, DRAW, lower)
    assert abs(drawn.mean() / 65536 - 0.5) < 5 * 0.29 / 256
    assert len(np.unique(drawn)) > 0.62 * 65536  # 1 - 1/e of all, as of random numbers
    for other in (DRAW._replace(first=1 << 40), DRAW._replace(step=78), DRAW._replace(input=2)):
        assert (oracle.halves(rows, other, lower) == drawn).mean() < 0.001
    assert (oracle.halves(rows, DRAW, not lower) == drawn).mean() < 0.001


def test_two_neighbours_among_inputs_share_a_call_and_no_bit_has_one_place_in_both() -> None:
    rows = np.zeros((64, 256), np.float32)
    m, v = (oracle.halves(rows, DRAW._replace(input=i)).astype(np.uint32) for i in (2, 3))
    assert np.array_equal(m, (v & 255) << 8 | v >> 8)
    assert abs(np.corrcoef(m.ravel(), v.ravel())[0, 1]) < 5 / np.sqrt(m.size) + 2 / 256


# --- stochastic rounding of int8 without chance: its expectation over all random bits, and what becomes of it in ------


DECAYS = (0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999)
CODES = {3: np.arange(1, 128), 4: np.arange(1, 256)}
#: u is drawn among so many.
DRAWS = 2.0**32
#: Draws about a limit that float32 may put on either side of it.
FEW = 256


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


def after_a_step(root: int, codes: Array, absmax: Array, decay: float) -> tuple[Array, Array]:
    """f, and the share of draws that lift it, of codes that decay."""
    with np.errstate(all="ignore"):
        values = decoded(root, codes, absmax) * F32(decay)
        q = oracle.shares(root, values.reshape(-1, 1), absmax.reshape(-1), True).reshape(codes.shape)
    f, count = lifting(root, q)
    return f, np.minimum(count / DRAWS, 1)


@pytest.mark.parametrize("root", [3, 4])
def test_the_mean_over_all_draws_is_the_number(root: int) -> None:
    """Of every code, at decays up to 0.99999 and 40 scales; of a second moment from the second code on, as the first
    is the least number."""
    codes = CODES[root][root - 3 :]
    grid, absmax = (each.ravel() for each in np.meshgrid(codes, scales(40)))
    for decay in DECAYS:
        f, share = after_a_step(root, grid, absmax, decay)
        low, high = (decoded(root, f + i, absmax).astype(np.float64) for i in (0, 1))
        want = decoded(root, grid, absmax).astype(np.float64) * float(F32(decay))
        assert np.abs((low + share * (high - low)) / want - 1).max() < 5e-7, decay


SEARCH = """
import numpy as np
from numba import njit
from pagedopt.kernels.numba_numbers import {functions}

@njit(error_model="numpy")
def kernel(first, last, stride, power, top):
    wrong, magic, scale = 0, np.float32(12582912), np.float32(1)
    for i in range(first, last, stride):
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


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 61])
@pytest.mark.parametrize("root", [3, 4])
def test_every_share_lies_between_its_codes(root: int, stride: int) -> None:
    """Of all floats from a thousandth (of root 4 from 1) up to a little more than the largest code's power."""
    first = F32(0.001 if root == 3 else 1).view(np.uint32)
    last = np.nextafter(oracle.WHOLE[root] * F32(1.001), F32(np.inf)).view(np.uint32)
    assert int(last) - int(first) > 24 * 2**23
    search = searched(root)
    assert search(int(first), int(last), stride, root, float(oracle.TOP[root])) == 0
    assert search(0, 1 << 20, stride, root, float(oracle.TOP[root])) == 0, "zero and the first denormals"
