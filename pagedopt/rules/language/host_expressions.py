"""The part of a rule that depends on hyperparameters alone, compiled for Python numbers and for NumPy arrays."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .functions import FUNCTIONS
from .parse import Program, call, copy_of, define

Host = Callable[..., list[Any]]


def host_function(program: Program) -> Host:
    """Return a function: hyperparameters as keywords → the value of every uniform (a number, a bool, or complex)."""
    namespace: dict[str, Any] = {name: function.host for name, function in FUNCTIONS.items()}
    return _defined(program, copy_of, namespace)


def columns_function(program: Program) -> Host:
    """Return :func:`host_function` for float64 arrays, a value per set; within :func:`strict` with the same bits."""
    functions = {name: _on_each(function.host, function.arity) for name, function in FUNCTIONS.items()}
    return _defined(program, lambda node: _Columns().visit(copy_of(node)), {**functions, **_OPERATIONS})


def first_failure(program: Program, scalars: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the first uniform expression that raises or is complex, and the exception or number; else ("", None)."""
    names = {name: function.host for name, function in FUNCTIONS.items()} | program.defaults | dict(scalars)
    for name, expression in [*program.host, *(("", uniform) for uniform in program.uniforms)]:
        text = ast.unparse(expression)
        try:
            value = eval(text, {}, names)
        except (ArithmeticError, TypeError, ValueError) as error:
            return text, error
        if isinstance(value, complex):
            return text, value
        if name:
            names[name] = value
    return "", None


def strict() -> np.errstate:
    """Make NumPy raise wherever Python might raise; the caller then computes with Python."""
    return np.errstate(divide="raise", over="raise", invalid="raise")


def _defined(program: Program, write: Callable[[ast.expr], ast.expr], namespace: dict[str, Any]) -> Host:
    def text(node: ast.expr) -> str:
        return ast.unparse(ast.fix_missing_locations(write(node)))

    lines = [
        f"def host(*, {', '.join(program.scalars)}):" if program.scalars else "def host():",
        *(f"    {name} = {text(value)}" for name, value in program.host),
        f"    return [{', '.join(text(u) for u in program.uniforms)}]",
    ]
    return define("host", f"<host part of rule {program.name}>", lines, namespace, program)


class ArrayExpression(ast.NodeTransformer):
    """Replaces ``a if b else c``, ``and``, ``or``, ``not`` and comparisons by calls that also take arrays.

    ``_number(truth, *terms)`` makes the result of a comparison of ``terms`` a number again.
    """

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        terms = [node.left, *node.comparators]
        pairs = zip(terms, node.ops, terms[1:], strict=False)
        return call("_number", call("_all", *(ast.Compare(a, [op], [b]) for a, op, b in pairs)), *terms)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return call("_all" if isinstance(node.op, ast.And) else "_any", *node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return call("_number", call("_not", node.operand), node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return call("_choice", node.test, ast.Lambda(nothing, node.body), ast.Lambda(nothing, node.orelse))


class _Columns(ArrayExpression):
    """Also replaces operators that NumPy computes with other bits than Python, by :data:`_OPERATIONS`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow | ast.Mod | ast.FloorDiv):
            return call(f"_{type(node.op).__name__}", node.left, node.right)
        return node


def _on_each(function: Callable[..., Any], arity: int) -> Callable[..., Any]:
    """Apply Python's function to each value of arrays: NumPy's function of that name may round differently."""
    each = np.frompyfunc(function, arity, 1)

    def call(*arguments: Any) -> Any:
        result = each(*arguments)
        return result.astype(np.float64) if isinstance(result, np.ndarray) else result

    return call


def _power(a: Any, b: Any) -> Any:
    """``np.float_power`` calls the C library's ``pow``, as Python does; ``np.power`` is vectorized, with other bits."""
    return np.float_power(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else a**b


def _choice(test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if isinstance(test, np.ndarray):
        return np.where(test != 0, 1 * yes(), 1 * no())  # times 1: a bool becomes a number
    return yes() if test else no()


def _number(truth: Any, *_: Any) -> Any:
    return truth.astype(np.float64) if isinstance(truth, np.ndarray) else bool(truth)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "_Pow": _power,
    "_Mod": _on_each(operator.mod, 2),
    "_FloorDiv": _on_each(operator.floordiv, 2),
    "_choice": _choice,
    "_all": lambda *tests: functools.reduce(np.logical_and, tests, True),
    "_any": lambda *tests: functools.reduce(np.logical_or, tests, False),
    "_not": np.logical_not,
    "_number": _number,
}

__all__ = ["ArrayExpression", "columns_function", "first_failure", "host_function", "strict"]
