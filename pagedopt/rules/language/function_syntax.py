"""The syntax tree of a function, read from its source file and compared with the code that Python runs."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NoReturn


class RuleError(TypeError):
    """A rule cannot be translated, or not be used here; the message names file and line, and what to write instead."""


def source_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """Return the syntax tree of ``function``, or raise RuleError; :func:`location` knows the line of each node."""
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise RuleError(f"rule {function!r}: a rule is a plain function written with def")
    code = function.__code__
    if vars(function).keys() & {"__wrapped__", "__signature__"}:  # inspect would read the wrapped function
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
    try:
        tree = next(iter(ast.parse(textwrap.dedent("".join(lines))).body), None)
    except SyntaxError:
        tree = None
    if not isinstance(tree, ast.FunctionDef):
        raise RuleError(f"{file}:{first}: cannot translate this rule: a rule is a plain function written with def")
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.location = f"{file}:{first + node.lineno - 1}"  # type: ignore[attr-defined]
    return tree


def location(node: ast.AST, statement: ast.AST | None = None) -> str:
    """Return the "file:line" of a node, or that of the statement around a generated node."""
    found: str = getattr(node, "location", "") or getattr(statement, "location", "")
    return found


def refuse(node: ast.AST, why: str, within: ast.AST | None = None) -> NoReturn:
    """Raise a RuleError whose text begins with the line of ``node``."""
    raise RuleError(f"{location(node, within)}: cannot translate this rule: {why}")


def is_source_of(tree: ast.FunctionDef, code: CodeType) -> bool:
    """Whether ``tree``, a valid rule, compiles to ``code``.  Not if the file changed or was rewritten on import."""
    return _essence(_compiled(tree, code.co_freevars)) == _essence(code)


def _compiled(tree: ast.FunctionDef, free: tuple[str, ...]) -> CodeType:
    """Return the code of the function that ``tree`` defines, in a scope that has the names ``free``."""
    inner, arguments = copy.copy(tree), copy.copy(tree.args)
    # Decorators, annotations and defaults are evaluated outside of the function: they are no part of its code.
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
    """Return what code computes, without file and lines.  Strings are left out: a rule's only one is its docstring."""
    constants = [_essence(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts if type(c) is not str]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames
    return (*arguments, code.co_code, constants, code.co_names, code.co_freevars, code.co_cellvars)


__all__ = ["RuleError", "is_source_of", "location", "refuse", "source_of"]
