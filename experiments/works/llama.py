"""A decoder in Llama's shapes, in bfloat16, whose blocks compute their activations twice; its numbers are random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Tokens whose logits are in memory at a time.
HEAD = 2048


@dataclass(frozen=True)
class Shape:
    """How wide and deep, and how long its sequences are."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    inner: int = 11008
    vocabulary: int = 32000
    tokens: int = 2048


#: 6.74 billion parameters, and a hundred thousand.
SEVEN, TOY = Shape(), Shape(width=64, layers=2, heads=2, inner=192, vocabulary=256, tokens=16)


class Block(nn.Module):
    """Attention, and the gated layers behind it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.heads = shape.heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width)."""
        y = self.before(x)
        q, k, v = (of(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Without positions: they change neither a shape nor a byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        pieces = zip(self.norm(x).flatten(0, 1).split(HEAD), targets.flatten().split(HEAD), strict=True)
        losses = [checkpoint(self.loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum() / targets.numel()

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum over some tokens."""
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


def described(shape: Shape) -> Llama:
    """A model in bfloat16 without memory."""
    with torch.device("meta"):
        return Llama(shape).bfloat16()


def made(shape: Shape, device: torch.device) -> Llama:
    """A model with the same random numbers every time, made on the device."""
    model = described(shape).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        with torch.no_grad():
            p.normal_(0, 0.02, generator=generator) if p.dim() > 1 else p.fill_(1)
    return model


def batches(shape: Shape, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of eight batches, which come again and again."""
    generator = torch.Generator(device).manual_seed(1)
    data = torch.randint(shape.vocabulary, (8, batch, shape.tokens + 1), device=device, generator=generator)
    while True:
        for each in data:
            yield each[:, :-1], each[:, 1:]
