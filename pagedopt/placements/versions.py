"""Version counters of state: one for all that a store has made on a kind of device, so that one call counts a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Versions:
    """The counters that autograd compares, shared by all state of a store on devices of one type."""

    def __init__(self) -> None:
        self._of: dict[str, torch.Tensor] = {}

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory in a tensor that has the counter of its type of device."""
        kind = tensor.device.type
        if kind not in self._of:
            self._of[kind] = torch.empty(0, device=tensor.device)
        shared = self._of[kind].detach()
        shared.data = tensor
        return shared

    def of(self, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of which each has the counter of some of ``state``, so that one stands for many."""
        state = [t for t in state if not t.is_inference()]  # those have none
        before = [t._version for t in state]
        torch.autograd.graph.increment_version(list(self._of.values()))
        others = [t for t, version in zip(state, before, strict=True) if t._version == version]
        return [*self._of.values(), *others]


__all__ = ["Versions"]
