"""The part of a rule that depends on hyperparameters alone, as Python on numbers and on arrays of numbers."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .functions import FUNCTIONS
from .parse import Program, copy_of

Host = Callable[..., list[Any]]


def host_function(program: Program) -> Host:
    """Hyperparameters as keywords → the value of every uniform, which is a number, a truth, or complex."""
    namespace: dict[str, Any] = {name: function.host for name, function in FUNCTIONS.items()}
    return _defined(program, copy_of, namespace)


def columns_function(program: Program) -> Host:
    """The same where a hyperparameter may be a float64 array with one value per set.

    Within :func:`strict` an exception is raised, or each set gets the very bits that :func:`host_function` has for it.
    """
    functions = {name: _on_each(function.host, function.arity) for name, function in FUNCTIONS.items()}
    return _defined(program, lambda node: _Columns().visit(copy_of(node)), {**functions, **_OPERATIONS})


def first_failure(program: Program, scalars: Mapping[str, Any]) -> tuple[str, Any]:
    """The first expression of hyperparameters that raises or is complex: its text, and the exception or the number;
    ("", None) where there is none."""
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
    """A block in which NumPy raises wherever Python might: then Python is asked."""
    return np.errstate(divide="raise", over="raise", invalid="raise")


def _defined(program: Program, write: Callable[[ast.expr], ast.expr], namespace: dict[str, Any]) -> Host:
    def text(node: ast.expr) -> str:
        return ast.unparse(ast.fix_missing_locations(write(node)))

    lines = [
        f"def host(*, {', '.join(program.scalars)}):" if program.scalars else "def host():",
        *(f"    {name} = {text(value)}" for name, value in program.host),
        f"    return [{', '.join(text(u) for u in program.uniforms)}]",
    ]
    exec(compile("\n".join(lines), f"<host part of rule {program.name}>", "exec"), namespace)
    function = namespace["host"]
    function.__kwdefaults__ = dict(program.defaults)
    made: Host = function
    return made


class _Columns(ast.NodeTransformer):
    """What Python and NumPy do differently becomes a call of one of :data:`_OPERATIONS`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow | ast.Mod | ast.FloorDiv):
            return _call(f"_{type(node.op).__name__}", node.left, node.right)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        terms = [node.left, *node.comparators]
        pairs = zip(terms, node.ops, terms[1:], strict=False)
        return _call("_all", *(ast.Compare(a, [op], [b]) for a, op, b in pairs))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return _call("_all" if isinstance(node.op, ast.And) else "_any", *node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return _call("_choice", node.test, ast.Lambda(nothing, node.body), ast.Lambda(nothing, node.orelse))


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _on_each(function: Callable[..., Any], arity: int) -> Callable[..., Any]:
    """Python's own function on each value of arrays: what NumPy has by the name may round otherwise."""
    each = np.frompyfunc(function, arity, 1)

    def call(*arguments: Any) -> Any:
        result = each(*arguments)
        return result.astype(np.float64) if isinstance(result, np.ndarray) else result

    return call


def _power(a: Any, b: Any) -> Any:
    """``float_power`` calls the C library's ``pow`` as Python does; ``power`` has a vectorized one of other bits."""
    return np.float_power(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else a**b


def _choice(test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if isinstance(test, np.ndarray):
        return np.where(test != 0, 1 * yes(), 1 * no())  # 1 times a truth is a number
    return yes() if test else no()


def _truth(result: Any) -> Any:
    """As a number, that arithmetic may go on with."""
    return result.astype(np.float64) if isinstance(result, np.ndarray) else bool(result)


def _all(*tests: Any) -> Any:
    return _truth(functools.reduce(np.logical_and, tests, True))


def _any(*tests: Any) -> Any:
    return _truth(functools.reduce(np.logical_or, tests, False))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "_Pow": _power,
    "_Mod": _on_each(operator.mod, 2),
    "_FloorDiv": _on_each(operator.floordiv, 2),
    "_choice": _choice,
    "_all": _all,
    "_any": _any,
    "_not": lambda value: _truth(np.logical_not(value)),
}

__all__ = ["columns_function", "first_failure", "host_function", "strict"]
