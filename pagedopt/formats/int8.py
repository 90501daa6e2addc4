"""State in 8 bits: a code for each element, and the largest magnitude of each block of 256 elements in float32.

First moments store the cube root of an element's share of that magnitude, with its sign; second moments, which are
not negative and spread wider, the fourth root.  No code of a second moment above zero stands for zero, by whose root
Adam would divide.  ``notes/int8.md`` compares the codes; ``int8.cuh`` is the same for CUDA, to the same bits.
"""

from __future__ import annotations

import importlib.resources
import textwrap
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from .choice import Choice, Rounding, State
from .format import Column, Format

BLOCK = 256
#: Parameters of fewer elements keep their state in float32.
FEWEST = 4096
#: A second moment with a decay from here on moves by less than a code in a step, and is rounded at random.
SLOW = 0.99
#: The largest decay of a first moment; notes/int8.md has the errors beyond.
MOST_DECAY = 0.99
#: The least magnitude of a block that is not all zero.
LEAST = 2.0**-94
CUBE, FOURTH = 127.0**3, 255.0**4


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
_LOAD_3 = """
largest = absmax[0]
for i in range(live):
    code = np.float32(root3[i])
    value = ((code * code) * (code * np.float32(1 / 2048383))) * largest
    x[i] = S(value) if root3[i] != -128 else S(np.nan)
"""
_LOAD_4 = """
largest = absmax[0]
zero = np.float32(np.inf) if largest > 0 else np.float32(0)
for i in range(live):
    code = np.float32(root4[i])
    root = (code * code) * np.float32(1 / 65025)
    value = (root * root) * largest
    x[i] = S(value) if root4[i] != 0 else S(zero)
"""
# A third of a float's bits are those of its cube root, by 3 %; one step of Newton's leaves 0.2 %.
_CUBE_ROOT = """\
    root = float_of(np.uint32(bits_of(share) // np.uint32(3)) + np.uint32(0x2A514067))
    root = (root + root + share / (root * root)) * np.float32(1 / 3)
"""
_NEAREST_3 = f"""
scale = np.float32(16387064) / largest
magic = np.float32(12582912)
for i in range(live):
    share = element_abs(np.float32(x[i])) * scale
{_CUBE_ROOT}
    near = ((np.float32(0.5) * root + np.float32(0.5)) + magic) - magic
    odd = near + near - np.float32(1)
    near = near - np.float32(1) if (odd * odd) * odd > share else near
    root3[i] = np.int8(near if x[i] > 0 else -near)
"""
_NEAREST_4 = """
scale = np.float32(4228250624) / largest
magic = np.float32(12582912)
for i in range(live):
    value = np.float32(x[i]) * scale
    value = value if value > np.float32(1) else np.float32(1)
    root4[i] = np.uint8((element_sqrt(element_sqrt(value)) + magic) - magic)
"""
_BETWEEN_3 = f"""\
        share = element_abs(np.float32(x[i])) * scale
{textwrap.indent(_CUBE_ROOT, "    ")}
        low = (root + magic) - magic
        low = low - np.float32(1) if (low * low) * low > share else low
        low = low if low < np.float32(126) else np.float32(126)
        square = low * low
        rest = share - square * low
        step = np.float32(3) * square + (np.float32(3) * low + np.float32(1))
"""
_BETWEEN_4 = """\
        share = np.float32(x[i]) * scale
        share = share if share > np.float32(1) else np.float32(1)
        low = (element_sqrt(element_sqrt(share)) + magic) - magic
        square = low * low
        low = low - np.float32(1) if element_fma(-square, square, share) < np.float32(0) else low
        low = low if low < np.float32(254) else np.float32(254)
        square = low * low
        rest = element_fma(-square, square, share)
        odd = np.float32(2) * low + np.float32(1)
        step = odd * (np.float32(2) * square + odd)
"""
# Philox 4x32 with 10 rounds, of 32 counters at once: a loop over arrays becomes one over vectors.  The first turn draws
# the upper 16 bits of each element's u, beside lower ones of ones; those that it lifts are lifted whatever the lower ones
# are.  Where others are near, a second turn draws these.  There is one array, as each takes as long as 40 elements.
_AT_RANDOM = """
scale = np.float32({whole}) / largest
if scale * largest < np.float32({whole}):
    scale = float_of(bits_of(scale) + np.uint32(1))
magic = np.float32(12582912)
words = np.empty(640, np.uint32)
parts = words.view(np.float32)
for i in range(256):
    parts[256 + i] = np.float32(65535)
block = np.uint64(index) // np.uint64(256) * np.uint64(32)
swapped = input % 2 == 0
for turn in range(2):
    for lane in range(32):
        place = block + np.uint64(lane)
        words[512 + lane] = np.uint32(place & np.uint64(0xFFFFFFFF))
        words[544 + lane] = np.uint32(place >> np.uint64(32)) | np.uint32(turn << 31)
        words[576 + lane] = {step}
        words[608 + lane] = np.uint32(row)
    key = np.uint32(seed >> 32)
    other = np.uint32(input // 2)
    for turn10 in range(10):
        for lane in range(32):
            left = np.uint64(0xD2511F53) * np.uint64(words[512 + lane])
            right = np.uint64(0xCD9E8D57) * np.uint64(words[576 + lane])
            words[512 + lane] = np.uint32(right >> np.uint64(32)) ^ words[544 + lane] ^ key
            words[576 + lane] = np.uint32(left >> np.uint64(32)) ^ words[608 + lane] ^ other
            words[544 + lane] = np.uint32(right & np.uint64(0xFFFFFFFF))
            words[608 + lane] = np.uint32(left & np.uint64(0xFFFFFFFF))
        key = np.uint32((np.uint64(key) + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF))
        other = np.uint32((np.uint64(other) + np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF))
    for half in range(2):
        for lane in range(32):
            for i in range(4):
                word = words[512 + 64 * half + 32 * (i // 2) + lane]
                if swapped:
                    word = ((word >> np.uint32(8)) & np.uint32(0xFF00FF)) | ((word & np.uint32(0xFF00FF)) << np.uint32(8))
                part = (word >> np.uint32(16)) if i % 2 else (word & np.uint32(0xFFFF))
                parts[256 * turn + 128 * half + 4 * lane + i] = np.float32(np.int32(part))
    near = np.uint32(0)
    for i in range(live):
{between}
        left = element_fma(-(parts[i] * np.float32(1 / 65536)), step, rest)
        lower = (parts[256 + i] + np.float32(0.5)) * np.float32(2.0**-32)
        up = lower * step < left
        near = np.uint32(near | np.uint32((left >= np.float32(0)) & (not up)))
        size = low + np.float32(1) if up else low
{put}
    if near == 0:
        break
"""
_PUT_3 = """\
        root3[i] = np.int8(size if x[i] > 0 else -size)
"""
_PUT_4 = """\
        root4[i] = np.uint8(size)
"""
_NOT_FINITE = """
if not finite:
    for i in range(live):
        if not element_abs(np.float32(x[i])) < np.float32(np.inf):
            {codes}[i] = {code}
"""

#: How kernels round: to the nearest code; or at random, by bits of the step, or of the block's largest magnitude where
#: no steps are counted.
How = Literal["nearest", "by step", "by largest"]
_STEP = {"by step": "np.uint32(seed & 0xFFFFFFFF)", "by largest": "bits_of(largest)"}
_CUDA_HOW = {"nearest": "int8::NEAREST", "by step": "int8::BY_STEP", "by largest": "int8::BY_LARGEST"}
_ROOTS: dict[int, tuple[str, str, str, str, str]] = {
    3: ("2048383", _NEAREST_3, _BETWEEN_3, _PUT_3, "-128"), 4: ("4228250624", _NEAREST_4, _BETWEEN_4, _PUT_4, "0")
}  # fmt: skip


def _store(root: int, how: How) -> str:
    """Return the statements that store a block."""
    codes = f"root{root}"
    whole, nearest, between, put, not_finite = _ROOTS[root]
    if how != "nearest":
        nearest = _AT_RANDOM.format(whole=whole, between=between, put=put, step=_STEP[how])
    return _ABSMAX.format(codes=codes) + nearest + _NOT_FINITE.format(codes=codes, code=not_finite)


@dataclass(frozen=True, kw_only=True)
class _Root(Format):
    """A format of codes in blocks of 256.

    Attributes:
        how: how kernels round.  At random, the mean of the results is the number; to the nearest, a slow mean would
            never leave its code.  ``encode`` always rounds to the nearest.
    """

    how: How = "nearest"
    name: str = ""
    block: int = BLOCK
    cuda_text: str = CUDA_TEXT

    def _of(self, root: int) -> None:
        how = "nearest" if self.how == "nearest" else f"stochastic {self.how}"
        texts = {"name": f"int8, root {root}, {how}", "cuda_type": f"Root{root}<{_CUDA_HOW[self.how]}>"}
        for key, value in {**texts, "numba_store": _store(root, self.how)}.items():
            object.__setattr__(self, key, value)

    def __hash__(self) -> int:
        """Hash the name alone: each step looks up its kernel by this."""
        return hash(self.name)


@dataclass(frozen=True, kw_only=True)
class Root3(_Root):
    """First moments: a signed code, whose cube is the share of the block's largest magnitude; -128 is NaN."""

    columns: tuple[Column, ...] = (Column("root3", torch.int8), Column("absmax", torch.float32, BLOCK))
    numba_load: str = _LOAD_3

    def __post_init__(self) -> None:
        self._of(3)
        super().__post_init__()

    __hash__ = _Root.__hash__

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


@dataclass(frozen=True, kw_only=True)
class Root4(_Root):
    """Second moments: a code from 1 on, whose fourth power is the share of the block's largest; 0 is infinity.

    While all elements of a block are zero, all its codes are 0 and stand for zero.
    """

    columns: tuple[Column, ...] = (Column("root4", torch.uint8), Column("absmax", torch.float32, BLOCK))
    numba_load: str = _LOAD_4

    def __post_init__(self) -> None:
        self._of(4)
        super().__post_init__()

    __hash__ = _Root.__hash__

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
    return blocks, torch.where((blocks != 0).any(1, keepdim=True), absmax.clamp(min=LEAST), 0)


def _scale(whole: float, absmax: torch.Tensor) -> torch.Tensor:
    # Not whole / absmax, for which torch multiplies by a reciprocal.
    return torch.where(absmax > 0, torch.full_like(absmax, whole) / absmax, 0)


def _root(squares: torch.Tensor) -> torch.Tensor:
    # IEEE's root, as kernels have it: MKL's for float32, which torch takes on a CPU, is an ulp off for some numbers.
    return squares.double().sqrt().float()


def _spread(absmax: torch.Tensor, numel: int) -> torch.Tensor:
    return absmax.repeat_interleave(BLOCK)[:numel]


HOWS: tuple[How, ...] = get_args(How)
#: By how they round.
FIRST: dict[How, Root3] = {how: Root3(how=how) for how in HOWS}
SECOND: dict[How, Root4] = {how: Root4(how=how) for how in HOWS}
OLD_ROOT2 = OldRoot2()


class Int8(Choice):
    """``state_format="int8"``: :class:`Root3` and :class:`Root4`; small parameters keep float32."""

    name = "int8"
    formats = FIRST["nearest"], SECOND["nearest"], OLD_ROOT2

    def of(self, state: State) -> Format | torch.dtype:
        """Return the format of a state.

        Raises:
            ValueError: the rule does not say whether the state is signed; a first moment decays too slowly.
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
            return FIRST[_how(state, default="stochastic")]
        if moment.decay is None:  # a maximum of numbers that are rounded at random would climb
            return SECOND["nearest"]
        slow = state.decay is None or state.decay >= SLOW
        return SECOND[_how(state, default="stochastic" if slow else "nearest")]


def _how(state: State, default: Rounding) -> How:
    if (state.rounding or default) == "nearest":
        return "nearest"
    return "by step" if state.counted else "by largest"


INT8 = Int8()
