"""The syntax of a rule: its tree, compared with the code that Python runs; its signature; where a refusal points."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NoReturn


class RuleError(TypeError):
    """A rule cannot be translated, or not be used here; the message names file and line, and what to write instead."""


def refuse(file: str, line: int, why: str, begin: int, end: int | None) -> NoReturn:
    """Raise a RuleError that shows a line of a file, of which a caret marks the bytes from ``begin`` to ``end``."""
    text = linecache.getline(file, line).rstrip()
    before, marked = (part.decode(errors="replace") for part in (text.encode()[:begin], text.encode()[begin:end]))
    shown = f"\n    {text.strip()}\n    {' ' * len(before.lstrip())}{'^' * max(len(marked), 1)}" if text else ""
    raise RuleError(f"{file}:{line}: cannot translate this rule: {why}{shown}") from None


@dataclass(frozen=True)
class Source:
    """A function as it is written; its tree must not be changed."""

    file: str
    text: str
    at: tuple[int, str]
    tree: ast.FunctionDef

    def read(self) -> ast.FunctionDef:
        """Return a tree that may be changed."""
        return _definitions.__wrapped__(self.file, self.text)[self.at][0]

    def refuse(self, node: Any, why: str) -> NoReturn:
        """Raise a RuleError that points to ``node``."""
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        refuse(self.file, node.lineno, why, node.col_offset, end)


def codes(*todo: CodeType) -> list[CodeType]:
    """Return codes, and those of all functions that they define."""
    return [code for one in todo for code in (one, *codes(*(c for c in one.co_consts if isinstance(c, CodeType))))]


@functools.lru_cache(maxsize=32)
def _definitions(file: str, text: str) -> dict[tuple[int, str], tuple[ast.FunctionDef, CodeType]]:
    """Return the syntax tree and the code of each function of a file, by its first line and name."""
    module = ast.parse(text)
    known = {(c.co_firstlineno, c.co_name): c for c in codes(compile(module, file, "exec", dont_inherit=True))}
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    trees = {(min([f.lineno, *(d.lineno for d in f.decorator_list)]), f.name): f for f in functions}
    return {at: (tree, known[at]) for at, tree in trees.items() if at in known}


def source_of(function: Callable[..., Any]) -> Source:
    """Return the source of ``function``, or raise RuleError: there is none, or it is not what Python runs."""
    if not isinstance(function, FunctionType) or function.__code__.co_name == "<lambda>":
        raise RuleError(f"rule {function!r}: a rule, or what it calls, is a plain function written with def")
    code = function.__code__
    file, at = code.co_filename, (code.co_firstlineno, code.co_name)
    linecache.checkcache(file)
    if not (text := "".join(linecache.getlines(file, function.__globals__))):
        raise RuleError(f"rule {code.co_name!r}: its source cannot be read; define it in a file or notebook")
    try:
        tree, written = _definitions(file, text)[at]
        if _essence(written) == _essence(code):
            return Source(file, text, at, tree)
    except (SyntaxError, KeyError):
        pass
    why = "import it anew if the file has changed since, and let nothing rewrite it on import"
    refuse(file, at[0], f"the source of {code.co_name!r} is not what Python runs when it is called; {why}", 0, None)


def _essence(code: CodeType) -> tuple[Any, ...]:
    """Return instructions, constants and names of code, without file and lines."""
    constants = [_essence(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_varnames
    return (*arguments, code.co_code, constants, code.co_names, code.co_freevars, code.co_cellvars)


@dataclass(eq=False)
class Signature:
    """What the syntax of a rule says.

    Attributes:
        inputs: names of the element parameters, in order.
        scalars: names of the hyperparameters; ``defaults`` holds those that have a default.
        changes: for each returned element, the index of the input whose new value it is.
        writes: for each returned element, the index of the list it is stored to; in place, that input's own.
        returned: the parameters whose values it returns, in order; none: one expression.
        assigned: the names that it assigns.
    """

    name: str
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    defaults: dict[str, float]
    changes: tuple[int, ...]
    writes: tuple[int, ...]
    returned: tuple[str, ...]
    assigned: frozenset[str]

    @property
    def counted(self) -> list[str]:
        """The hyperparameters that it returns."""
        return [name for name in self.returned if name in self.scalars]


def signature_of(function: Callable[..., Any], source: Source) -> Signature:
    """Return the signature of a rule, or raise RuleError at the line at fault."""
    tree, a = source.tree, source.tree.args
    if a.vararg or a.kwarg or a.posonlyargs or a.defaults or not a.args:
        source.refuse(tree, "tensors, at least one, are plain positional parameters; hyperparameters follow after '*'")
    if len(a.args) > 16:  # the kernel has a mask of 32 bits; out of place, each result is one more list
        source.refuse(tree, f"{len(a.args)} tensor parameters; there may be 16")
    defaults: dict[str, Any] = dict(function.__kwdefaults__ or {})
    for arg in a.kwonlyargs:
        if not isinstance(defaults.get(arg.arg, 0), int | float):
            source.refuse(arg, f"the default of {arg.arg!r} is {defaults[arg.arg]!r}, not a number")
    nodes = check(source)
    inner = {id(n) for f in nodes[1:] if isinstance(f, ast.FunctionDef | ast.Lambda) for n in ast.walk(f)}
    own = [node for node in nodes if id(node) not in inner]
    early = [node for node in own if isinstance(node, ast.Return) and node is not tree.body[-1]]
    if early:
        source.refuse(early[0], "a rule has one 'return', which comes last; a choice is written 'a if test else b'")
    inputs, scalars = tuple(x.arg for x in a.args), tuple(x.arg for x in a.kwonlyargs)
    assigned = frozenset(n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    returned = _returned(source, inputs, scalars, assigned)
    changes = tuple(inputs.index(name) for name in returned if name in inputs) or (0,)
    return Signature(tree.name, inputs, scalars, defaults, changes, changes, returned, assigned)


def _returned(
    source: Source, inputs: tuple[str, ...], scalars: tuple[str, ...], assigned: frozenset[str]
) -> tuple[str, ...]:
    """Return the parameters whose values a rule returns; none for one expression, which overwrites the first input."""
    last = source.tree.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        source.refuse(last, f"a rule ends with 'return' of the new values, not with {ast.unparse(last)!r}")
    values = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    names = tuple(v.id if isinstance(v, ast.Name) else "" for v in values)
    if values == [last.value] and names[0] not in inputs:
        return ()
    if not {*names} <= {*inputs, *scalars}:
        return _by_position(source, values, names, inputs, scalars)
    for node, name in zip(values, names, strict=True):
        why = ""
        if name == "step":
            why = ", which the optimizer counts; leave it out"
        elif names.count(name) > 1:
            why = " twice; leave one out"
        elif name in scalars and name not in assigned:
            why = ", a hyperparameter that it does not change; leave it out, or assign it before"
        if why:
            source.refuse(node, f"returns {ast.unparse(node)!r}{why}")
    if not set(names) & set(inputs):
        source.refuse(last, "returns no tensor; return a positional parameter, too")
    return names


def _by_position(
    source: Source, values: list[ast.expr], names: tuple[str, ...], inputs: tuple[str, ...], scalars: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the outputs that ``values`` are for: the inputs in order, without the gradient.

    Args:
        names: those of ``values``; "" for an expression.
    """
    outputs = inputs[:1] + inputs[2 if inputs[1:2] == ("grad",) else 1 :]
    if len(values) != len(outputs) or any(isinstance(value, ast.Starred) for value in values):
        at, said = [name in inputs + scalars for name in names].index(False), ", ".join(map(repr, outputs))
        value, meant = values[at], (*outputs, inputs[-1])[min(at, len(outputs))]
        how = f"'{meant} = {ast.unparse(value)}', then 'return …' with {meant!r} in it"
        why = f"returns {len(values)} values; give one for each output by position ({said}), or return the parameters"
        source.refuse(value, f"{why} that change by name alone, assigned before, such as {how}")
    for node, name, output in zip(values, names, outputs, strict=True):
        if name in inputs + scalars and name != output:
            why = f"returns {name!r} in the place of {output!r}; beside expressions, values are taken by position"
            source.refuse(node, f"{why}: write '{output} = …' for each value before, and return names alone")
    return outputs


#: What has an effect, or an answer, only once.
_ONCE = {
    ast.Try, ast.With, ast.Match, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFunctionDef,
    ast.ClassDef, ast.Import, ast.ImportFrom,
}  # fmt: skip


def check(source: Source) -> list[ast.AST]:
    """Return the nodes of a function; raise RuleError at one that cannot be traced, whatever its values are."""
    nodes = [*ast.walk(source.tree)]
    for node in nodes:
        if type(node) in _ONCE:
            why = "a rule runs once, to be traced, and kernels do what it computed then; there is no"
            source.refuse(node, f"{why} 'try', 'with', 'match', 'global', 'yield', 'class' or 'import' in it")
    for named in [node for node in nodes if isinstance(node, ast.NamedExpr)]:
        lazy = (n for n in nodes if isinstance(n, ast.IfExp | ast.BoolOp | ast.Compare))
        if any(inner is named for node in lazy for inner in ast.walk(node)):
            source.refuse(named, f"':=' in a branch; write '{named.target.id} = …' before")
    return nodes
