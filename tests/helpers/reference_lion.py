"""Lion in plain torch, one parameter at a time: what PagedLion is compared with, as torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, as in their google/automl; arithmetic in float32 or wider."""

    def __init__(
        self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: Any = 0.0, *, maximize: bool = False,
        capturable: bool = False, foreach: bool = False,
    ) -> None:  # fmt: skip
        beta1, beta2 = betas
        for value in (lr, beta1, beta2, weight_decay):
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"a tensor of {value.numel()} elements")
        if not (lr >= 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and weight_decay >= 0):
            raise ValueError(f"lr {lr}, betas {betas}, weight_decay {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**defaults, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = map(number, group["betas"])
            lr, weight_decay = number(group["lr"]), number(group["weight_decay"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                exp_avg = mean_of(p, state, "exp_avg")
                wide = torch.promote_types(torch.promote_types(p.dtype, exp_avg.dtype), torch.float32)
                gradient, mean = p.grad.to(wide), exp_avg.to(wide)
                gradient = -gradient if group["maximize"] else gradient
                update = sign(mean * beta1 + gradient * (1 - beta1))
                p.copy_(p.to(wide) * (1 - lr * weight_decay) - update * lr)
                exp_avg.copy_(mean * beta2 + gradient * (1 - beta2))
        return loss


def mean_of(p: torch.Tensor, state: dict[str, Any], name: str) -> torch.Tensor:
    """A parameter's momentum, made if there is none.

    Raises:
        RuntimeError: the gradient is sparse, or the momentum is not of the parameter's shape and kind.
        NotImplementedError: the parameter has integers.
    """
    if p.grad is not None and p.grad.is_sparse:
        raise RuntimeError("sparse gradients")
    if state.get(name) is None:
        state[name] = torch.zeros_like(p)
    found: torch.Tensor = state[name]
    if not (p.is_floating_point() or p.is_complex()):
        raise NotImplementedError(f"a parameter of {p.dtype}")
    kinds = p.is_complex(), p.is_floating_point()
    if found.shape != p.shape or (found.is_complex(), found.is_floating_point()) != kinds:
        raise RuntimeError(f"{name} is {found.dtype} {tuple(found.shape)}")
    return found


def number(value: Any) -> float:
    """A hyperparameter that is a number or a tensor of one.

    Raises:
        TypeError: it is a text.
    """
    if isinstance(value, str):
        raise TypeError(f"{value!r} is a text")
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def sign(t: torch.Tensor) -> torch.Tensor:
    """Of complex numbers that of either part, as torch's optimizers take these for pairs of real ones."""
    return torch.complex(t.real.sign(), t.imag.sign()) if t.is_complex() else t.sign()
