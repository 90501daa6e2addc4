"""Inlines the plain functions that a rule calls, so that only assignments and one return are left.

Local names of an inlined function are renamed, so that they do not clash with names of the rule.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from . import instead
from .function_syntax import RuleError, is_source_of, location, refuse, source_of
from .functions import FUNCTIONS
from .names import UNBOUND, Dependencies, complaint, is_reserved, value_of

Statement = tuple[str, ast.expr, ast.AST]


@dataclass
class _Scope:
    """The function that a statement is part of.

    Attributes:
        function: the function.
        names: the expression that each of its names stands for in the rule; None: the function is the rule itself.
        callers: the functions that are being inlined; the last one is ``function``.
    """

    function: FunctionType
    names: dict[str, ast.expr] | None
    callers: tuple[FunctionType, ...]


class InlinedRule:
    """The statements and return values of a rule that calls only :data:`FUNCTIONS`.

    Attributes:
        statements: (name, value, the statement of the rule or of a function that it calls).
        values: the returned expressions.
        carried: the hyperparameters that the rule returns; a single returned name never counts as one.
        renewed: for each of ``carried``, the new name that holds its value once the rule has assigned it.
        dependencies: what must not change for this to stay valid.
    """

    def __init__(self, function: FunctionType, tree: ast.FunctionDef) -> None:
        self.tree = tree
        self.statements: list[Statement] = []
        self.renewed: dict[str, ast.expr] = {}
        self.dependencies = Dependencies()
        self.carried = _carried(tree)
        self._trees: dict[FunctionType, ast.FunctionDef] = {}
        self._used = _names(tree) | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        self._add(function, tree)
        self.values = self._body(_Scope(function, None, (function,)), tree)

    def check_texts(self) -> None:
        """Raise a RuleError if the source of a function is not what Python runs; call this for valid rules only."""
        for function, tree in self._trees.items():
            if not is_source_of(tree, function.__code__):
                refuse(
                    tree,
                    "its source is not what Python runs when it is called; import it anew if the file has changed "
                    "since, and let nothing rewrite it on import",
                )

    def _add(self, function: FunctionType, tree: ast.FunctionDef) -> None:
        self.dependencies.add_code(function)
        self._trees[function] = tree

    def _body(self, scope: _Scope, tree: ast.FunctionDef, lazy: bool = False) -> list[ast.expr]:
        *statements, last = tree.body
        for position, statement in enumerate(statements):
            if position == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # docstring
            self._assignment(scope, statement, lazy)
        if not isinstance(last, ast.Return) or last.value is None:
            kind = "a rule" if scope.names is None else "a function that a rule calls"
            refuse(last, instead.of_last(last, kind))
        values = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        return [self._expression(scope, value, lazy) for value in values]

    def _assignment(self, scope: _Scope, statement: ast.stmt, lazy: bool) -> None:
        names, value = _parts(statement)
        for name in names:
            check_name(statement, name)
        if len(names) == 1:
            values = [self._expression(scope, value, lazy)]
        else:
            found = self._inlined(scope, value, lazy) if isinstance(value, ast.Call) else None
            if found is None:
                refuse(statement, "only a function of several values can be assigned to several names")
            if len(found) != len(names):
                refuse(statement, f"{len(names)} names for {len(found)} values")
            values = found
        if scope.names is not None:
            made = [self._bound(n, v, statement, lazy) for n, v in zip(names, values, strict=True)]
            scope.names.update(zip(names, made, strict=True))
            return
        if any(_names(value) & set(names[:i]) for i, value in enumerate(values)):  # compute all before assigning one
            values = [self._named(n, v, statement) for n, v in zip(names, values, strict=True)]
        for name, value in zip(names, values, strict=True):
            if name in self.carried:  # under a new name: earlier statements still mean the old value
                new = self.renewed[name] = self._named(name, value, statement)
                new.location = location(value, statement)  # type: ignore[attr-defined]
            else:
                self.statements.append((name, value, statement))

    def _bound(self, name: str, value: ast.expr, statement: ast.AST, lazy: bool) -> ast.expr:
        """Return what a name of an inlined function stands for.  ``lazy``: its value, computed where it is used."""
        if lazy or isinstance(value, ast.Name | ast.Constant):
            return value
        return self._named(name, value, statement)

    def _named(self, name: str, value: ast.expr, statement: ast.AST) -> ast.expr:
        """Assign a value to a new name, and return that name."""
        number, fresh = 0, name
        while fresh in self._used or is_reserved(fresh):
            number += 1
            fresh = f"{name}_{number}"
        self._used.add(fresh)
        self.statements.append((fresh, value, statement))
        return ast.copy_location(ast.Name(fresh, ast.Load()), value)

    def _expression(self, scope: _Scope, node: ast.expr, lazy: bool = False) -> ast.expr:
        """Return a copy of ``node`` in the rule's names.  ``lazy``: it is in a branch that may not be taken."""
        if isinstance(node, ast.Call):
            values = self._inlined(scope, node, lazy)
            if values is not None and len(values) != 1:
                refuse(node, f"{ast.unparse(node)!r} has {len(values)} values; assign them to names first")
            if values is not None:
                return values[0]
        if isinstance(node, ast.Name) and scope.names is not None:
            if node.id not in scope.names:
                refuse(node, instead.of_name(scope.function, node.id, "function"))
            return copy.deepcopy(scope.names[node.id])
        if isinstance(node, ast.Name) and node.id in self.renewed:
            return copy.deepcopy(self.renewed[node.id])
        changed = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not (name == "func" and isinstance(value, ast.Name)):
                branch = isinstance(node, ast.IfExp) and name != "test"
                setattr(changed, name, self._expression(scope, value, lazy or branch))
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                skips = isinstance(node, ast.BoolOp | ast.Compare)  # Python may skip all operands but the first
                parts = [self._expression(scope, v, lazy or (skips and i > 0)) for i, v in enumerate(value)]
                setattr(changed, name, parts)
        return changed

    def _inlined(self, scope: _Scope, node: ast.Call, lazy: bool) -> list[ast.expr] | None:
        """Inline a call of a plain function and return its values; None: a call of :data:`FUNCTIONS`, which stays."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        code = scope.function.__code__
        value: Any = None if name in (*code.co_varnames, *code.co_cellvars) else value_of(scope.function, name)
        if name in FUNCTIONS:
            if node.keywords or len(node.args) != FUNCTIONS[name].arity:
                refuse(node, instead.of_call(scope.function, node))
            if value is not FUNCTIONS[name].host:
                refuse(node, complaint(name, value))
            self.dependencies.add_name(scope.function, name, location(node))
            return None
        if name and value is UNBOUND:
            refuse(
                node, f"{name!r} is not defined; a function that a rule calls is defined or imported before the rule"
            )
        if not isinstance(value, FunctionType):
            refuse(node, instead.of_call(scope.function, node))
        self.dependencies.add_name(scope.function, name, location(node))
        if any(value is caller for caller in scope.callers):
            refuse(node, f"{name!r} calls itself, directly or through others; it cannot be written out")
        try:
            tree = self._trees.get(value) or source_of(value)
        except RuleError as error:
            refuse(node, f"{name!r} is no function that could be written out: {error}")
        self._add(value, tree)
        names = self._arguments(scope, node, value, tree, lazy)
        return self._body(_Scope(value, names, (*scope.callers, value)), tree, lazy)

    def _arguments(
        self, scope: _Scope, node: ast.Call, function: FunctionType, tree: ast.FunctionDef, lazy: bool
    ) -> dict[str, ast.expr]:
        """Return what each parameter of ``function`` stands for in the rule."""
        if tree.args.vararg or tree.args.kwarg:
            refuse(tree, f"{function.__name__!r} takes any number of arguments; name each of them")
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            refuse(node, f"call {ast.unparse(node)!r}; write each argument out")
        signature = inspect.signature(function)
        try:
            given = signature.bind(*node.args, **{str(k.arg): k.value for k in node.keywords})
        except TypeError as error:
            refuse(node, f"call {ast.unparse(node)!r}: {error}")
        found: dict[str, ast.expr] = {}
        for name, parameter in signature.parameters.items():
            check_name(tree, name)
            if name in given.arguments:
                value = self._expression(scope, given.arguments[name], lazy)
                found[name] = self._bound(name, value, node, lazy)
            else:
                self.dependencies.add_defaults(function)
                found[name] = _constant(parameter.default, node, f"the default of {name!r}")
        return found


def check_name(node: ast.AST, name: str) -> None:
    """Raise a RuleError if a parameter or variable of a rule may not have this name."""
    if is_reserved(name):
        refuse(
            node,
            f"the name {name!r} is reserved, as words of C++ are and what a kernel needs for itself (the docstring of "
            "pagedopt.rule lists it); choose another",
        )


def _parts(statement: ast.stmt) -> tuple[list[str], ast.expr]:
    """Return the names and the value of an assignment."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        load = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement)
        return [load.id], ast.copy_location(ast.BinOp(load, statement.op, statement.value), statement)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        (target,) = statement.targets
        targets = target.elts if isinstance(target, ast.Tuple) and len(target.elts) > 1 else [target]
        names = [n.id for n in targets if isinstance(n, ast.Name)]
        if len(names) == len(targets):
            return names, statement.value
    refuse(statement, instead.of_statement(statement))


def _carried(tree: ast.FunctionDef) -> tuple[str, ...]:
    last = tree.body[-1]
    values = last.value.elts if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple) else []
    given = {a.arg for a in tree.args.kwonlyargs} if len(values) > 1 else set()
    return tuple(v.id for v in values if isinstance(v, ast.Name) and v.id in given)


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _constant(value: Any, node: ast.AST, what: str) -> ast.expr:
    if not isinstance(value, int | float) or math.isnan(value):
        refuse(node, f"{what} is {value!r}, not a number")
    made: ast.expr = ast.Constant(abs(value))
    return ast.UnaryOp(ast.USub(), made) if math.copysign(1, value) < 0 else made


__all__ = ["InlinedRule", "Statement", "check_name"]
