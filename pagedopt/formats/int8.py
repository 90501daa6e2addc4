"""State in 8 bits: a code for each element, and the largest magnitude of each block of 256 elements in float32.

First moments store the square root of an element's share of that magnitude, with its sign; second moments, which are
not negative and spread wider, the fourth root.  No code of a second moment above zero stands for zero, by whose root
Adam would divide.  ``notes/int8.md`` compares the codes; ``int8.cuh`` is the same for CUDA, to the same bits.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

import torch

from .choice import Choice, State
from .format import Column, Format

BLOCK = 256
#: Parameters of fewer elements keep their state in float32.
FEWEST = 4096
#: A second moment with a decay from here on moves by less than a code in a step, and is rounded stochastically.
SLOW = 0.99
#: The largest decay of a first moment; notes/int8.md has the errors beyond.
MOST_DECAY = 0.99
#: The least magnitude of a block that is not all zero.
LEAST = 2.0**-94
SQUARE, FOURTH = 127.0**2, 255.0**4


CUDA_TEXT = importlib.resources.files(__package__).joinpath("int8.cuh").read_text()

_ABSMAX = """
most = np.uint32(0)
for i in range(live):
    magnitude = bits_of(np.float32(x[i])) & np.uint32(0x7FFFFFFF)
    most = max(most, magnitude)
finite = most < np.uint32(0x7F800000)
if not finite:
    most = np.uint32(1)
    for i in range(live):
        magnitude = bits_of(np.float32(x[i])) & np.uint32(0x7FFFFFFF)
        if magnitude < np.uint32(0x7F800000):
            most = max(most, magnitude)
largest = float_of(most)
if most != np.uint32(0) and largest < np.float32(2.0**-94):
    largest = np.float32(2.0**-94)
absmax[0] = largest
if most == np.uint32(0):
    for i in range(live):
        {codes}[i] = 0
    return
"""
_LOAD_2 = """
largest = absmax[0]
for i in range(live):
    code = np.float32(root2[i])
    value = ((code * element_abs(code)) * np.float32(1 / 16129)) * largest
    x[i] = S(value) if root2[i] != -128 else S(np.nan)
"""
_STORE_2 = (
    _ABSMAX.format(codes="root2")
    + """
scale = np.float32(16129) / largest
magic = np.float32(12582912)
for i in range(live):
    square = element_abs(np.float32(x[i])) * scale
    square = square if square < np.float32(16129) else np.float32(16129)
    square = square if square > np.float32(1e-6) else np.float32(1e-6)
    root = element_sqrt(square)
    root2[i] = np.int8((root + magic) - magic if x[i] > 0 else -((root + magic) - magic))
if not finite:
    for i in range(live):
        if not element_abs(np.float32(x[i])) < np.float32(np.inf):
            root2[i] = -128
"""
)
_LOAD_4 = """
largest = absmax[0]
zero = np.float32(np.inf) if largest > 0 else np.float32(0)
for i in range(live):
    code = np.float32(root4[i])
    root = (code * code) * np.float32(1 / 65025)
    value = (root * root) * largest
    x[i] = S(value) if root4[i] != 0 else S(zero)
"""
_NEAREST_4 = """
scale = np.float32(4228250624) / largest
magic = np.float32(12582912)
for i in range(live):
    value = np.float32(x[i]) * scale
    value = value if value < np.float32(4228250624) else np.float32(4228250624)
    value = value if value > np.float32(1) else np.float32(1)
    root4[i] = np.uint8((element_sqrt(element_sqrt(value)) + magic) - magic)
"""
# Philox 4x32 with 10 rounds, of 32 counters at once: a loop over arrays becomes one over vectors.
_STOCHASTIC_4 = """
lanes = np.empty((6, 32), np.uint32)
block = np.uint64(index) // np.uint64(256) * np.uint64(32)
for lane in range(32):
    place = block + np.uint64(lane)
    lanes[0, lane] = np.uint32(place & np.uint64(0xFFFFFFFF))
    lanes[1, lane] = np.uint32(place >> np.uint64(32))
    lanes[2, lane] = np.uint32(seed & 0xFFFFFFFF)
    lanes[3, lane] = np.uint32(row)
key = np.uint32(seed >> 32)
other = np.uint32(input)
for turn in range(10):
    for lane in range(32):
        left = np.uint64(0xD2511F53) * np.uint64(lanes[0, lane])
        right = np.uint64(0xCD9E8D57) * np.uint64(lanes[2, lane])
        lanes[0, lane] = np.uint32(right >> np.uint64(32)) ^ lanes[1, lane] ^ key
        lanes[2, lane] = np.uint32(left >> np.uint64(32)) ^ lanes[3, lane] ^ other
        lanes[1, lane] = np.uint32(right & np.uint64(0xFFFFFFFF))
        lanes[3, lane] = np.uint32(left & np.uint64(0xFFFFFFFF))
    key = np.uint32((np.uint64(key) + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF))
    other = np.uint32((np.uint64(other) + np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF))
parts = np.empty(256, np.float32)
for half in range(2):
    for lane in range(32):
        for i in range(4):
            word = lanes[2 * half + i // 2, lane]
            part = (word >> np.uint32(16)) if i % 2 else (word & np.uint32(0xFFFF))
            parts[128 * half + 4 * lane + i] = np.float32(part)
scale = np.float32(4228250624) / largest
magic = np.float32(12582912)
for i in range(live):
    value = np.float32(x[i])
    whole = value * scale
    whole = whole if whole < np.float32(4228250624) else np.float32(4228250624)
    whole = whole if whole > np.float32(1) else np.float32(1)
    square = element_sqrt(whole)
    low = ((element_sqrt(square) - np.float32(0.5)) + magic) - magic
    low = low if low < np.float32(254) else np.float32(254)
    low2 = low * low
    d = low + low + np.float32(1)
    step = d * ((low2 + low2) + d)
    rest = (square - low2) * (square + low2)
    up = (parts[i] * np.float32(1 / 65536)) * step < rest
    rounded = low + np.float32(1) if up else low
    root4[i] = np.uint8(np.float32(255) if value == largest else rounded)
"""
_NOT_FINITE_4 = """
if not finite:
    for i in range(live):
        if not element_abs(np.float32(x[i])) < np.float32(np.inf):
            root4[i] = 0
"""


@dataclass(frozen=True, kw_only=True)
class Root2(Format):
    """First moments: a signed code, whose square is the share of the block's largest magnitude; -128 is NaN."""

    name: str = "int8, root 2"
    columns: tuple[Column, ...] = (Column("root2", torch.int8), Column("absmax", torch.float32, BLOCK))
    block: int = BLOCK
    cuda_type: str = "Root2"
    cuda_text: str = CUDA_TEXT
    numba_load: str = _LOAD_2
    numba_store: str = _STORE_2

    def __hash__(self) -> int:
        """Hash the name alone: each step looks up its kernel by this."""
        return hash(self.name)

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Round to nearest; infinities become NaN, as no code stands for them."""
        blocks, absmax = _blocks(values)
        squares = (blocks.abs() * _scale(SQUARE, absmax)).clamp(1e-6, SQUARE)
        codes = torch.where(blocks.isfinite(), _root(squares).copysign(blocks).round(), -128)
        return codes.to(torch.int8).view(-1)[: len(values)], absmax.view(-1)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Values (numel,)."""
        codes, absmax = columns
        code = codes.float()
        values = ((code * code.abs()) * (1 / SQUARE)) * _spread(absmax, numel)
        return torch.where(codes == -128, torch.nan, values)


@dataclass(frozen=True, kw_only=True)
class Root4(Format):
    """Second moments: a code from 1 on, whose fourth power is the share of the block's largest; 0 is infinity.

    While all elements of a block are zero, all its codes are 0 and stand for zero.

    Attributes:
        stochastic: kernels round up or down at random, so that the mean of the results is the number; if they rounded
            to the nearest, a slow mean would never leave its code.  ``encode`` always rounds to the nearest.
    """

    stochastic: bool = False
    name: str = ""
    columns: tuple[Column, ...] = (Column("root4", torch.uint8), Column("absmax", torch.float32, BLOCK))
    block: int = BLOCK
    cuda_type: str = ""
    cuda_text: str = CUDA_TEXT
    numba_load: str = _LOAD_4
    numba_store: str = ""

    def __post_init__(self) -> None:
        how = "stochastic" if self.stochastic else "nearest"
        store = _ABSMAX.format(codes="root4") + (_STOCHASTIC_4 if self.stochastic else _NEAREST_4) + _NOT_FINITE_4
        text = {"name": f"int8, root 4, {how}", "numba_store": store}
        for key, value in {**text, "cuda_type": f"Root4<{str(self.stochastic).lower()}>"}.items():
            object.__setattr__(self, key, value)
        super().__post_init__()

    def __hash__(self) -> int:
        """Hash the name alone: each step looks up its kernel by this."""
        return hash(self.name)

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


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in blocks, (blocks, 256) float32, and the largest magnitude of each, (blocks, 1)."""
    blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    magnitudes = torch.where(blocks.isfinite(), blocks.abs(), 0)
    if not len(blocks):
        return blocks, magnitudes[:, :1]
    absmax = magnitudes.amax(1, keepdim=True)
    return blocks, torch.where((blocks != 0).any(1, keepdim=True), absmax.clamp(min=LEAST), 0)


def _scale(whole: float, absmax: torch.Tensor) -> torch.Tensor:
    # Not whole / absmax, for which torch multiplies by a reciprocal.
    return torch.where(absmax > 0, torch.full_like(absmax, whole) / absmax, 0)


def _root(squares: torch.Tensor) -> torch.Tensor:
    # IEEE's root, as kernels have it: MKL's for float32, which torch takes on a CPU, is an ulp off for some numbers.
    return squares.double().sqrt().float()


def _spread(absmax: torch.Tensor, numel: int) -> torch.Tensor:
    return absmax.repeat_interleave(BLOCK)[:numel]


ROOT2, NEAREST, STOCHASTIC = Root2(), Root4(), Root4(stochastic=True)


class Int8(Choice):
    """``state_format="int8"``: :class:`Root2` and :class:`Root4`; small parameters keep float32."""

    name = "int8"
    formats = ROOT2, NEAREST

    def of(self, state: State) -> Format | torch.dtype:
        """Return the format of a state.

        Raises:
            ValueError: the rule does not say whether the state is signed; a first moment decays too slowly; random
                rounding is asked for where no steps are counted.
        """
        if state.numel < FEWEST:
            return torch.float32
        moment, what = state.moment, f"state {state.name!r} of rule {state.rule!r}"
        if moment is None:
            raise ValueError(
                f"{what} cannot be stored in int8: the rule does not say whether it may be negative; decorate the rule "
                f"with @pagedopt.rule(moments={{{state.name!r}: pagedopt.Moment(signed=…, decay=…)}})"
            )
        if moment.signed:
            if state.decay is not None and state.decay > MOST_DECAY:
                raise ValueError(
                    f"{what} cannot be stored in int8: its decay {moment.decay} is {state.decay:g}, and codes follow "
                    f"first moments up to {MOST_DECAY} (notes/int8.md); give that state another "
                    f"format, as state_format={{{state.name!r}: 'bfloat16', …: 'int8'}}"
                )
            return ROOT2
        if moment.decay is None:  # a maximum of numbers that are rounded at random would climb
            return NEAREST
        slow = state.decay is None or state.decay >= SLOW
        if (state.rounding or ("stochastic" if slow else "nearest")) == "nearest":
            return NEAREST
        if not state.counted:
            raise ValueError(
                f"{what} would be rounded at random, and its optimizer counts no steps: give v_rounding='nearest'"
            )
        return STOCHASTIC


INT8 = Int8()
