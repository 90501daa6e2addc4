"""The syntax of a function, as long as it is the very code that Python runs when the function is called."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NoReturn


class RuleError(TypeError):
    """A rule that cannot be translated, or used where it is; the message names the file, the line and what to write."""


def source_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax tree of ``function``; :func:`place` says of each of its nodes where it stands.

    Raises:
        RuleError: it is no plain function, or its source cannot be had, or is that of another.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise RuleError(f"rule {function!r}: a rule is a plain function written with def")
    code = function.__code__
    if vars(function).keys() & {"__wrapped__", "__signature__"}:  # inspect would speak of what it wraps
        raise RuleError(
            f"{code.co_filename}:{code.co_firstlineno}: cannot translate this rule: {function.__name__!r} stands for "
            "another function, which it wraps; make that one a rule, with @pagedopt.rule as its only decorator"
        )
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise RuleError(
            f"rule {function.__name__!r}: its source cannot be read ({error}); define it in a file or notebook"
        ) from error
    file = inspect.getsourcefile(function) or code.co_filename
    tree = _first_statement("".join(lines))
    if not isinstance(tree, ast.FunctionDef):
        raise RuleError(f"{file}:{first}: cannot translate this rule: a rule is a plain function written with def")
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.place = f"{file}:{first + node.lineno - 1}"  # type: ignore[attr-defined]
    return tree


def place(node: ast.AST, otherwise: ast.AST | None = None) -> str:
    """The "file:line" of a node, or of the statement around one that has none."""
    found: str | None = getattr(node, "place", None)
    return found or ("" if otherwise is None else place(otherwise))


def refuse(node: ast.AST, why: str, within: ast.AST | None = None) -> NoReturn:
    """
    Raises:
        RuleError: always; its text names the line of ``node``.
    """
    raise RuleError(f"{place(node, within)}: cannot translate this rule: {why}")


def is_source_of(tree: ast.FunctionDef, code: CodeType) -> bool:
    """Whether Python makes ``code`` of ``tree``, if that has passed for a rule.

    It does not where the file has changed since it was imported, or something rewrites functions on import.
    """
    return _essence(_compiled(tree, code.co_freevars)) == _essence(code)


def _first_statement(text: str) -> ast.stmt | None:
    try:
        return next(iter(ast.parse(textwrap.dedent(text)).body), None)
    except SyntaxError:
        return None


def _compiled(tree: ast.FunctionDef, free: tuple[str, ...]) -> CodeType:
    """The code of the function that ``tree`` defines, in a scope that has the names ``free``."""
    inner, arguments = copy.copy(tree), copy.copy(tree.args)
    # What is evaluated where the function is defined is no part of it.
    inner.decorator_list, inner.returns, inner.args = [], None, arguments
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for kind in ("posonlyargs", "args", "kwonlyargs"):
        setattr(arguments, kind, [ast.arg(a.arg) for a in getattr(arguments, kind)])
    arguments.vararg, arguments.kwarg = (a and ast.arg(a.arg) for a in (arguments.vararg, arguments.kwarg))
    module = ast.parse("def scope():\n    pass")
    scope = module.body[0]
    assert isinstance(scope, ast.FunctionDef)
    given: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in free]
    scope.body = [*given, inner]
    code = compile(ast.fix_missing_locations(module), "<rule>", "exec", dont_inherit=True)
    return next(_codes(next(_codes(code))))


def _codes(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _essence(code: CodeType) -> tuple[Any, ...]:
    """What a function computes, without where it stands.  Strings are left out: a rule has none but its docstring."""
    constants = [
        _essence(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts if not isinstance(c, str)
    ]  # fmt: skip
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames
    return (*arguments, code.co_code, constants, code.co_names, code.co_freevars, code.co_cellvars)


__all__ = ["RuleError", "is_source_of", "place", "refuse", "source_of"]
