"""The version counters of state, by which autograd, and a step, notice that somebody has written to it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

_version = attrgetter("_version")


@torch.inference_mode(False)
def _counter() -> torch.Tensor:
    return torch.empty(0, device="meta")


class Versions:
    """The counters that autograd compares, one for all state of a store on devices of one type."""

    def __init__(self) -> None:
        #: One empty tensor per counter.  Raising its version raises that of all state with the same counter.  The first
        #: is of no state: what raises it raises all.
        self.counters: tuple[torch.Tensor, ...] = (_counter(),)

    def by_others(self) -> int:
        """Return a number that grows where others write state in place, or give it another layout, as ``t_()`` does."""
        try:
            return sum(map(_version, self.counters)) - len(self.counters) * self.counters[0]._version
        except RuntimeError:  # those of state that is made in inference_mode count nothing
            return 0

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same memory that uses the counter of its device type."""
        for counter in self.counters:
            if counter.device.type == tensor.device.type:
                break
        else:
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
