"""Reads shapes and dtypes of a model from the headers of ``.safetensors`` files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

#: The format's names of dtypes, and torch's.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
#: The longest header that the format allows, in bytes.
LONGEST = 100_000_000


def read_parameters(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, or of all such files in a folder, by name, on the meta device; reads headers only.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is no such file, has no tensors or an unknown dtype, or the folder has no such file; the text
            begins with ``path``.
    """
    name = os.fspath(path)
    if not Path(path).is_dir():
        return _read(Path(path), name)
    os.listdir(path)  # raises for an unreadable folder, which glob() would take for an empty one
    if not (shards := sorted(Path(path).glob("*.safetensors"))):
        raise ValueError(f"{name}: there is no *.safetensors in this folder")
    return {key: tensor for shard in shards for key, tensor in _read(shard, f"{name}: {shard.name}").items()}


def _read(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; errors begin with ``name``."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{name}: no safetensors file, but a pipe, a device or a folder")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(LONGEST, os.fstat(file.fileno()).st_size):
            raise ValueError(f"{name}: no safetensors file (it does not begin with the length of a header)")
        header = file.read(length)
    try:
        entries = {key: entry for key, entry in json.loads(header).items() if key != "__metadata__"}
        unknown = [key for key, entry in entries.items() if entry["dtype"] not in DTYPES]
        found = {key: _tensor(entry) for key, entry in entries.items() if key not in unknown}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        said = "no safetensors file, or a damaged one (its header is not as it should be)"
        raise ValueError(f"{name}: {said}") from error
    for key in unknown:
        raise ValueError(f"{name}: tensor {key!r} has dtype {entries[key]['dtype']!r}; known are {', '.join(DTYPES)}")
    if not found:
        raise ValueError(f"{name}: there are no tensors in it")
    return found


def _tensor(entry: Any) -> torch.Tensor:
    shape = entry["shape"]
    if not all(type(size) is int for size in shape):
        raise TypeError(f"shape {shape}")
    return torch.empty(shape, dtype=getattr(torch, DTYPES[entry["dtype"]]), device="meta")


__all__ = ["read_parameters"]
