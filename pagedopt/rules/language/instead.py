"""Texts of errors: what a rule must not contain, and what to write instead."""

from __future__ import annotations

import ast
from types import FunctionType

from .functions import FUNCTIONS
from .names import value_of

_ENDS = "a rule has one 'return', which comes last; a choice is written 'a if test else b'"
_LOOP = "a rule has no loops; write each turn out"
_STATEMENTS: dict[type[ast.stmt], str] = {
    ast.If: "a choice is an expression: write 'name = a if test else b'",
    ast.For: _LOOP,
    ast.While: _LOOP,
    ast.Return: _ENDS,
    ast.Expr: "it gives no name a value; leave it out",
    ast.FunctionDef: "define the function outside of the rule; a rule may call it",
}
#: Names that math, numpy and torch have for functions that a rule may call.
_OTHERS = {"absolute": "abs", "fabs": "abs", "fmax": "max", "fmin": "min", "maximum": "max", "minimum": "min"}


def of_statement(statement: ast.stmt) -> str:
    """Describe what is wrong with a statement that is no plain assignment."""
    return f"{ast.unparse(statement).splitlines()[0]!r}: {_advice(statement)}"


def _advice(statement: ast.stmt) -> str:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None and isinstance(statement.target, ast.Name):
        return f"leave the annotation out: write '{statement.target.id} = {ast.unparse(statement.value)}'"
    if isinstance(statement, ast.Assign) and len(statement.targets) > 1:
        *others, last = map(ast.unparse, statement.targets)
        turns = [f"{last} = {ast.unparse(statement.value)}", *(f"{name} = {last}" for name in others)]
        return f"one at a time: write {', then '.join(f'{turn!r}' for turn in turns)}"
    otherwise = "only 'name = expression', 'a, b = function(…)' and one final 'return' can be translated"
    return _STATEMENTS.get(type(statement), otherwise)


def of_last(statement: ast.stmt, kind: str) -> str:
    """Describe what is wrong with the last statement of ``kind``, which returns nothing."""
    first, advice = ast.unparse(statement).splitlines()[0], _STATEMENTS.get(type(statement), "")
    more = f"; {advice}" if advice and not isinstance(statement, ast.Return) else ""
    return f"{kind} ends with 'return' of the new values, and not with {first!r}{more}"


def of_call(function: FunctionType, node: ast.Call) -> str:
    """Describe what is wrong with a call that can be neither translated nor inlined."""
    text = f"call {ast.unparse(node)!r}"
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    name = _OTHERS.get(called, called)
    if name in FUNCTIONS and (isinstance(node.func, ast.Attribute) or name != called):
        arguments = [ast.unparse(a) for a in node.args]
        if isinstance(node.func, ast.Attribute) and _is_element(function, node.func.value):
            arguments.insert(0, ast.unparse(node.func.value))
        home = FUNCTIONS[name].home
        whence = f"Python's own {name}:" if home == "builtins" else f"'from {home} import {name}' and call"
        return f"{text}; write {whence} {name}({', '.join(arguments)})"
    known = ", ".join(f"{name}/{function.arity}" for name, function in FUNCTIONS.items())
    return f"{text}; a rule may call plain functions, written with def, and (name/arguments) {known}"


def of_name(function: FunctionType, name: str, where: str) -> str:
    """Describe what is wrong with a name that is undefined in ``where``: "rule", or "function" that a rule calls."""
    said = f"the name {name!r} is not a parameter or an earlier assignment of the {where}"
    value = value_of(function, name)
    if not isinstance(value, int | float):
        return said
    given = f"{name.lstrip('_')}={value!r}"
    how = f"keyword with a default: (*, {given})" if where == "rule" else f"parameter with a default: {given}"
    return f"{said}; make it a {how}"


def of_expression(node: ast.AST) -> str:
    """Describe what is wrong with an expression of a kind that is not translated."""
    if isinstance(node, ast.Attribute):
        return f"{ast.unparse(node)!r}: make a number from elsewhere a keyword with a default: (*, {node.attr}=…)"
    return f"{ast.unparse(node)!r}: use arithmetic, comparisons, 'a if c else b' and the known functions"


def of_operator(node: ast.BinOp) -> str:
    """Describe what is wrong with an operator on elements."""
    said = f"operator in {ast.unparse(node)!r}; use + - * / or the powers 2 and 3"
    if not isinstance(node.op, ast.Pow):
        return said
    half = isinstance(node.right, ast.Constant) and node.right.value == 0.5
    root = f"sqrt({ast.unparse(node.left)})" if half else "sqrt, exp and log"
    return f"{said}; or write {root}, with 'from math import sqrt{'' if half else ', exp, log'}'"


def _is_element(function: FunctionType, node: ast.expr) -> bool:
    """Whether ``node`` is a value computed in the function, and not (part of) a module."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return not isinstance(node, ast.Name) or node.id in function.__code__.co_varnames


__all__ = ["of_call", "of_expression", "of_last", "of_name", "of_operator", "of_statement"]
