"""State in 8 bits: a code for each element, and the largest magnitude of each block of 256 elements in float32.

First moments store the cube root of an element's share of that magnitude, with its sign; second moments, which are
not negative and spread wider, the fourth root.  No code of a second moment above zero stands for zero, by whose root
Adam would divide.  ``notes/int8.md`` compares the codes; ``int8.cuh`` is the same for CUDA, to the same bits.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from typing import Any, get_args

import torch

from .choice import Choice, Rounding, State
from .format import Column, Format
from .int8_text import LOAD_3, LOAD_4, How, store

BLOCK = 256
#: State of parameters with fewer elements is stored in float32.
FEWEST = 4096
#: A second moment with a decay from here on moves by less than a code in a step, and is rounded at random.
SLOW = 0.99
#: The largest decay of a first moment; notes/int8.md has the errors beyond.
MAX_DECAY = 0.99
#: The least magnitude of a block that is not all zero.
MIN_ABS = 2.0**-94
CUBE, FOURTH = 127.0**3, 255.0**4


CUDA_TEXT = importlib.resources.files(__package__).joinpath("int8.cuh").read_text()

_CUDA_HOW: dict[How, str] = {"nearest": "int8::NEAREST", "by step": "int8::BY_STEP", "by data": "int8::BY_DATA"}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Root(Format):
    """A format of codes in blocks of 256.  Kernels round as :data:`How` says; ``encode`` rounds to the nearest."""

    block: int = BLOCK
    cuda_text: str = CUDA_TEXT


@dataclass(frozen=True, kw_only=True, eq=False)
class Root3(_Root):
    """First moments: a signed code, whose cube is the share of the block's largest magnitude; -128 is NaN."""

    columns: tuple[Column, ...] = (Column("root3", torch.int8), Column("absmax", torch.float32, BLOCK))
    numba_load: str = LOAD_3

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round to nearest; infinities become NaN, as no code stands for them."""
        blocks, absmax = _blocks(values)
        limits = torch.arange(1, 254, 2, dtype=torch.float32, device=values.device) ** 3  # of codes from 1 on, times 8
        sizes = torch.bucketize(blocks.abs() * _scale(8 * CUBE, absmax), limits, right=True)
        codes = torch.where(blocks.isfinite(), torch.where(blocks < 0, -sizes, sizes), -128)
        return codes.to(torch.int8).view(-1)[: len(values)], absmax.view(-1)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Values (numel,)."""
        codes, absmax = columns
        code = codes.float()
        values = ((code * code) * (code * (1 / CUBE))) * _spread(absmax, numel)
        return torch.where(codes == -128, torch.nan, values)


@dataclass(frozen=True, kw_only=True, eq=False)
class Root4(_Root):
    """Second moments: a code from 1 on, whose fourth power is the share of the block's largest; 0 is infinity.

    While all elements of a block are zero, all its codes are 0 and stand for zero.
    """

    columns: tuple[Column, ...] = (Column("root4", torch.uint8), Column("absmax", torch.float32, BLOCK))
    numba_load: str = LOAD_4

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round to nearest; NaN becomes infinity: the first moment is NaN then, too."""
        blocks, absmax = _blocks(values)
        roots = _root(_root((blocks * _scale(FOURTH, absmax)).clamp(1, FOURTH)))
        codes = torch.where(blocks.isfinite() & (absmax > 0), roots.round(), 0)
        return codes.to(torch.uint8).view(-1)[: len(values)], absmax.view(-1)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Values (numel,)."""
        codes, absmax = columns
        code, largest = codes.float(), _spread(absmax, numel)
        root = (code * code) * (1 / 65025)
        return torch.where((codes == 0) & (largest > 0), torch.inf, (root * root) * largest)


@dataclass(frozen=True, kw_only=True)
class OldRoot2(Format):
    """First moments in files of before: a signed code, whose square is the share; it is decoded, and never stored."""

    name: str = "int8, root 2"
    columns: tuple[Column, ...] = (Column("root2", torch.int8), Column("absmax", torch.float32, BLOCK))
    block: int = BLOCK

    def _check_texts(self) -> None:
        """It has none: no kernel loads it."""

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Values (numel,)."""
        codes, absmax = columns
        code = codes.float()
        values = ((code * code.abs()) * (1 / 127**2)) * _spread(absmax, numel)
        return torch.where(codes == -128, torch.nan, values)


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in blocks, (blocks, 256) float32, and the largest magnitude of each, (blocks, 1)."""
    blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    magnitudes = torch.where(blocks.isfinite(), blocks.abs(), 0)
    if not len(blocks):
        return blocks, magnitudes[:, :1]
    absmax = magnitudes.amax(1, keepdim=True)
    return blocks, torch.where((blocks != 0).any(1, keepdim=True), absmax.clamp(min=MIN_ABS), 0)


def _scale(whole: float, absmax: torch.Tensor) -> torch.Tensor:
    # Not whole / absmax, for which torch multiplies by a reciprocal.
    return torch.where(absmax > 0, torch.full_like(absmax, whole) / absmax, 0)


def _root(squares: torch.Tensor) -> torch.Tensor:
    # IEEE's root, as kernels have it: MKL's for float32, which torch takes on a CPU, is an ulp off for some numbers.
    return squares.double().sqrt().float()


def _spread(absmax: torch.Tensor, numel: int) -> torch.Tensor:
    return absmax.repeat_interleave(BLOCK)[:numel]


def _texts(root: int, how: How) -> dict[str, Any]:
    """Return what a format has of its own.

    At random, the mean of the results is the number; to the nearest, a slow mean would never leave its code.
    """
    name = f"int8, root {root}, {'' if how == 'nearest' else 'stochastic '}{how}"
    return {"name": name, "cuda_type": f"Root{root}<{_CUDA_HOW[how]}>", "numba_store": store(root, how)}


HOWS: tuple[How, ...] = get_args(How)
#: By how they round.
FIRST: dict[How, Root3] = {how: Root3(**_texts(3, how)) for how in HOWS}
SECOND: dict[How, Root4] = {how: Root4(**_texts(4, how)) for how in HOWS}
OLD_ROOT2 = OldRoot2()
_INSTEAD = "give that state another format, as state_format={{{!r}: '{}', …: 'int8'}}"


class Int8(Choice):
    """``state_format="int8"``: :class:`Root3` and :class:`Root4`; small parameters have float32."""

    name = "int8"
    formats = FIRST["nearest"], SECOND["nearest"], OLD_ROOT2

    def of(self, state: State) -> Format | torch.dtype:
        """Return the format of a state.

        Raises:
            ValueError: the rule does not say whether the state is signed, or says why it must be exact; a first moment
                decays too slowly.
        """
        if state.numel < FEWEST:
            return torch.float32
        moment, what = state.moment, f"state {state.name!r} of rule {state.rule!r}"
        if moment is None:
            raise ValueError(
                f"{what} cannot be stored in int8: the rule does not say whether it may be negative; decorate the rule "
                f"with @pagedopt.rule(moments={{{state.name!r}: pagedopt.Moment(signed=…, decay=…)}})"
            )
        if moment.exact:
            raise ValueError(
                f"{what} cannot be stored in int8: {moment.exact}; {_INSTEAD.format(state.name, 'float32')}"
            )
        if moment.signed:
            if state.decay is not None and state.decay > MAX_DECAY:
                raise ValueError(
                    f"{what} cannot be stored in int8: its decay {moment.decay} is {state.decay:g}, and codes follow "
                    f"first moments up to {MAX_DECAY} (notes/int8.md); {_INSTEAD.format(state.name, 'bfloat16')}"
                )
            return FIRST[_how(state, default="stochastic")]
        if moment.decay is None:  # a maximum of numbers that are rounded at random would climb
            return SECOND["nearest"]
        slow = state.decay is None or state.decay >= SLOW
        return SECOND[_how(state, default="stochastic" if slow else "nearest")]


def _how(state: State, default: Rounding) -> How:
    if (state.rounding or default) == "nearest":
        return "nearest"
    return "by step" if state.counted else "by data"


INT8 = Int8()
