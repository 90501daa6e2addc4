"""torch's Adagrad, which in older versions makes state at construction alone: KeyError where there is none later."""

from __future__ import annotations

from typing import Any

import torch


class Adagrad(torch.optim.Adagrad):
    """The same, and a parameter without state gets what the constructor makes."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        first = self.defaults["initial_accumulator_value"]
        for p in group["params"]:
            if p.grad is not None and not self.state[p]:
                like = torch.optim.Adagrad([p], initial_accumulator_value=first, fused=group["fused"])
                self.state[p].update(like.state[p])
        return super()._init_group(group, *lists)
