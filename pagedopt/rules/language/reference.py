"""A rule as torch operations on whole tensors: the reference that tests compare kernels with."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch

from .functions import FUNCTIONS
from .host_expressions import ArrayExpression
from .parse import Program, copy_of, define


def reference_function(program: Program) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function: tensors, and hyperparameters by name → the value of each result, in the tensors' dtype."""
    inputs = program.inputs[: len(program.inputs) - (len(program.writes) if program.writes != program.changes else 0)]
    emit = ArrayExpression()
    parameters = [*inputs, *(["*", *program.scalars] if program.scalars else [])]
    lines = [f"def reference({', '.join(parameters)}):"]
    for position, (name, value) in enumerate(program.statements):
        text = ast.unparse(emit.visit(copy_of(value)))
        lines.append(f"    {name} = {f'_filled({text}, {name})' if position in program.filled else text}")
    lines.append(f"    return ({' '.join(f'{ast.unparse(emit.visit(copy_of(v)))},' for v in program.values)})")
    return define("reference", f"<reference of rule {program.name}>", lines, {**_TENSOR_FUNCTIONS}, program)


def filled(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of ``value`` in the shape of ``like``; a tensor of that shape is returned as it is."""
    if isinstance(value, torch.Tensor) and value.shape == like.shape:
        return value
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like).clone()


def _tensor(value: Any, like: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, dtype=like.dtype if isinstance(like, torch.Tensor) else torch.float64)


def _choice(test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if not isinstance(test, torch.Tensor):
        return yes() if test else no()
    a, b = yes(), no()
    like = a if isinstance(a, torch.Tensor) else b
    return torch.where(test.bool(), _tensor(a, like), _tensor(b, like))


def _number(truth: Any, *terms: Any) -> Any:
    """Return 0 or 1 in the dtype of the compared terms: torch cannot subtract bool tensors."""
    dtypes = [t.dtype for t in terms if isinstance(t, torch.Tensor)]
    return truth.to(dtypes[0]) if dtypes else truth


def _on_tensors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make a function of tensors accept numbers, too."""

    def call(*arguments: Any) -> torch.Tensor:
        like = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        return function(*(_tensor(a, like) for a in arguments))

    return call


_TENSOR_FUNCTIONS: dict[str, Any] = {
    **{name: _on_tensors(function.tensor) for name, function in FUNCTIONS.items()},
    "_choice": _choice,
    "_all": lambda *tests: functools.reduce(_on_tensors(torch.logical_and), tests),
    "_any": lambda *tests: functools.reduce(_on_tensors(torch.logical_or), tests),
    "_not": _on_tensors(torch.logical_not),
    "_number": _number,
    "_filled": filled,
}

__all__ = ["filled", "reference_function"]
