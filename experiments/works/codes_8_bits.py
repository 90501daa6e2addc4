"""Other codes of 8 bits than the package's: float32 state is replaced by what such a code leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from pagedopt.formats.int8 import BLOCK

Array = npt.NDArray[Any]
#: Replaces the numbers of a tensor.
Code = Callable[[torch.Tensor], None]
#: Elements of a block of FlashOptim's.
SMALL = 32


@cache
def table(signed: bool) -> tuple[Array, Array, Array]:
    """The numbers of bitsandbytes' dynamic code that are not negative, in order; the middles between them; and for the
    upper 16 bits of a float32 up to 1 how many middles are below: a search among 256 takes ten times as long."""
    counts = [2 ** (i if signed else i + 1) for i in range(7)]
    inner = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / n) for i, n in enumerate(counts) for j in range(n)]
    known = np.array([0.0, *inner, 1.0], np.float32)
    middles = (known[1:] + known[:-1]) / 2
    starts = (np.arange(0x3F81, dtype=np.uint32) << 16).view(np.float32)
    return known, np.append(middles, np.float32(np.inf)), np.searchsorted(middles, starts).astype(np.uint8)


@numba.njit
def _put_published(values: Array, known: Array, middles: Array, below: Array, lowest: int, highest: int) -> None:
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        absmax = np.abs(block).max()
        if absmax > 0:
            shares = np.abs(block) / absmax
            upper = shares.view(np.uint32) >> 16
            for i in range(len(block)):
                near = below[upper[i]] + (shares[i] > middles[below[upper[i]]])
                if block[i] < 0:
                    near = min(max(near, lowest), highest)
                block[i] = np.copysign(known[near], block[i]) * absmax


@numba.njit
def _put_rooted(values: Array, root: int, top: int, least: int, random: bool) -> None:
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        absmax = np.abs(block).max()
        if absmax > 0:
            for i in range(len(block)):
                share = abs(block[i]) / absmax * np.float64(top) ** root
                code = np.floor(share ** (1.0 / root) + (0.0 if random else 0.5))
                if random:
                    low, high = code**root, (code + 1) ** root
                    code += np.random.random() * (high - low) < share - low
                code = min(max(code, least), top)
                block[i] = np.copysign((code / top) ** root * absmax, block[i])


def _on_host(values: torch.Tensor, put: Callable[[Array], None]) -> None:
    on_host = values.cpu()
    put(on_host.view(-1).numpy())
    values.copy_(on_host)


def published(values: torch.Tensor, signed: bool) -> None:
    """Replace numbers by the nearest of bitsandbytes' code, which has no -1; what is negative stays so."""
    known, middles, below = table(signed)
    _on_host(values, lambda numbers: _put_published(numbers, known, middles, below, 1, len(known) - 2))


def rooted(values: torch.Tensor, root: int, random: bool, signed: bool = True) -> None:
    """Replace numbers by those of a code that stores a root of their share of the block's largest magnitude: the
    nearest root, or at random so that the mean is the number."""
    top, least = (127, 0) if signed else (255, 1)
    _on_host(values, lambda numbers: _put_rooted(numbers, root, top, least, random))


def flash(values: torch.Tensor, signed: bool, block: int = SMALL) -> None:
    """Replace numbers by those of FlashOptim's code: 127 * 2n / (1 + |n|), or 255 times a root of a second moment,
    rounded half up, in blocks with a scale in float16."""
    flat = values.view(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    numbers = padded if signed else padded.sqrt()
    scale = numbers.abs().amax(1, keepdim=True)
    share = torch.where(scale > 0, numbers / scale, 0)
    if signed:
        level = (2 * share / (1 + share.abs()) * 127 + 0.5).floor() / 127
        level = level / (2 - level.abs())
    else:
        level = (share * 255 + 0.5).floor() / 255
    made = level * scale.half().float()
    flat.copy_((made if signed else made.square()).view(-1)[: len(flat)])


#: By name of the state: bitsandbytes' code, and FlashOptim's.
PUBLISHED: dict[str, Code] = {
    name: partial(published, signed=name != "exp_avg_sq") for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
}
FLASH: dict[str, Code] = {name: partial(flash, signed=name != "exp_avg_sq") for name in ("exp_avg", "exp_avg_sq")}
