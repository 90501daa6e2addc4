"""Version counters of state: all state of a store shares one per device type, so one call raises all versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Versions:
    """The counters that autograd compares, one for all state of a store on devices of one type."""

    __slots__ = ("counters",)

    def __init__(self) -> None:
        #: One empty tensor per counter.  Raising its version raises that of all state with the same counter.
        self.counters: tuple[torch.Tensor, ...] = ()

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same memory that uses the counter of its device type."""
        device_type = tensor.device.type
        counter = next((t for t in self.counters if t.device.type == device_type), None)
        if counter is None:
            counter = torch.empty(0, device=tensor.device)
            self.counters = (*self.counters, counter)
        shared = counter.detach()
        shared.data = tensor
        return shared

    def raise_all(self, state: Sequence[torch.Tensor]) -> list[int]:
        """Raise the versions of all state; return the indices of tensors whose version has not risen."""
        versions = [None if t.is_inference() else t._version for t in state]  # inference tensors have no counter
        torch.autograd.graph.increment_version(self.counters)
        pairs = enumerate(zip(state, versions, strict=True))
        return [i for i, (t, before) in pairs if before is None or t._version == before]
