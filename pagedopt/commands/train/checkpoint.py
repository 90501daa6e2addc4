"""Checkpoints: written whole or not at all, read with a clear word on what is wrong."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...optim.loading.check import is_whole
from ..errors import UsageError
from .files import replacing

CHECKPOINT = "checkpoint.pt"
FORMAT = 2
BEFORE = 1  # has no checksum
CHECKSUM = "checksum"
KEYS = {"format", "options", "step", "corpus", "contenders"}


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write beside ``path``, then rename: whoever reads finds the old checkpoint or the new one, never a half.

    Raises:
        OSError: there is no room, or the disk fails; the old checkpoint is still there.
    """
    content = {key: value for key, value in content.items() if key != CHECKSUM} | {"format": FORMAT}
    with replacing(path, mode=0o600) as file:
        try:
            torch.save({**content, CHECKSUM: checksum(content)}, file)
        except RuntimeError as error:  # torch says "unexpected pos" of a write that failed or was interrupted
            if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
                raise error.__context__ from None
            raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into host memory, and see that it holds what was saved.

    Raises:
        UsageError: it does not, or it is none of this program's.
    """
    try:
        if path.is_dir():
            inside = path / CHECKPOINT
            meant = f"its checkpoint is --resume {inside}" if inside.is_file() else f"there is no {CHECKPOINT} in it"
            raise UsageError(f"--resume {path}: it is a folder; {meant}")
        if not path.is_file():
            raise UsageError(f"--resume {path}: there is no such file. A run writes OUT/{CHECKPOINT}.")
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise UsageError(f"--resume {path}: it cannot be looked at ({error.strerror or error})") from error
    content = _read(path)
    if not isinstance(content, dict) or not content.keys() >= KEYS:
        raise UsageError(f"--resume {path}: not a checkpoint of this program")
    found = content["format"]
    if type(found) is not int or found not in (BEFORE, FORMAT):
        what = repr(found) if isinstance(found, (int, str)) else f"a {type(found).__name__}"
        raise UsageError(f"--resume {path}: checkpoint format {what}, this version reads {BEFORE} and {FORMAT}")
    if found == BEFORE:
        return content
    said = content.pop(CHECKSUM, None)
    try:
        same = isinstance(said, str) and said == checksum(content)
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise UsageError(f"--resume {path}: it does not hold what was saved (its checksum is another): it is damaged")
    return content


def _read(path: Path) -> Any:
    """
    Raises:
        UsageError: it is no file of ``torch.save``, or one that is damaged or holds more than plain values.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise UsageError(
                f"--resume {path}: not a readable checkpoint (torch.save writes another kind of file, or it is cut off)"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about files that are refused in words of ours
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"--resume {path}: not a readable checkpoint ({error.strerror or error})") from error
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # torch falls over a damaged file anywhere, and its words are for those who call it
        reason = "it is damaged, or holds more than tensors and plain values"
        raise UsageError(f"--resume {path}: not a readable checkpoint ({reason})") from error


def checksum(value: Any) -> str:
    """SHA-256 of plain values and tensors, as hexadecimal digits: of their types, order, shapes and bits.

    Raises:
        ValueError: a tensor has no values of its own to be read.
        RecursionError: a container holds itself.
    """
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    kind = type(value).__name__
    if isinstance(value, Mapping):
        found.update(f"{kind} {len(value)}\n".encode())
        for key, item in value.items():
            _add(found, key)
            _add(found, item)
    elif isinstance(value, (list, tuple)):
        found.update(f"{kind} {len(value)}\n".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or not is_whole(value):
            raise ValueError(f"a tensor of {value.layout} does not hold its values")
        found.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        if value.numel():
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value).encode()
        found.update(f"{kind} {len(text)}\n".encode() + text)
    else:
        found.update(kind.encode())  # which torch.load will not read
