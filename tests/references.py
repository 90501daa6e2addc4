"""Optimizers that torch does not have, in plain torch: the numbered lines of their papers, one parameter at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import exp, log
from typing import Any

import torch

Tensor = torch.Tensor


def written(ours: Any, update: Callable[..., dict[str, Tensor]], least_beta: float = 0.0, **begin: float) -> Any:
    """A torch optimizer with the arguments of ``ours``, which computes in float32 or wider, and of complex numbers both
    parts.

    Args:
        ours: the class that it stands for.
        update: the paper's lines: of the parameter ``x``, its gradient ``g``, state and hyperparameters by name, and of
            the step ``t`` new values of ``x`` and state.
        least_beta: if it is above 0, the first of ``betas`` may not be 0.
        begin: numbers of a parameter's own, and their first values.
    """
    asked = inspect.signature(ours.__init__)
    taken = {name: p for name, p in asked.parameters.items() if p.kind is not p.VAR_KEYWORD}
    hyper_names = [name for name in taken if name not in ("self", "params")]
    numbers = [name for name in hyper_names if name not in ("betas", "maximize", "capturable")]
    rule = (ours.rules or (ours.rule,))[0]
    names, moments = rule.inputs[2:], rule.moments

    def number_of(name: str, given: Any) -> float | None:
        return None if given is None and taken[name].default is None else number(given)

    class Written(torch.optim.Optimizer):
        def __init__(self, *args: Any, foreach: bool = False, **given: Any) -> None:
            bound = inspect.Signature([*taken.values()]).bind(self, *args, **given)
            bound.apply_defaults()
            hyper = {name: bound.arguments[name] for name in hyper_names}
            betas = ()
            if "betas" in taken:
                betas = hyper["betas"] = tuple(hyper["betas"])
                if len(betas) != len(taken["betas"].default):
                    raise ValueError(f"betas {betas}")
            values = [hyper[name] for name in numbers if not hyper[name] is taken[name].default is None]
            for value in (*values, *betas):
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(f"a tensor of {value.numel()} elements")
            decays = [*betas, *(hyper[name] for name in numbers if name == "momentum")]
            first = not least_beta or bool(betas[0] > 0)
            if not (first and all(value >= 0 for value in values) and all(0 <= decay < 1 for decay in decays)):
                raise ValueError(f"{hyper}")
            super().__init__(bound.arguments["params"], hyper)

        def __setstate__(self, state: dict[str, Any]) -> None:
            """Old checkpoints have numbers in place of tensors."""
            super().__setstate__(state)
            for entry in self.state.values():
                old = {k: entry[k] for k in ("step", *begin) if k in entry and not isinstance(entry[k], Tensor)}
                entry.update({k: torch.tensor(float(v)) for k, v in old.items()})

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """One update of every parameter that has a gradient."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                hyper: dict[str, Any] = {name: number_of(name, group[name]) for name in numbers}
                if "betas" in taken:
                    hyper["betas"] = [*map(number, group["betas"])]
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, self.state[p], -p.grad if group.get("maximize") else p.grad, hyper)
            return loss

        def _update(self, p: Tensor, state: dict[str, Any], grad: Tensor, hyper: dict[str, Any]) -> None:
            if not state and ours.has_step:  # torch makes all state of a parameter at once, and looks it up then
                state.update({"step": torch.tensor(0.0), **{k: torch.tensor(v) for k, v in begin.items()}})
                for name in names:
                    weights = name in moments and moments[name].weights
                    dtype = torch.promote_types(p.dtype, torch.float32) if weights else p.dtype
                    state[name] = torch.zeros_like(p, dtype=dtype)
            if ours.has_step and not all(isinstance(state[name], Tensor) for name in ("step", *names)):
                raise RuntimeError("state is no tensor")
            lists = {"x": p, **{name: mean_of(p, state, name) for name in names}}
            wide = torch.float32
            for t in lists.values():
                wide = torch.promote_types(wide, t.dtype)
            if ours.has_step:
                state["step"] += 1
                hyper = {**hyper, "t": state["step"].item(), **{k: state[k].item() for k in begin}}
            both = [t.to(wide).resolve_conj() for t in (grad, *lists.values())]
            new = update(*(torch.view_as_real(t) if p.is_complex() else t for t in both), **hyper)
            for name, value in new.items():
                if name in begin:
                    state[name].fill_(value)
                else:
                    lists[name].copy_(torch.view_as_complex(value.contiguous()) if p.is_complex() else value)

    foreach = inspect.Parameter("foreach", inspect.Parameter.KEYWORD_ONLY, default=False)
    Written.__init__.__signature__ = asked.replace(parameters=[*taken.values(), foreach])  # type: ignore[attr-defined]
    Written.__name__ = Written.__qualname__ = ours.__name__.removeprefix("Paged")
    globals()[Written.__name__] = Written  # where pickles find it
    return Written


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


class Adagrad(torch.optim.Adagrad):
    """Torch's; older ones make state at construction alone: here a parameter without state gets it later."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        first = self.defaults["initial_accumulator_value"]
        for p in group["params"]:
            if p.grad is not None and not self.state[p]:
                like = torch.optim.Adagrad([p], initial_accumulator_value=first, fused=group["fused"])
                self.state[p].update(like.state[p])
        return super()._init_group(group, *lists)


def lion(g, x, m, *, lr, betas, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 2 of Chen et al. 2023, as in their google/automl."""
    b1, b2 = betas
    update = (m * b1 + g * (1 - b1)).sign()
    return {"x": x * (1 - lr * weight_decay) - update * lr, "exp_avg": m * b2 + g * (1 - b2)}


def ademamix(g, x, m1, m2, v, *, t, lr, betas, eps, weight_decay, alpha, alpha_warmup, beta3_warmup):  # type: ignore[no-untyped-def]
    """Algorithm 1."""
    b1, b2, b3 = betas
    if beta3_warmup is not None:
        share = min(t / beta3_warmup, 1)
        b3 = min(exp(log(b1) * log(b3) / ((1 - share) * log(b3) + share * log(b1))), b3)
    if alpha_warmup is not None:
        alpha = min(t * alpha / alpha_warmup, alpha)
    m1, m2, v = m1.lerp(g, 1 - b1), b3 * m2 + (1 - b3) * g, b2 * v + (1 - b2) * g * g
    change = lr * (m1 / (1 - b1**t) + alpha * m2) / ((v / (1 - b2**t)).sqrt() + eps)
    return {"x": x * (1 - lr * weight_decay) - change, "exp_avg": m1, "exp_avg_slow": m2, "exp_avg_sq": v}


def cautious_adamw(g, x, m, v, *, t, lr, betas, eps, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 2 without its line 7."""
    b1, b2 = betas
    m, v = m.lerp(g, 1 - b1), b2 * v + (1 - b2) * g * g
    change = lr / (1 - b1**t) * m / (v.sqrt() / (1 - b2**t) ** 0.5 + eps)
    return {"x": x * (1 - lr * weight_decay) - torch.where(m * g > 0, change, 0), "exp_avg": m, "exp_avg_sq": v}


def cautious_lion(g, x, m, *, lr, betas, weight_decay):  # type: ignore[no-untyped-def]
    """Lion, with the mask of algorithm 1."""
    b1, b2 = betas
    update = (b1 * m + (1 - b1) * g).sign()
    x = x * (1 - lr * weight_decay) - torch.where(update * g > 0, lr * update, 0)
    return {"x": x, "exp_avg": b2 * m + (1 - b2) * g}


def signum(g, x, m, *, lr, momentum, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 1, as a sum whose weights add up to one."""
    m = momentum * m + (1 - momentum) * g
    return {"x": x * (1 - lr * weight_decay) - lr * m.sign(), "momentum_buffer": m}


def adan(g, x, m, v, n, last, *, t, lr, betas, eps, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 1, whose decay rates are one less these."""
    b1, b2, b3 = betas
    diff = g - last if t > 1 else 0 * g
    m, v, n = m.lerp(g, 1 - b1), v.lerp(diff, 1 - b2), b3 * n + (1 - b3) * (g + b2 * diff) ** 2
    if 1 < b3 < float("inf"):
        raise RuntimeError("the root of a negative number")
    change = (lr / (1 - b1**t) * m + lr * b2 / (1 - b2**t) * v) / (n.sqrt() * (1 / (1 - b3**t) ** 0.5) + eps)
    x, decay = x - change, lr * weight_decay
    x = x - decay / (1 + decay) * x
    return {"x": x, "exp_avg": m, "exp_avg_diff": v, "exp_avg_sq": n, "before": g}


def adopt(g, x, m, v, *, t, lr, betas, eps, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 2 with the clip of the official code, and decoupled decay."""
    b1, b2 = betas
    if t == 1:
        return {"x": x, "exp_avg_sq": g * g}
    most = (t - 1) ** 0.25
    m = m.lerp((g / torch.maximum(v.sqrt(), torch.tensor(eps, dtype=v.dtype))).clamp(-most, most), 1 - b1)
    return {"x": x - (lr * weight_decay * x + lr * m), "exp_avg": m, "exp_avg_sq": b2 * v + (1 - b2) * g * g}


def laprop(g, x, m, v, *, t, lr, betas, eps, weight_decay):  # type: ignore[no-untyped-def]
    """Algorithm 1."""
    b1, b2 = betas
    v = b2 * v + (1 - b2) * g * g
    m = m.lerp(g / ((v / (1 - b2**t)).sqrt() + eps), 1 - b1)
    return {"x": x * (1 - lr * weight_decay) - lr / (1 - b1**t) * m, "exp_avg": m, "exp_avg_sq": v}


def schedule_free_adamw(g, y, z, v, *, t, lr, betas, eps, weight_decay, warmup_steps, weight_sum):  # type: ignore[no-untyped-def]
    """The lines of the authors' code, of y and z; their sums are of a parameter, not of a group."""
    b1, b2 = betas
    rate = lr * min(1, t / warmup_steps) if warmup_steps else lr
    weight_sum += rate**2
    share = rate**2 / weight_sum if weight_sum else 0
    z = y if t == 1 else z
    v = b2 * v + (1 - b2) * g * g
    change = g / ((v / (1 - b2**t)).sqrt() + eps) + weight_decay * y
    x = y + share * (z - y) + rate * (b1 * (1 - share) - 1) * change
    return {"x": x, "z": z - rate * change, "exp_avg_sq": v, "weight_sum": weight_sum}
