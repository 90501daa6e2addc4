"""The constructor of classes that torch does not have, and the limits of their hyperparameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import torch

from .optimizer import PagedOptimizer
from .options import check_hyperparameters
from .scalars import tuple_of_betas

Arguments = ParamSpec("Arguments")
#: Hyperparameters that are below 1, beside ``betas``.
_BELOW_ONE = ("momentum",)


def checked(declared: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Turn a declared ``__init__`` into one that checks its arguments, runs the declared body, and makes the optimizer.

    Every argument between ``params`` and options is a hyperparameter of groups; keyword-only arguments are flags.  Only
    an argument whose default is None may be None.  The body may check more; it gets ``betas`` as a tuple.
    """
    signature = inspect.signature(declared)
    arguments = {name: each for name, each in signature.parameters.items() if name not in ("self", "params", "options")}
    flags = [name for name, each in arguments.items() if each.kind is each.KEYWORD_ONLY]
    defaults = {name: each.default for name, each in arguments.items() if name not in flags}

    @functools.wraps(declared)
    def __init__(*given: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(f"{declared.__qualname__}() {error}") from None
        bound.apply_defaults()
        asked = bound.arguments
        hyper = _checked(defaults, {name: asked[name] for name in defaults})
        asked.update(hyper)
        declared(*bound.args, **bound.kwargs)
        PagedOptimizer.__init__(
            asked["self"], asked["params"], {**hyper, **{name: asked[name] for name in flags}}, **asked["options"]
        )

    return __init__


def _checked(defaults: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters.

    Raises:
        TypeError: one is a text, or None without need.
        ValueError: one is negative or has several elements; ``betas`` are too many or few; a decay is not below 1.
    """
    if "betas" in defaults:
        given["betas"] = tuple_of_betas(given["betas"], defaults["betas"])
    check_hyperparameters(**given)
    betas, like = given.get("betas", ()), defaults.get("betas", ())
    if len(betas) != len(like):
        raise ValueError(f"betas is {betas}; give {'two' if len(like) == 2 else 'three'} numbers, as betas={like}")
    numbers = {name: value for name, value in given.items() if name != "betas"}
    if absent := [name for name, value in numbers.items() if value is None and defaults[name] is not None]:
        raise TypeError(f"{absent[0]} is None; give a number, or leave it out")
    numbers = {name: value for name, value in numbers.items() if value is not None}
    decays = {f"betas[{i}]": beta for i, beta in enumerate(betas)} | {
        name: numbers[name] for name in _BELOW_ONE if name in numbers
    }
    for name, value in {**numbers, **decays}.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} elements; a hyperparameter has one")
    if not (all(value >= 0 for value in [*numbers.values(), *decays.values()]) and all(d < 1 for d in decays.values())):
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"{said}: none is negative, {'betas are' if betas else 'momentum is'} below 1")
    return given
