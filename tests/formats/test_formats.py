"""How state is stored is asked for by names that exist."""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from formats_under_test import TwoHalves
from int8_oracle import Draw
from int8_support import get, put, same
from kernel_texts import nvrtc
from optim_support import ready
from support import BF16, F32

import pagedopt
from pagedopt import Sweep
from pagedopt.formats import FORMATS, Column, ElementFormat, Format, names
from pagedopt.formats.floating import CHOICES, StateFormat, check_format, chosen_format, of_dtype
from pagedopt.formats.format import FUNCTIONS
from pagedopt.formats.sixteen import DRAWN, SPLIT, ParameterFormat
from pagedopt.kernels import numba_numbers
from tests.formats import sixteen_oracle as oracle

STATES = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    "state_format", [None, "bfloat16", {}, {"exp_avg": "bfloat16"}, {"exp_avg": None, "exp_avg_sq": "float32"}]
)
@pytest.mark.parametrize("states", [None, STATES, frozenset(STATES)])
def test_formats_of_known_states_are_taken(state_format: StateFormat, states: tuple[str, ...] | None) -> None:
    check_format(state_format, states)


@pytest.mark.parametrize(
    ("given", "name"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("float", "float32"),
     ("double", "float64"), ("fp64", "float64"), *((form.columns[0].dtype, name) for name, form in FORMATS.items())],
    ids=str,
)  # fmt: skip
def test_dtypes_and_short_names_are_formats_too(given: Any, name: str) -> None:
    for said in (given, {"exp_avg": given}):
        check_format(said, STATES)
        assert chosen_format(said, "exp_avg") is FORMATS[name]


def test_an_optimizer_says_what_the_user_said() -> None:
    optimizers = [pagedopt.PagedAdamW([ready()], state_format=form) for form in ("bf16", "bfloat16")]
    for optimizer in optimizers:
        optimizer.step()
        (state,) = optimizer.state.values()
        assert state["exp_avg"].dtype is BF16
    assert copy.deepcopy(optimizers[0]).state_format == "bf16"
    one, other = (pagedopt.estimate([(5, 5)], rule="adamw", state_format=form) for form in ("bf16", "bfloat16"))
    assert one == other


def test_names_are_those_of_the_formats_there_are() -> None:
    """``names`` lists them again, as it does without torch."""
    assert tuple(FORMATS) == names.NUMBER_NAMES
    assert tuple(CHOICES) == names.CHOICE_NAMES
    assert set(get_args(names.ShortName)) == names.SHORT.keys()
    assert set(names.SHORT.values()) == set(names.NAMES)


KNOWN = "there are float32, bfloat16, float16, float64, int8, or None"
UNKNOWN: list[tuple[Any, Any, str]] = [
    *((dtype, None, f"state_format is {dtype}; there are float32") for dtype in (torch.int8, torch.complex64)),
    ("int4", None, f"state_format is 'int4'; {KNOWN}"),
    ({"exp_avg": "int4"}, STATES, f"state_format is 'int4'; {KNOWN}"),
    ({"no_such": "bfloat16"}, STATES, "state_format names the state 'no_such'; there are exp_avg, exp_avg_sq"),
    ({"no_such": None}, STATES, "state_format names the state 'no_such'; there are exp_avg, exp_avg_sq"),
    ({"momentum_buffer": "bfloat16"}, (), "'momentum_buffer'; there is none"),
    # A class in the place of an object is answered with what to write.
    ({"exp_avg": TwoHalves}, None, "a pagedopt.formats.Format (an object: TwoHalves()), or None"),
    (5, None, "a pagedopt.formats.Format, or None"),
]


@pytest.mark.parametrize(("given", "states", "text"), UNKNOWN)
def test_what_is_no_format_or_no_state_is_refused_with_those_there_are(given: Any, states: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        check_format(given, states)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_numbers_are_encoded_as_torch_converts_them(form: Format) -> None:
    values = torch.randn(257, dtype=form.arithmetic, generator=torch.Generator().manual_seed(1))
    (stored,) = form.encode(values)
    assert torch.equal(stored, values.to(form.columns[0].dtype))
    assert torch.equal(form.decode(stored, numel=257), stored.to(form.arithmetic))


def eighths(**changes: Any) -> ElementFormat:
    """Eighths in a byte, whose ``encode`` and ``decode`` are those of who converts."""
    said: dict[str, Any] = {
        "name": "eighths", "columns": (Column("", torch.int8),), "cuda_type": "signed char", "numba_type": "_np.int8",
        "numba_load": "S({}) / S(8)", "numba_store": "_np.int8(_np.rint({} * S(8)))",
    }  # fmt: skip
    return changes.pop("kind", ElementFormat)(**{**said, **changes})


@dataclass(frozen=True, kw_only=True)
class Decoded(ElementFormat):
    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        return columns[0].float() / 8


@dataclass(frozen=True, kw_only=True)
class Eighths(Decoded):
    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((values * 8).round().to(torch.int8),)


WHOLE = {"numba_load": "S({})", "numba_store": "_np.int8({})"}


#: Texts that cannot work, of one format or another.
WRONG_TEXTS: list[tuple[Any, dict[str, str], str]] = [
    (eighths, {"numba_type": "int8"}, "format 'eighths': numba_type is 'int8'; write '_np.int8'"),
    (eighths, {"cuda_type": "nosuch"}, "its CUDA text does not load or store a nosuch: "),
    (eighths, {"cuda_text": "this is no C++"}, "does not load or store a signed char: format eighths(1): error: "),
    (eighths, {"numba_load": ""}, "format 'eighths': numba_load is empty; give an expression"),
    (eighths, {"numba_type": ""}, "format 'eighths': numba_type is empty; give an expression"),
    (eighths, {"numba_load": "S({}) / / 8"}, "'eighths': numba_load is not an expression of Python: invalid syntax"),
    (eighths, {"numba_load": "S(8)"}, "'eighths': numba_load is 'S(8)'; it needs {} in place of the element"),
    (eighths, {"numba_store": "{value}"}, "'eighths': numba_store is '{value}'; braces but {} are doubled"),
    (eighths, {"numba_store": "np.int8({})"}, "numba_store uses the name np; there are S, _np, _numbers"),
    (eighths, {"numba_type": "int8_t"}, "format 'eighths': numba_type uses the name int8_t; there are _np"),
    (TwoHalves, {"numba_load": " "}, "format 'two halves': numba_load is empty; give statements"),
    (TwoHalves, {"numba_store": "# nothing"}, "format 'two halves': numba_store is empty; give statements"),
    (TwoHalves, {"numba_load": "for i in range(live)"}, "is not statements of Python: expected ':', in 'for i in"),
    (TwoHalves, {"numba_load": "x[:live] = lost * codes"}, "numba_load uses the name codes; there are S, "),
    (TwoHalves, {"numba_store": "lost[0] = element_sin(x[0])"}, "numba_store uses the name element_sin"),
]


@pytest.mark.parametrize(("make", "changes", "text"), WRONG_TEXTS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_text_that_cannot_work_is_refused_when_the_format_is_made(
    make: Any, changes: dict[str, str], text: str
) -> None:
    if any("cuda" in name for name in changes):
        nvrtc()
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**changes)


def test_where_nvrtc_is_missing_no_text_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("libnvrtc.so is not there")

    monkeypatch.setattr("pagedopt.formats.format.compile_cuda", missing)
    assert eighths(cuda_text="a text that nobody compiled before").cuda_text


NOT_AS_STORED = [
    (eighths(), "format 'eighths': decode makes 1.0 of an entry 1, and numba_load 0.125; define encode and decode"),
    (eighths(kind=Decoded), "format 'eighths': encode makes an entry 0 of 0.25, and numba_store 2; define encode"),
    (eighths(kind=Eighths, **WHOLE), "decode makes 0.125 of an entry 1, and numba_load 1.0; define encode and"),
    (eighths(numba_type="_np.int16"), "numba_type '_np.int16' has 2 bytes; torch.int8 has 1"),
    (eighths(numba_type="_np.int7"), "numba_type is '_np.int7': module 'numpy' has no attribute 'int7'"),
    (eighths(numba_load="S({}).nowhere"), "Numba cannot compile numba_load 'S({}).nowhere'"),
]


@pytest.mark.parametrize(("form", "text"), NOT_AS_STORED)
def test_state_dicts_must_say_what_kernels_store(form: Format, text: str) -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    for state_format in (form, {"exp_avg": form}):
        with pytest.raises(ValueError, match=re.escape(text)):
            pagedopt.PagedAdamW(params, state_format=state_format)


@pytest.mark.parametrize(
    "form",
    [eighths(kind=Eighths), eighths(**WHOLE),
     eighths(kind=Eighths, numba_store="_np.int8({} * S(8))"),  # cut off where encode rounds
     *(dataclasses.replace(form, name="another") for form in FORMATS.values())],
    ids=lambda form: f"{form.name} {form.numba_store}",
)  # fmt: skip
def test_formats_whose_methods_do_what_the_text_does_are_taken(form: Format) -> None:
    check_format(form)


def test_a_format_that_scales_is_in_state_dicts_what_it_is_in_kernels() -> None:
    p, q = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    mine = pagedopt.PagedSGD([p], momentum=0.5, state_format=eighths(kind=Eighths))
    other = torch.optim.SGD([q], 1e-3, momentum=0.5)
    for each in (p, q):
        each.grad = torch.tensor([0.0, 1.0, -2.0, 0.125, 8.0])
    mine.step()
    other.step()
    assert mine.state[p]["momentum_buffer"].tolist() == [0, 8, -16, 1, 64]
    assert torch.equal(mine.decoded_state_dict()["state"][0]["momentum_buffer"], other.state[q]["momentum_buffer"])


def test_the_functions_that_a_text_may_call_are_those_there_are() -> None:
    found = re.findall(r"^def (element_\w+|float_of|bits_of)\(", Path(numba_numbers.__file__).read_text(), re.M)
    assert set(found) == FUNCTIONS


# --- parameters of 16 bits with nothing lost: which bits are stored, that chance has no mean, and what is read --------


EACH: dict[str, ParameterFormat] = {**SPLIT, **{form.name: form for form in DRAWN.values()}}
DRAWING = [name for name, form in EACH.items() if form.draws]
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
@pytest.mark.parametrize("name", EACH)
def test_what_is_stored_is_what_the_oracle_stores(name: str, first: int) -> None:
    bits = EVERY if not first else EVERY[::97]
    u = oracle.drawn_for(len(bits), Draw(SEED, STEP, NUMBER, 0, first))
    want = oracle.stored(name, bits, u)
    for mine, theirs in zip(bits_in(swept(EACH[name], values_of(bits), first)), want, strict=True):
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
    form = EACH[name]
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
