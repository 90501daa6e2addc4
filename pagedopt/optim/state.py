"""Creating and copying optimizer state: one arena for all that is created at once, tensors that view it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import arenas
from ..formats import state_dtype
from ..pointers import is_dense

if TYPE_CHECKING:
    from .base import PagedOptimizer

Wanted = tuple[torch.Tensor, str, torch.dtype]


class Arenas:
    """The memory that state was given, remembered by its storage so that a report can say where a tensor is."""

    def __init__(self, placement: str) -> None:
        self.placement = placement
        self._places: dict[int, str] = {}  # by the address of the storage

    def create(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """A zeroed tensor laid out as each parameter in ``wanted``, in the dtype asked for; one arena per device."""
        tensors: dict[int, torch.Tensor] = {}
        for device in {p.device for p, _, _ in wanted}:
            here = [i for i, (p, _, _) in enumerate(wanted) if p.device == device]
            sizes = [wanted[i][0].numel() * wanted[i][2].itemsize for i in here]
            starts = _starts(sizes)
            base, place = arenas.allocate(starts[-1], device, self.placement)
            self._places[base.untyped_storage().data_ptr()] = place
            for i, start, nbytes in zip(here, starts, sizes, strict=False):
                p, _, dtype = wanted[i]
                flat = base[start : start + nbytes].view(dtype)
                tensors[i] = flat.as_strided(p.size(), p.stride()) if p.numel() else flat.view(p.shape)
        return [tensors[i] for i in range(len(wanted))]

    def place_of(self, tensor: torch.Tensor) -> str:
        """``host``, ``device`` or ``managed``; state that was not made here is where its device says."""
        return self._places.get(tensor.untyped_storage().data_ptr(), "device" if tensor.is_cuda else "host")


def _starts(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets of stretches of ``sizes`` bytes, and the total."""
    starts = [0]
    for nbytes in sizes:
        starts.append(-(-(starts[-1] + nbytes) // arenas.ALIGNMENT) * arenas.ALIGNMENT)
    return starts


def create_state(optimizer: PagedOptimizer, memory: Arenas) -> tuple[list[torch.Tensor], set[int]]:
    """Give zeroed state to every parameter that has a gradient and none yet.

    Returns:
        the parameters that still have neither, and the ids of those that take their first step now.
    """
    wanted: list[Wanted] = []
    waiting: list[torch.Tensor] = []
    fresh: set[int] = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None and p not in optimizer.state:
                waiting.append(p)
                continue
            missing = [name for name in optimizer.state_names(group) if optimizer.state.get(p, {}).get(name) is None]
            if missing or p not in optimizer.state:
                fresh.add(id(p))
            wanted += [(p, name, state_dtype(optimizer.state_format, name, p.dtype)) for name in missing]
    _check(optimizer)
    for (p, name, _), tensor in zip(wanted, memory.create(wanted) if wanted else (), strict=True):
        if optimizer.has_step:
            optimizer.state[p].setdefault("step", torch.zeros(()))  # first, as torch has it; buckets put theirs here
        optimizer.state[p][name] = tensor
    return waiting, fresh


def _check(optimizer: PagedOptimizer) -> None:
    index = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not is_dense(p):
                raise ValueError(
                    f"parameter {index} of shape {tuple(p.shape)} and strides {p.stride()} has gaps or overlaps "
                    "itself; use a contiguous tensor"
                )
            index += 1


def copy_state(
    optimizer: PagedOptimizer,
    memory: Arenas,
    loaded: Mapping[Any, Mapping[str, Any]],
    before: Mapping[torch.Tensor, Mapping[str, Any]],
) -> None:
    """Fill state from ``loaded`` (keyed by position, as in a state dict), into tensors of ``before``."""
    position = 0
    targets: list[tuple[torch.Tensor, str, torch.Tensor]] = []
    fresh: list[tuple[Wanted, torch.Tensor]] = []
    for group in optimizer.param_groups:
        names = optimizer.state_names(group)
        for p in group["params"]:
            values = loaded.get(position, {})
            position += 1
            for name, value in values.items():
                if name == "step":
                    optimizer.state[p][name] = torch.tensor(float(value), dtype=torch.float32)
                    continue
                if name not in names or value is None:
                    optimizer.state[p][name] = value
                    continue
                old = before.get(p, {}).get(name)
                if isinstance(old, torch.Tensor):
                    targets.append((p, name, old))
                    old.copy_(value)
                else:
                    fresh.append(((p, name, state_dtype(optimizer.state_format, name, p.dtype)), value))
    for (wanted, value), tensor in zip(fresh, memory.create([w for w, _ in fresh]) if fresh else (), strict=True):
        tensor.copy_(value)
        targets.append((wanted[0], wanted[1], tensor))
    for p, name, tensor in targets:
        optimizer.state[p][name] = tensor
