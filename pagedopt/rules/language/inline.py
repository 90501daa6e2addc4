"""A rule as a straight line of assignments: the plain functions that it calls are written out where it calls them.

Names of such a function's own become new names of the rule, so that none captures another.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from . import instead
from .function_syntax import RuleError, is_source_of, place, refuse, source_of
from .functions import FUNCTIONS
from .names import UNBOUND, NameWatch, complaint, is_reserved, value_of

Statement = tuple[str, ast.expr, ast.AST]


@dataclass
class _Scope:
    """Where a statement stands.

    Attributes:
        function: the function that says it.
        names: what its names stand for in the rule; None: themselves, as it is the rule.
        callers: the functions that are being written out, itself the last.
    """

    function: FunctionType
    names: dict[str, ast.expr] | None
    callers: tuple[FunctionType, ...]


@dataclass
class Line:
    """A rule's statements and values, in which it calls only :data:`FUNCTIONS`.

    Attributes:
        tree: the rule as it was written.
        statements: (name, value, the statement of the rule or of a function that it calls).
        values: what it returns.
        carried: hyperparameters that it returns beside others.
        renewed: what the names of those stand for once it has set them.
        watch: what this rests on.
    """

    tree: ast.FunctionDef
    statements: list[Statement] = field(default_factory=list)
    values: list[ast.expr] = field(default_factory=list)
    carried: tuple[str, ...] = ()
    renewed: dict[str, ast.expr] = field(default_factory=dict)
    watch: NameWatch = field(default_factory=NameWatch)
    _used: set[str] = field(default_factory=set)
    _texts: dict[FunctionType, ast.FunctionDef] = field(default_factory=dict)

    def write(self, function: FunctionType) -> None:
        """Fill all attributes.

        Raises:
            RuleError: a statement or a call cannot be translated.
        """
        self._open(function, self.tree)
        self.carried = _carried(self.tree)
        self._used = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}
        self._used |= {n.arg for n in ast.walk(self.tree) if isinstance(n, ast.arg)}
        self.values = self._body(_Scope(function, None, (function,)), self.tree)

    def check_texts(self) -> None:
        """
        Raises:
            RuleError: the text of a function, which passed, is not what Python runs.
        """
        for function, tree in self._texts.items():
            if not is_source_of(tree, function.__code__):
                refuse(
                    tree,
                    "its source is not what Python runs when it is called; import it anew if the file has changed "
                    "since, and let nothing rewrite it on import",
                )

    def _open(self, function: FunctionType, tree: ast.FunctionDef) -> None:
        self.watch.code(function)
        self._texts[function] = tree

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
        if any(_names(value) & set(names[:i]) for i, value in enumerate(values)):  # all are read before one is set
            values = [self._named(n, v, statement) for n, v in zip(names, values, strict=True)]
        for name, value in zip(names, values, strict=True):
            if name in self.carried:  # what was computed from its old value goes on to use that
                new = self.renewed[name] = self._named(name, value, statement)
                new.place = place(value, statement)  # type: ignore[attr-defined]
            else:
                self.statements.append((name, value, statement))

    def _bound(self, name: str, value: ast.expr, statement: ast.AST, lazy: bool) -> ast.expr:
        """What a name of a called function stands for.  ``lazy``: the value itself, computed where it is used."""
        if lazy or isinstance(value, ast.Name | ast.Constant):
            return value
        return self._named(name, value, statement)

    def _named(self, name: str, value: ast.expr, statement: ast.AST) -> ast.expr:
        """A new name for a value."""
        number, fresh = 0, name
        while fresh in self._used or is_reserved(fresh):
            number += 1
            fresh = f"{name}_{number}"
        self._used.add(fresh)
        self.statements.append((fresh, value, statement))
        return ast.copy_location(ast.Name(fresh, ast.Load()), value)

    def _expression(self, scope: _Scope, node: ast.expr, lazy: bool = False) -> ast.expr:
        """A copy of ``node`` in the rule's names.  ``lazy``: it stands in a branch, which may not be taken."""
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
                skips = isinstance(node, ast.BoolOp | ast.Compare)  # which end with the first that settles them
                parts = [self._expression(scope, v, lazy or (skips and i > 0)) for i, v in enumerate(value)]
                setattr(changed, name, parts)
        return changed

    def _inlined(self, scope: _Scope, node: ast.Call, lazy: bool) -> list[ast.expr] | None:
        """The values of a call of a plain function; None: of one of :data:`FUNCTIONS`, which stays.

        Raises:
            RuleError: it calls something else.
        """
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        code = scope.function.__code__
        value: Any = None if name in (*code.co_varnames, *code.co_cellvars) else value_of(scope.function, name)
        if name in FUNCTIONS:
            if node.keywords or len(node.args) != FUNCTIONS[name].arity:
                refuse(node, instead.of_call(scope.function, node))
            if value is not FUNCTIONS[name].host:
                refuse(node, complaint(name, value))
            self.watch.name(scope.function, name, place(node))
            return None
        if name and value is UNBOUND:
            refuse(
                node, f"{name!r} is not defined; a function that a rule calls is defined or imported before the rule"
            )
        if not isinstance(value, FunctionType):
            refuse(node, instead.of_call(scope.function, node))
        self.watch.name(scope.function, name, place(node))
        if any(value is caller for caller in scope.callers):
            refuse(node, f"{name!r} calls itself, directly or through others; it cannot be written out")
        try:
            tree = self._texts.get(value) or source_of(value)
        except RuleError as error:
            refuse(node, f"{name!r} is no function that could be written out: {error}")
        self._open(value, tree)
        names = self._arguments(scope, node, value, tree, lazy)
        return self._body(_Scope(value, names, (*scope.callers, value)), tree, lazy)

    def _arguments(
        self, scope: _Scope, node: ast.Call, function: FunctionType, tree: ast.FunctionDef, lazy: bool
    ) -> dict[str, ast.expr]:
        """What each parameter of ``function`` stands for."""
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
                self.watch.defaults(function)
                found[name] = _constant(parameter.default, node, f"the default of {name!r}")
        return found


def check_name(node: ast.AST, name: str) -> None:
    """
    Raises:
        RuleError: a parameter or variable of a rule may not have this name.
    """
    if is_reserved(name):
        refuse(
            node,
            f"the name {name!r} is reserved, as words of C++ are and what a kernel needs for itself (the docstring of "
            "pagedopt.rule lists it); choose another",
        )


def straight_line(function: FunctionType, tree: ast.FunctionDef) -> Line:
    """``function``, whose text is ``tree``, without calls of other plain functions.

    Raises:
        RuleError: a statement or a call cannot be translated; the text names its line.
    """
    line = Line(tree)
    line.write(function)
    return line


def _parts(statement: ast.stmt) -> tuple[list[str], ast.expr]:
    """The names and the value of an assignment."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        load = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement)
        return [load.id], ast.copy_location(ast.BinOp(load, statement.op, statement.value), statement)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        (target,) = statement.targets
        several = isinstance(target, ast.Tuple) and len(target.elts) > 1
        names = [n.id for n in (target.elts if several else [target]) if isinstance(n, ast.Name)]  # type: ignore[attr-defined]
        if len(names) == (len(target.elts) if several else 1):  # type: ignore[attr-defined]
            return names, statement.value
    refuse(statement, instead.of_statement(statement))


def _carried(tree: ast.FunctionDef) -> tuple[str, ...]:
    last = tree.body[-1]
    values = last.value.elts if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple) else []
    given = {a.arg for a in tree.args.kwonlyargs} if len(values) > 1 else set()
    return tuple(v.id for v in values if isinstance(v, ast.Name) and v.id in given)


def _names(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _constant(value: Any, node: ast.AST, what: str) -> ast.expr:
    if not isinstance(value, int | float) or math.isnan(value):
        refuse(node, f"{what} is {value!r}, not a number")
    made: ast.expr = ast.Constant(abs(value))
    return ast.UnaryOp(ast.USub(), made) if math.copysign(1, value) < 0 else made


__all__ = ["Line", "Statement", "check_name", "straight_line"]
