"""Version counters of state: one for all that a store has made on a kind of device, so that one call counts a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Versions:
    """The counters that autograd compares, shared by all state of a store on devices of one type."""

    __slots__ = ("counters",)

    def __init__(self) -> None:
        #: One tensor for each counter: what raises its version raises that of all state which has the counter.
        self.counters: tuple[torch.Tensor, ...] = ()

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory in a tensor that has the counter of its type of device."""
        kind = tensor.device.type
        counter = next((t for t in self.counters if t.device.type == kind), None)
        if counter is None:
            counter = torch.empty(0, device=tensor.device)
            self.counters = (*self.counters, counter)
        shared = counter.detach()
        shared.data = tensor
        return shared

    def others(self, state: Sequence[torch.Tensor]) -> list[int]:
        """Indices of ``state`` that has another counter, or none."""
        counted = [None if t.is_inference() else t._version for t in state]  # those of inference mode have none
        torch.autograd.graph.increment_version(self.counters)
        return [
            i
            for i, (t, before) in enumerate(zip(state, counted, strict=True))
            if before is None or t._version == before
        ]


_counters__ = ["Versions"]
