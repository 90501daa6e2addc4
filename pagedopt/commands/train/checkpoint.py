"""Checkpoints of a run: written all or nothing, and refused with a reason if they cannot be read."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import zipfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...common.kind_of import kind_of
from ...optim.loading.check import is_whole
from ..errors import UsageError
from .files import replacing

CHECKPOINT = "checkpoint.pt"
FORMAT = 2
BEFORE = 1  # the older format, which has no checksum
CHECKSUM = "checksum"
KEYS = {"format", "options", "step", "corpus", "contenders"}


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside ``path``, then rename it. If the disk fails (OSError), the old one is still there."""
    content = {key: value for key, value in content.items() if key != CHECKSUM} | {"format": FORMAT}
    with replacing(path, mode=0o600) as file:
        try:
            torch.save({**content, CHECKSUM: checksum(content)}, file)
        except RuntimeError as error:  # torch says "unexpected pos"; the cause is in its context
            if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
                raise error.__context__ from None
            raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into host memory and verify its checksum; UsageError if it is damaged or something else."""
    try:
        if path.is_dir():
            inside = path / CHECKPOINT
            meant = f"its checkpoint is --resume {inside}" if inside.is_file() else f"there is no {CHECKPOINT} in it"
            raise UsageError(f"--resume {path}: it is a folder; {meant}")
        if not path.is_file():
            raise UsageError(f"--resume {path}: there is no such file. A run writes OUT/{CHECKPOINT}.")
    except OSError as error:  # no permission for the folder, or the name is too long
        raise UsageError(f"--resume {path}: it cannot be looked at ({error.strerror or error})") from error
    content = _read(path)
    if not isinstance(content, dict) or not content.keys() >= KEYS:
        raise UsageError(f"--resume {path}: not a checkpoint of this program")
    found = content["format"]
    if type(found) is not int or found not in (BEFORE, FORMAT):
        what = repr(found) if isinstance(found, (int, str)) else kind_of(found)
        raise UsageError(f"--resume {path}: checkpoint format {what}, this version reads {BEFORE} and {FORMAT}")
    if found == BEFORE:
        return content
    saved = content.pop(CHECKSUM, None)
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(saved, str) and saved == checksum(content):
            return content
    raise UsageError(f"--resume {path}: it does not hold what was saved (its checksum is another): it is damaged")


def _read(path: Path) -> Any:
    """Return the contents of a file of ``torch.save``: built-in types and tensors; else raise UsageError."""
    try:
        if not zipfile.is_zipfile(path):
            raise UsageError(
                f"--resume {path}: not a readable checkpoint (torch.save writes another kind of file, or it is cut off)"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of files that are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"--resume {path}: not a readable checkpoint ({error.strerror or error})") from error
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # torch may raise anything for a damaged file, and its messages are for programmers
        reason = "it is damaged, or holds more than tensors and built-in types"
        raise UsageError(f"--resume {path}: not a readable checkpoint ({reason})") from error


def checksum(value: Any) -> str:
    """Return the SHA-256 (hexadecimal) of built-in types and tensors: of types, order, shapes and bits.

    Raises:
        ValueError: a tensor is not strided, or its memory is smaller than its shape and strides say.
        RecursionError: a container holds itself.
    """
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    name = type(value).__name__
    if isinstance(value, (Mapping, list, tuple)):
        found.update(f"{name} {len(value)}\n".encode())
        for item in chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
            _add(found, item)
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or not is_whole(value):
            raise ValueError(f"a tensor of {value.layout} does not hold its values")
        found.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        if value.numel():
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value).encode()
        found.update(f"{name} {len(text)}\n".encode() + text)
    else:
        found.update(name.encode())  # torch.load with weights_only refuses it
