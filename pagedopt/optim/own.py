"""The constructor of classes that torch does not have, and the limits of their hyperparameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch

from .optimizer import PagedOptimizer
from .options import Options, check_hyperparameters
from .scalars import tuple_of_betas

#: Hyperparameters that are below 1, beside ``betas``.
_BELOW_ONE = ("momentum",)
_FLAGS = ("maximize", "capturable")


def constructor(check: Callable[[Mapping[str, Any]], None] | None = None, **defaults: Any) -> Callable[..., None]:
    """Return the ``__init__`` of a class that torch does not have.

    Its arguments are ``params``, the hyperparameters in their order, by keyword ``maximize`` and ``capturable``, and
    options.  Nothing but a hyperparameter whose default is None may be None.

    Args:
        check: raises ValueError for hyperparameters that do not go together.
        defaults: hyperparameters and their defaults.
    """
    given_as = {"lr": float | torch.Tensor, "betas": Sequence[float | torch.Tensor]}
    kinds = {name: given_as.get(name, int | None if like is None else type(like)) for name, like in defaults.items()}
    at = inspect.Parameter
    signature = inspect.Signature([
        at("self", at.POSITIONAL_OR_KEYWORD),
        at("params", at.POSITIONAL_OR_KEYWORD, annotation=Iterable[Any]),
        *(at(name, at.POSITIONAL_OR_KEYWORD, default=defaults[name], annotation=kinds[name]) for name in defaults),
        *(at(name, at.KEYWORD_ONLY, default=False, annotation=bool) for name in _FLAGS),
        at("options", at.VAR_KEYWORD, annotation=Unpack[Options]),
    ])  # fmt: skip

    def __init__(*given: Any, **named: Any) -> None:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(f"{type(given[0]).__name__}.__init__() {error}") from None
        bound.apply_defaults()
        asked = bound.arguments
        hyper = _checked(defaults, {name: asked[name] for name in defaults})
        if check is not None:
            check(hyper)
        flags = {name: asked[name] for name in _FLAGS}
        PagedOptimizer.__init__(asked["self"], asked["params"], {**hyper, **flags}, **asked.get("options", {}))

    __init__.__signature__ = signature  # type: ignore[attr-defined]
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
