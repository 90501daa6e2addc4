"""Hyperparameters of a rule as one tensor: how they travel through the graph of a compiled function."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..rules import Rule


def packed(rule: Rule, scalars: Mapping[str, float]) -> torch.Tensor:
    """Return hyperparameters as :func:`named` takes them: float64 (hyperparameters,), on the CPU.

    Raises:
        TypeError: one is missing or unknown.
    """
    missing = [name for name in rule.scalars if name not in scalars and name not in rule.defaults]
    unknown = [name for name in scalars if name not in rule.scalars]
    if missing or unknown:
        there = list(rule.scalars)
        raise TypeError(f"rule {rule.name!r} takes the scalars {there}; missing {missing}, unknown {unknown}")
    values = [scalars[name] if name in scalars else rule.defaults[name] for name in rule.scalars]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def named(rule: Rule, scalars: torch.Tensor) -> dict[str, float]:
    """Return the hyperparameters that a tensor holds, by name.

    Raises:
        ValueError: it is no float64 tensor (hyperparameters,) on the CPU.
    """
    wanted = (len(rule.scalars),)
    if scalars.dtype is not torch.float64 or scalars.device.type != "cpu" or tuple(scalars.shape) != wanted:
        raise ValueError(
            f"rule {rule.name!r}: scalars is {scalars.dtype} {tuple(scalars.shape)} on {scalars.device}; give float64 "
            f"{wanted} on the CPU, in the order {list(rule.scalars)}"
        )
    return dict(zip(rule.scalars, scalars.tolist(), strict=True))


__all__ = ["named", "packed"]
