"""Version counters of state: one for all that a store has made on a kind of device, so that one call counts a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Versions:
    """The counters that autograd compares, shared by all state of a store on devices of one type."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: tuple[torch.Tensor, ...] = ()  # one for each type of device

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory in a tensor that has the counter of its type of device."""
        kind = tensor.device.type
        counter = next((t for t in self._all if t.device.type == kind), None)
        if counter is None:
            counter = torch.empty(0, device=tensor.device)
            self._all = (*self._all, counter)
        shared = counter.detach()
        shared.data = tensor
        return shared

    def of(self, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of which each has the counter of some of ``state``, so that one stands for many."""
        state = [t for t in state if not t.is_inference()]  # those have none
        before = [t._version for t in state]
        torch.autograd.graph.increment_version(self._all)
        others = [t for t, version in zip(state, before, strict=True) if t._version == version]
        return [*self._all, *others]


__all__ = ["Versions"]
