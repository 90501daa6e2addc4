"""Named sizes of GPT-2, each with training settings that work well for it.  Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Shape of a GPT, and its defaults for training."""

    layers: int
    heads: int
    width: int
    block: int  # context length, in tokens
    vocabulary: int  # rows of the embedding; the corpus uses the first 256
    batch: int
    steps: int
    lr: float


BYTES = 256
# GPT-2's 50,257 tokens rounded up to a multiple of 64. Bytes use only 256 of these rows. The others give the optimizer
# the tensors of the real model, of which the embedding is by far the largest.
GPT2_ROWS = 50_304

SIZES = {
    "tiny": Size(2, 2, 64, 64, BYTES, batch=8, steps=60, lr=3e-3),
    "small": Size(4, 4, 256, 128, BYTES, batch=4, steps=125, lr=1e-3),
    "gpt2": Size(12, 12, 768, 1024, GPT2_ROWS, batch=8, steps=300, lr=6e-4),
    "gpt2-medium": Size(24, 16, 1024, 1024, GPT2_ROWS, batch=8, steps=200, lr=3e-4),
    "gpt2-large": Size(36, 20, 1280, 1024, GPT2_ROWS, batch=4, steps=100, lr=2.5e-4),
    "gpt2-xl": Size(48, 25, 1600, 1024, GPT2_ROWS, batch=2, steps=100, lr=2e-4),
}
DEFAULT_SIZE = {"cpu": "small", "cuda": "gpt2"}


def shapes(size: Size) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a GPT of this size, in their order.

    >>> len(shapes(SIZES["gpt2"]))
    148
    """
    w = size.width
    norm: list[tuple[int, ...]] = [(w,), (w,)]
    attention = [(3 * w, w), (3 * w,), (w, w), (w,)]
    mlp = [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(size.vocabulary, w), (size.block, w), *(norm + attention + norm + mlp) * size.layers, *norm]
