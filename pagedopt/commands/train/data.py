"""The corpus: the source text of Python's own standard library, as bytes. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UsageError

CORPUS_LIMIT = 16 * 2**20  # bytes; more than today's standard library has
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_EVERY = 10  # every tenth file is held out, so both parts are alike

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, and a digest that differs between versions of Python."""

    train: Bytes
    validation: Bytes
    digest: str


def source_files(root: Path) -> list[Path]:
    """Return the library's sources in an order that does not depend on the file system."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]  # site-packages alone takes long to walk
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def load_corpus(block: int, root: Path | None = None) -> Corpus:
    """Read the standard library (or the *.py files under ``root``) for sequences of ``block`` tokens."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for number, path in enumerate(source_files(root)):
        text = path.read_bytes()[: CORPUS_LIMIT - total]
        total += len(text)
        parts[number % VALIDATION_EVERY == 0].append(text)
    train, validation = (b"".join(part) for part in parts)
    if min(len(train), len(validation)) < block + 1:
        raise UsageError(
            f"{root} holds {len(train):,} bytes of Python source to train on and {len(validation):,} to validate on; "
            f"--block {block} needs at least {block + 1:,} of each. Use a smaller --block, or a Python whose "
            "standard library is installed as *.py files."
        )
    digest = hashlib.sha256(train + b"\0" + validation).hexdigest()
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), digest)


def sample_batch(text: Bytes, batch: int, block: int, seed: int, step: int) -> Tensor:
    """Return (batch, block + 1) int64 tokens that depend on seed and step alone: resuming needs no generator state."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - block, size=batch)
    windows = text[starts[:, None] + np.arange(block + 1)]
    return torch.from_numpy(windows.astype(np.int64))


def to_device(windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on the device, without waiting for the copy."""
    if device.type == "cuda":
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1], windows[:, 1:]
