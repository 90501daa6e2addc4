"""Checkpoints: written whole or not at all, read with a clear word on what is wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from .files import replacing

FORMAT = 1
KEYS = {"format", "options", "step", "corpus", "contenders"}


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write beside ``path``, then rename: whoever reads finds the old checkpoint or the new one, never a half.

    Raises:
        OSError: there is no room, or the disk fails; the old checkpoint is still there.
    """
    with replacing(path, mode=0o600) as file:
        try:
            torch.save({"format": FORMAT, **content}, file)
        except RuntimeError as error:  # torch says "unexpected pos" of a write that failed or was interrupted
            if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
                raise error.__context__ from None
            raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into host memory."""
    if not path.is_file():
        raise UsageError(f"--resume {path}: there is no such file. A run writes OUT/checkpoint.pt.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"--resume {path}: not a readable checkpoint ({reason})") from error
    if not isinstance(content, dict) or not content.keys() >= KEYS:
        raise UsageError(f"--resume {path}: not a checkpoint of this program")
    if content["format"] != FORMAT:
        raise UsageError(f"--resume {path}: checkpoint format {content['format']}, this version reads {FORMAT}")
    return content
