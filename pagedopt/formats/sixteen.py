"""Parameters of 16 bits with nothing lost: rounded at random, or with a column of what they have lost.

At random, the mean of all results is the number.  A column has all 16 bits that a bfloat16 has lost of a float32, or
their upper 8, rounded at random: the parameter is the nearest bfloat16 (ties away from zero), and the column the signed
rest.  So a number that somebody writes over the parameter is off by half its last bit at most.  ``sixteen.cuh`` and
``sixteen_text.py`` are the same for kernels, to the same bits.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

import torch

from .format import Column, Format
from .names import ParamFormat, ParamRounding
from .sixteen_text import LOADS, STORES

CUDA_TEXT = importlib.resources.files(__package__).joinpath("sixteen.cuh").read_text()
#: What the columns beside parameters are called, as a state: their keys are ``param.low16`` and ``param.low8``.
PARAM = "param"
#: Bits of a bfloat16 infinity, and of a float32's sign, infinity and largest finite number.
_HIGH_INFINITE, _SIGN, _INFINITE, _LARGEST = 0x7F80, -(2**31), 0x7F800000, 0x7F7FFFFF


@dataclass(frozen=True, kw_only=True)
class Remainder(Format):
    """The column of what parameters have lost, as state: no kernel loads it without the parameter.

    Attributes:
        of: the name of the parameters' format.
    """

    of: str

    def _check_texts(self) -> None:
        """It has none."""

    @property
    def unit(self) -> int:
        """What an entry counts, in units of the last of the 16 bits."""
        return 1 << (16 - 8 * self.columns[0].dtype.itemsize)

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round a rest in units of the last of the 16 bits, to nearest."""
        dtype = self.columns[0].dtype
        kind = torch.iinfo(dtype)
        return ((values / self.unit).round().clamp(kind.min, kind.max).to(dtype),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the rest in units of the last of the 16 bits, (numel,)."""
        return columns[0].float() * self.unit


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterFormat(Format):
    """A format of parameters alone.

    Attributes:
        draws: whether it rounds at random, so that its optimizer counts steps.
        remainder: the format of its second column, as state; None: it has one column.
    """

    cuda_text: str = CUDA_TEXT
    draws: bool = True
    remainder: Remainder | None = None

    @property
    def at_once(self) -> int:
        """As many elements as Philox draws for at once on a CPU."""
        return 256

    def stands_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the numbers that parameters of ``dtype`` stand for, which is that of their state."""
        return dtype if self.remainder is None else torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class Split(ParameterFormat):
    """A bfloat16 and its remainder."""

    remainder: Remainder

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split float32 values; 24 bits are rounded to nearest.  Finite ones stay finite."""
        bits = values.float().view(torch.int32)
        if half := self.remainder.unit // 2:
            size = bits & ~_SIGN
            bits = (bits & _SIGN) | torch.where(size < _INFINITE, (size + half).clamp(max=_LARGEST), size)
        high = (bits + 0x8000) >> 16
        nan = values.isnan()
        high, rest = torch.where(nan, 0x7FC0, high), torch.where(nan, 0, bits - (high << 16))
        low = (rest // self.remainder.unit).to(self.columns[1].dtype)
        return high.to(torch.int16).view(torch.bfloat16), low

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Values (numel,) float32.  Over a zero or an infinity that is not of the rest's making, the rest is zero."""
        high, low = columns[0].contiguous().view(torch.int16).int(), columns[1].int() * self.remainder.unit
        size = high & 0x7FFF
        alone = ((size == 0) & (low < 0)) | ((size == _HIGH_INFINITE) & (low > 0))
        return ((high << 16) + torch.where(alone, 0, low)).view(torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn(ParameterFormat):
    """A column of 16 bits alone, rounded at random."""

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round to nearest."""
        return (values.to(self.columns[0].dtype),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Values (numel,) float32."""
        return columns[0].float()


def _split(bits: int, dtype: torch.dtype) -> Split:
    name, low = f"bfloat16+{bits}", Column(f"low{bits}", dtype)
    return Split(
        name=name, columns=(Column("", torch.bfloat16), low),
        remainder=Remainder(name=f"remainder of {name}", of=name, columns=(low,)),
        cuda_type=f"sixteen::Split<{bits}>", numba_load=LOADS[bits], numba_store=STORES[bits], draws=bits < 16,
    )  # fmt: skip


def _drawn(dtype: torch.dtype, cuda: str) -> Drawn:
    name = str(dtype).removeprefix("torch.")
    return Drawn(
        name=f"{name}, stochastic", columns=(Column("", dtype),), cuda_type=f"sixteen::Drawn<{cuda}>",
        numba_load=LOADS[name], numba_store=STORES[name],
    )  # fmt: skip


SPLIT: dict[str, Split] = {form.name: form for form in (_split(16, torch.int16), _split(8, torch.int8))}
DRAWN: dict[torch.dtype, Drawn] = {
    torch.bfloat16: _drawn(torch.bfloat16, "bfloat16_bits"), torch.float16: _drawn(torch.float16, "half_bits")
}  # fmt: skip
REMAINDERS: tuple[Remainder, ...] = tuple([form.remainder for form in SPLIT.values()])
#: Their columns' keys in state.
LOST = frozenset(column.key(PARAM) for form in REMAINDERS for column in form.columns)


def check_param_options(param_format: object, param_rounding: object) -> None:
    """Check the options ``param_format`` and ``param_rounding``.

    Raises:
        ValueError: one has a bad value, or they do not go together.
    """
    if param_format is not None and (not isinstance(param_format, str) or param_format not in SPLIT):
        raise ValueError(f"param_format is {param_format!r}; there are {', '.join(map(repr, SPLIT))}, or None")
    if param_rounding not in ("nearest", "stochastic"):
        raise ValueError(f"param_rounding is {param_rounding!r}; it must be 'nearest' or 'stochastic'")
    if param_format is not None and param_rounding == "stochastic":
        raise ValueError(f"param_rounding is 'stochastic', and param_format is {param_format!r}: leave one of them out")


def of_parameter(form: ParamFormat, rounding: ParamRounding, dtype: torch.dtype) -> ParameterFormat | None:
    """Return the format of parameters of a dtype, given checked options; None: they are plain numbers.

    Raises:
        ValueError: the parameters are float16, and a column of what they have lost is asked for.
    """
    if rounding == "stochastic":
        return DRAWN.get(dtype)
    if form is None or dtype is torch.bfloat16:
        return SPLIT.get(form or "")
    if dtype is torch.float16:
        raise ValueError(
            f"param_format is {form!r}, and a parameter is float16, whose 5 bits of exponent are not those of "
            "float32: cast the model to bfloat16, or give param_rounding='stochastic'"
        )
    return None
