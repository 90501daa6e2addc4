"""Its entry in ``tests/specs.py``: what stands below the imports."""

from __future__ import annotations

from typing import Any

import reference_lion
import torch

from tests.specs import ENTRIES, F32, Bad, Case, Spec


class Signum(torch.optim.Optimizer):
    """Algorithm 1 of Bernstein et al. 2018 in plain torch, as a sum whose weights add up to one."""

    def __init__(
        self, params: Any, lr: Any = 1e-4, momentum: Any = 0.9, weight_decay: Any = 0.0, *, maximize: bool = False,
        foreach: bool = False,
    ) -> None:  # fmt: skip
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        if any(isinstance(value, torch.Tensor) and value.numel() != 1 for value in values.values()):
            raise ValueError(f"one number each: {values}")
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(f"out of range: {values}")
        super().__init__(params, {**values, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum, decay = (reference_lion.number(group[key]) for key in ("lr", "momentum", "weight_decay"))
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = reference_lion.mean_of(p, self.state[p], "momentum_buffer")
                wide = torch.promote_types(torch.promote_types(p.dtype, buffer.dtype), torch.float32)
                gradient = -p.grad.to(wide) if group["maximize"] else p.grad.to(wide)
                mean = buffer.to(wide) * momentum + gradient * (1 - momentum)
                p.copy_(p.to(wide) * (1 - lr * decay) - reference_lion.sign(mean) * lr)
                buffer.copy_(mean)
        return loss


SIGNUM = Spec(
    entry=ENTRIES["PagedSignum"],
    cases=(
        Case(
            name="signum", ours=ENTRIES["PagedSignum"].optimizer, theirs=Signum, rule="signum", recorded=((F32, None),),
            options={"lr": 0.03, "momentum": 0.7, "weight_decay": 0.2}, other={"lr": 0.01, "momentum": 0.8},
        ),
    ),
    bad=(Bad({"lr": -1.0}, "lr=-1.0.*out of range"), Bad({"momentum": 1.0}, "momentum=1.0.*out of range")),
    decoupled=True,
    ulp={"cpu": {"parameter": 5}, "cuda": {"parameter": 5}},
)  # fmt: skip
