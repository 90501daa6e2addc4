"""Parameters of 16 bits with nothing lost: which bits are stored, that chance has no mean, and what is read again."""

from __future__ import annotations

import numpy as np
import pytest
import sixteen_oracle as oracle
import torch
from int8_oracle import Draw
from int8_support import get, put, same
from support import BF16, F32

from pagedopt import Sweep
from pagedopt.formats.floating import of_dtype
from pagedopt.formats.sixteen import DRAWN, SPLIT, ParameterFormat

FORMATS: dict[str, ParameterFormat] = {**SPLIT, **{form.name: form for form in DRAWN.values()}}
DRAWING = [name for name, form in FORMATS.items() if form.draws]
#: Behind each upper half: nothing, ties and their neighbours, the largest, and parts of the 8 bits that are not stored.
LOWS = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF)
EVERY = np.array([high << 16 | low for low in LOWS for high in range(1 << 16)], np.int64)
SEED, STEP, NUMBER = 5, 77, 3


def values_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def swept(form: ParameterFormat, values: torch.Tensor, first: int = 0) -> list[torch.Tensor]:
    """The columns that a kernel stores for values."""
    columns = [torch.zeros(len(values), dtype=column.dtype) for column in form.columns]
    lists = [[columns[0]], [values], *[[column] for column in columns[1:]]]
    sweep = Sweep(get, lists, formats=[form, of_dtype(F32)], numbers=[NUMBER], firsts=[first])
    sweep.run({}, seed=SEED << 32 | STEP)
    return columns


def bits_in(columns: list[torch.Tensor]) -> list[np.ndarray]:
    """The entries of columns: the first as bits, a remainder as it counts."""
    return [columns[0].view(torch.uint16).numpy().astype(np.int64), *[c.numpy().astype(np.int64) for c in columns[1:]]]


@pytest.mark.parametrize("first", [0, 300, 1, (256 << 33) + 3], ids=["0", "in a block", "in a quad", "far"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_what_the_oracle_stores(name: str, first: int) -> None:
    bits = EVERY if not first else EVERY[::97]
    u = oracle.drawn_for(len(bits), Draw(SEED, STEP, NUMBER, 0, first))
    want = oracle.stored(name, bits, u)
    for mine, theirs in zip(bits_in(swept(FORMATS[name], values_of(bits), first)), want, strict=True):
        assert np.array_equal(mine, theirs), [hex(b) for b in bits[mine != theirs][:3]]


@pytest.mark.parametrize("name", DRAWING)
def test_the_mean_over_all_draws_is_the_number(name: str) -> None:
    """Without chance: each of the draws once.  Float16's denormals have a step of 2^-24, of which u counts 1/65536."""
    u, limit = np.arange(1 << 16), 65504 if name.startswith("float16") else 3.3e38
    for pattern in (0x3F804321, 0xBDCCCCCD, 0x00000123, 0x80C0FFEE, 0x38812345, 0x33812345, 0x7F7E1234, 0x477FDFFF):
        bits = np.full(len(u), pattern, np.int64)
        value = float(values_of(bits[:1]).double())
        if abs(value) < limit:
            mean = oracle.number(name, oracle.stored(name, bits, u)).mean()
            assert mean == value or (abs(value) < 2**-14 and abs(mean - value) <= 2.0**-41), hex(pattern)


@pytest.mark.parametrize("name", DRAWING)
def test_no_draw_makes_a_finite_number_infinite(name: str) -> None:
    limit = 0x477FEFFF if name.startswith("float16") else oracle.LARGEST
    bits = np.repeat(np.array([limit, limit | oracle.SIGN, limit - 1], np.int64), 1 << 12)
    form = FORMATS[name]
    assert form.decode(*swept(form, values_of(bits)), numel=len(bits)).isfinite().all()


def loaded(form: ParameterFormat, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a kernel loads from columns, and :meth:`decode`, too."""
    out = torch.zeros(len(columns[0]))
    lists = [[columns[0]], [out], *[[column] for column in columns[1:]]]
    Sweep(put, lists, formats=[form, of_dtype(F32)]).run({})
    decoded = form.decode(*columns, numel=len(out))
    assert same([out], [decoded])
    return decoded


def test_16_more_bits_are_a_float32() -> None:
    """Every pattern but the payload of a NaN comes back, from kernels and from torch."""
    form, values = SPLIT["bfloat16+16"], values_of(EVERY)
    for columns in (tuple(swept(form, values)), form.encode(values)):
        again = loaded(form, columns)
        assert torch.equal(again.isnan(), values.isnan())
        kept = ~values.isnan()
        assert torch.equal(again[kept].view(torch.int32), values[kept].view(torch.int32))
        assert torch.equal(
            columns[0].view(torch.int16)[~kept], torch.full((int((~kept).sum()),), 0x7FC0, dtype=torch.int16)
        )
        assert not columns[1][~kept].any()


def test_torch_rounds_8_more_bits_to_nearest() -> None:
    form, values = SPLIT["bfloat16+8"], values_of(EVERY)
    again, finite = loaded(form, form.encode(values)), values.isfinite()
    size = EVERY & ~oracle.SIGN
    want = (EVERY & oracle.SIGN) | (np.minimum(size + 0x80, oracle.LARGEST) & ~0xFF)
    assert torch.equal(again[finite].view(torch.int32), values_of(want)[finite].view(torch.int32))
    assert torch.equal(again[~finite].isnan(), values[~finite].isnan())


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_written_over_a_parameter_counts(name: str) -> None:
    """A number is half its last bit off at most; zeros and infinities of either sign are what they are, but for an
    infinity over a negative rest (of a positive one): the bits are those of a number beyond the largest bfloat16."""
    form = SPLIT[name]
    dtype = form.columns[1].dtype
    for written in (1.5, -3 * 2.0**-90, 0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        high = torch.full((2,), written, dtype=BF16)
        low = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
        again = loaded(form, (high, low))
        if written == 0 or written != written:
            assert torch.equal(again.isnan(), high.isnan())
            assert torch.where(again.isnan(), 0, again)[0] == 0
            assert written != 0 or again[0].view(torch.int32) == high.float()[0].view(torch.int32)
        elif abs(written) == torch.inf:
            assert again[1] == written
            assert again[0].isfinite()
        else:
            assert ((again - written).abs() <= torch.finfo(BF16).eps / 2 * 2 ** np.floor(np.log2(abs(written)))).all()


def test_16_bits_of_a_remainder_become_8_and_back() -> None:
    wide, narrow = SPLIT["bfloat16+16"].remainder, SPLIT["bfloat16+8"].remainder
    low = torch.arange(-32768, 32768, dtype=torch.int16)
    (eight,) = narrow.encode(wide.decode(low, numel=len(low)))
    assert torch.equal(eight.float(), (low.float() / 256).round().clamp(-128, 127))
    assert torch.equal(wide.encode(narrow.decode(eight, numel=len(low)))[0], eight.short() * 256)
