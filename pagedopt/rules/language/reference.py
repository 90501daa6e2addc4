"""A rule on whole tensors: what the kernels are compared with."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

from .functions import FUNCTIONS
from .parse import Program, copy_of


def reference_function(program: Program) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The rule as it is written, unsplit: tensors (and hyperparameters by name) → the value of each result.

    What is a choice on scalars is a selection on tensors; arithmetic is in the tensors' own dtype.
    """
    inputs = program.inputs[: len(program.inputs) - (len(program.writes) if program.writes != program.changes else 0)]
    emit = _Vectorise()
    parameters = [*inputs, *(["*", *program.scalars] if program.scalars else [])]
    lines = [f"def reference({', '.join(parameters)}):"]
    for position, (name, value) in enumerate(program.statements):
        text = ast.unparse(emit.visit(copy_of(value)))
        lines.append(f"    {name} = {f'_filled({text}, {name})' if position in program.filled else text}")
    lines.append(f"    return ({' '.join(f'{ast.unparse(emit.visit(copy_of(v)))},' for v in program.values)})")
    namespace = {**_TENSOR_FUNCTIONS}
    exec(compile("\n".join(lines), f"<reference of rule {program.name}>", "exec"), namespace)
    function = namespace["reference"]
    function.__kwdefaults__ = dict(program.defaults)
    made: Callable[..., tuple[torch.Tensor, ...]] = function
    return made


def filled(value: Any, like: torch.Tensor) -> torch.Tensor:
    """``value`` for every element of ``like``; a tensor that has its shape is handed on."""
    if isinstance(value, torch.Tensor) and value.shape == like.shape:
        return value
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand_as(like).clone()


class _Vectorise(ast.NodeTransformer):
    """What is a choice on scalars is a selection on tensors."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return ast.Call(ast.Name("_where", ast.Load()), [node.test, node.body, node.orelse], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return self._fold("_logical_and" if isinstance(node.op, ast.And) else "_logical_or", node.values)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        terms = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            ast.Compare(a, [op], [b]) for a, op, b in zip(terms, node.ops, terms[1:], strict=False)
        ]
        return ast.Call(ast.Name("_number", ast.Load()), [self._fold("_logical_and", pairs), *terms], [])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            truth = ast.Call(ast.Name("_logical_not", ast.Load()), [node.operand], [])
            return ast.Call(ast.Name("_number", ast.Load()), [truth, node.operand], [])
        return node

    @staticmethod
    def _fold(name: str, values: list[ast.expr]) -> ast.expr:
        result = values[0]
        for value in values[1:]:
            result = ast.Call(ast.Name(name, ast.Load()), [result, value], [])
        return result


def _tensor(value: Any, like: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, dtype=like.dtype if isinstance(like, torch.Tensor) else torch.float64)


def _where(test: Any, yes: Any, no: Any) -> Any:
    if not isinstance(test, torch.Tensor):
        return yes if test else no
    like = yes if isinstance(yes, torch.Tensor) else no
    return torch.where(test.bool(), _tensor(yes, like), _tensor(no, like))


def _number(truth: Any, *terms: Any) -> Any:
    """0 and 1 in the dtype of the terms that were compared: torch does not subtract truths."""
    dtypes = [t.dtype for t in terms if isinstance(t, torch.Tensor)]
    return truth.to(dtypes[0]) if dtypes else truth


def _on_tensors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same on numbers, too."""

    def call(*arguments: Any) -> torch.Tensor:
        like = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        return function(*(_tensor(a, like) for a in arguments))

    return call


_TENSOR_FUNCTIONS: dict[str, Any] = {
    **{name: _on_tensors(function.tensor) for name, function in FUNCTIONS.items()},
    "_where": _where,
    "_logical_and": _on_tensors(torch.logical_and),
    "_logical_or": _on_tensors(torch.logical_or),
    "_logical_not": _on_tensors(torch.logical_not),
    "_number": _number,
    "_filled": filled,
}

__all__ = ["filled", "reference_function"]
