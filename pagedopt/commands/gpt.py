"""What ``train`` trains: GPT-2 (Radford et al., 2019) in PyTorch's own layers, its text, and its learning rate."""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..planning.sizes import Size
from .parser import UsageError


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.out(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions. The output layer is tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.block, size.width)
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self._initialize(size.layers)

    def _initialize(self, layers: int) -> None:
        """Draw from Normal(0, 0.02); less for residual outputs, so that their sum does not grow with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                spread = 0.02 / math.sqrt(2 * layers) if name.endswith("out.weight") else 0.02
                nn.init.normal_(parameter, std=spread)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``targets``, in nats per token."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_model(size: Size, seed: int, device: torch.device) -> GPT:
    """Return a model whose weights depend on the seed but not on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(size)
    return model.to(device)


# --- the text: sources of Python's own standard library, as bytes; nothing is downloaded ------------------------------

CORPUS_LIMIT = 16 * 2**20  # bytes; more than today's standard library has
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Bytes = npt.NDArray[np.uint8]


def source_files(root: Path) -> list[Path]:
    """Return the library's sources in an order that does not depend on the file system."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]  # site-packages alone takes long to walk
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def load_corpus(block: int, root: Path | None = None) -> Bytes:
    """Read the standard library (or the *.py files under ``root``) for sequences of ``block`` tokens."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in source_files(root))[:CORPUS_LIMIT]
    if len(text) < block + 1:
        raise UsageError(f"{root} holds {len(text):,} bytes of Python's sources; a sequence takes {block + 1:,}")
    return np.frombuffer(text, np.uint8)


def sample_batch(text: Bytes, batch: int, block: int, seed: int, step: int) -> Tensor:
    """Return (batch, block + 1) int64 tokens that depend on seed and step alone."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - block, size=batch)
    windows = text[starts[:, None] + np.arange(block + 1)]
    return torch.from_numpy(windows.astype(np.int64))


def to_device(windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on the device."""
    windows = windows.to(device)
    return windows[:, :-1], windows[:, 1:]


#: The last step has this part of the peak learning rate.
FLOOR = 0.1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of a step: linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
