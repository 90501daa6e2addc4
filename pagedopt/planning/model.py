"""Reads sizes and dtypes of parameters from a module, tensors, shapes or a number."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..common.names import kind_of
from ..common.units import MAX_PARAMETERS, parse_count
from ..tables.tensors import local
from .sizes import SIZES, shapes

#: In place of a format: the parameter's group has none of its own.
INHERITED = object()


@dataclass(frozen=True)
class Described:
    """Sizes of parameters, in order.

    Attributes:
        trained: (elements, dtype, ``state_format`` of the parameter's group or INHERITED) of each trained parameter.
        frozen: the same of each other one.
        device: type of their device; None for shapes, the meta device and parameters on several devices.
    """

    trained: list[tuple[int, torch.dtype, Any]]
    frozen: list[tuple[int, torch.dtype, Any]]
    device: str | None = None

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return sum(numel for numel, _, _ in (*self.trained, *self.frozen))

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(numel * dtype.itemsize for numel, dtype, _ in (*self.trained, *self.frozen))


def describe(model: Any, dtype: torch.dtype | None = None) -> Described:
    """Describe a ``model`` of :func:`pagedopt.estimate`; ``dtype`` replaces the dtype of trained parameters.

    Raises:
        TypeError: the model has neither parameters nor shapes.
        ValueError: a shape has a negative size, a number is no count of parameters, or there are too many.
    """
    found = _described(model, dtype)
    if found.parameters > MAX_PARAMETERS:
        raise ValueError(f"model has {found.parameters:.3g} parameters; at most {MAX_PARAMETERS:.0e} can be planned")
    return found


def _described(model: Any, dtype: torch.dtype | None) -> Described:
    if isinstance(model, torch.nn.Module):
        return _of_tensors(list(model.parameters()), dtype, {})
    if isinstance(model, str) and model in SIZES:
        return _of_sizes([math.prod(shape) for shape in shapes(SIZES[model])], dtype)
    if isinstance(model, str) and not model.strip()[:1].isdigit():
        raise ValueError(
            f"model is {model!r}; give a number of parameters, as '7B' or '124M', or a name of {', '.join(SIZES)}"
        )
    if isinstance(model, (int, float, str)):
        return _of_sizes([parse_count(model, "model")], dtype)
    if isinstance(model, torch.Tensor) or not isinstance(model, Iterable):
        raise TypeError(
            f"model is {kind_of(model)}; give a module, its parameters, a list of shapes, a dict of name to "
            "shape, or a number of parameters"
        )
    own: dict[int, Any] = {}
    items = list(_items(model.values() if isinstance(model, Mapping) else model, own))
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if tensors and len(tensors) != len(items):
        raise TypeError("model has both tensors and shapes; give one or the other")
    if tensors:
        # Values of a state dict are detached.  If no tensor requires a gradient, count all as trained.
        return _of_tensors(tensors, dtype, own, whole=not any(t.requires_grad for t in tensors))
    return _of_sizes([_numel(item) for item in items], dtype)


def _items(model: Iterable[Any], own: dict[int, Any]) -> Iterator[Any]:
    """Yield the tensors or shapes in parameter groups and (name, parameter) pairs; note the formats of groups."""
    for item in model:
        if isinstance(item, Mapping):
            inside = item.get("params", ())
            for each in _items([inside] if isinstance(inside, torch.Tensor) else inside, own):
                if "state_format" in item:
                    own[id(each)] = item["state_format"]
                yield each
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            yield item[1]
        else:
            yield item


def _of_sizes(sizes: Iterable[int], dtype: torch.dtype | None) -> Described:
    return Described([(numel, dtype or torch.float32, INHERITED) for numel in sizes], [])


def _of_tensors(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype | None, own: Mapping[int, Any], whole: bool = False
) -> Described:
    """Describe each tensor once, DTensors by their shards.

    Args:
        own: formats of groups, by the id of a tensor.
        whole: count all of a trainable dtype as trained.
    """
    trained, frozen = list[tuple[int, torch.dtype, Any]](), list[tuple[int, torch.dtype, Any]]()
    for t in {id(t): t for t in tensors}.values():
        trains = t.is_floating_point() or t.is_complex() if whole else t.requires_grad
        known = (trains and dtype) or t.dtype
        (trained if trains else frozen).append((local(t).numel(), known, own.get(id(t), INHERITED)))
    devices = {t.device.type for t in tensors} - {"meta"}
    return Described(trained, frozen, devices.pop() if len(devices) == 1 else None)


def _numel(shape: Any) -> int:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(f"a shape is {shape!r}; give sizes, as (4096, 4096), and several of them in a list")
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
        raise TypeError(f"a shape is {tuple(shape)!r}; its sizes must be integers")
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape is {tuple(shape)!r}; its sizes cannot be negative")
    return math.prod(shape)


# --- headers of safetensors files -------------------------------------------------------------------------------------

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
