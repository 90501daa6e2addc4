"""What classes that replace one of torch's share: its constructor, and flags that no step follows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Unpack

import torch

from ..rules.rule import Rule
from .optimizer import PagedOptimizer
from .options import Options, check_hyperparameters
from .rule_optimizer import Group, RuleOptimizer, of_items_alone
from .scalars import tuple_of_betas


class AsTorch(PagedOptimizer):
    """A class that replaces one of torch's and has one rule."""

    @of_items_alone
    def rule_of(self, group: Group) -> Rule:
        """Return the rule.  Raises as :func:`check_flags`."""
        check_flags(self, group)
        return self.rules[0]


def constructor(theirs: type[torch.optim.Optimizer], makes_state: bool = False) -> Callable[..., None]:
    """Return the ``__init__`` of a class that replaces ``theirs``.

    Its arguments are those of the installed torch, in its order and with its defaults, and behind them options.

    Args:
        makes_state: whether the constructor of ``theirs`` makes state; here the first step makes it, in its place.
    """
    asked = inspect.signature(theirs.__init__)
    numbers = [name for name, said in asked.parameters.items() if type(said.default) in (int, float)]

    @functools.wraps(theirs.__init__)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        options: Any = {name: given.pop(name) for name in [*given] if name not in asked.parameters}
        hyper = asked.bind(self, *args, **given).arguments
        del hyper["self"]
        self._configure(options)
        if hyper.get("differentiable") and not hyper.get("fused"):  # torch itself refuses both together
            name = type(self).__name__
            raise ValueError(
                f"differentiable=True: {name} does not support it; use torch.optim.{theirs.__name__} for that"
            )
        check_hyperparameters(**{name: hyper[name] for name in numbers if name in hyper})
        if "betas" in hyper:
            hyper["betas"] = tuple_of_betas(hyper["betas"])
        if not makes_state:
            theirs.__init__(self, **hyper)
            return
        params, fused = hyper["params"], hyper.get("fused")
        like: Callable[..., Any] = functools.partial(theirs, **{**hyper, "params": [torch.empty(0)]})
        torch.optim.Optimizer.__init__(self, params, {**like(fused=None).defaults, "fused": fused})
        like()  # refuses flags, behind the parameters
        if fused:
            self._step_supports_amp_scaling = True

    taken = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation=Unpack[Options])
    __init__.__signature__ = asked.replace(parameters=[*asked.parameters.values(), taken])  # type: ignore[attr-defined]
    return __init__


def check_flags(optimizer: RuleOptimizer, group: Group) -> None:
    """Refuse flags of a group that its step cannot follow.

    Raises:
        AssertionError: ``capturable`` without ``fused``, and a CPU parameter has a gradient (as torch).
        RuntimeError: ``differentiable`` is set.
    """
    if group["differentiable"]:
        name = type(optimizer).__name__
        raise RuntimeError(
            f"differentiable=True is set in a group; {name} does not support it: use torch's "
            f"{name.removeprefix('Paged')}"
        )
    capturable = "capturable" in optimizer.defaults and group["capturable"] and not group.get("fused")
    if capturable and any(p.device.type == "cpu" and p.grad is not None for p in group["params"]):
        raise AssertionError(
            "capturable=True is set in a group with CPU parameters; it is for CUDA parameters, or for fused=True"
        )
