"""The corpus: the source text of Python's own standard library, as bytes. Nothing is downloaded."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UsageError

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
