"""What a rule says: its syntax tree, split into what the host computes once and what a kernel computes per element.

A rule is written on scalars.  Its positional parameters are elements of tensors, its keyword-only parameters are
hyperparameters.  Whatever depends on hyperparameters alone is *uniform*: it is hoisted out of the kernel and computed
once per step on the host, in double, so ``(1 - beta2) * grad`` rounds to float32 once, as torch's kernels do.

This module reads; ``translate`` writes.  Neither touches memory or imports a compiler.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .functions import Binding
from .source import RuleError, is_source_of, source_of

#: Functions a rule may call on elements: name -> number of arguments.
ELEMENT_FUNCTIONS = {"sqrt": 1, "abs": 1, "sign": 1, "exp": 1, "log": 1, "min": 2, "max": 2, "fma": 3}

#: What C++ takes for a keyword or a macro, and Python does not.
_CPP_WORDS = frozenset(
    """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl const
    const_cast constexpr decltype default delete do double dynamic_cast enum explicit export extern false float
    friend goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq private protected
    public register reinterpret_cast short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t xor
    xor_eq INFINITY NAN NULL
    """.split()  # noqa: SIM905 - a table of words reads better than a list of strings
)
#: Names the generated CUDA or Python text needs for itself.
_OWN_WORDS = {"in", "u", "out", "S", "range", *ELEMENT_FUNCTIONS, *(f"element_{f}" for f in ELEMENT_FUNCTIONS)}

ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


@dataclass
class Program:
    """A rule after analysis: host part and element part, both still as syntax.

    Attributes:
        inputs: names of the element parameters, in order.
        scalars: names of the hyperparameters; ``defaults`` holds those that have a default.
        writes: for each returned value, the index of the input it overwrites.
        host: statements over hyperparameters only, run once per step in double.
        uniforms: expressions (over the host statements) the kernel receives, in order.
        body: element statements, with uniform expressions replaced by the names ``u0, u1, …``.
        returns: element expressions returned.
        filled: which statements give one value to all elements, by their place in the function.
        calls: the functions it calls, each with the first place ("file:line").
    """

    name: str
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    defaults: dict[str, float]
    writes: tuple[int, ...] = ()
    host: list[ast.stmt] = field(default_factory=list)
    uniforms: list[ast.expr] = field(default_factory=list)
    body: list[tuple[str, ast.expr]] = field(default_factory=list)
    returns: list[ast.expr] = field(default_factory=list)
    reads: frozenset[int] = frozenset()
    filled: set[int] = field(default_factory=set)
    calls: list[tuple[Binding, str]] = field(default_factory=list)
    tree: ast.FunctionDef | None = None

    @property
    def functor(self) -> str:
        """Its name in CUDA C++, where a rule may be called ``load`` or ``double``, too."""
        return f"rule_{self.name}"


def analyse(function: Callable[..., Any]) -> Program:
    """Read ``function`` and split it into what the host computes once and what the kernel computes per element.

    Raises:
        RuleError: the source is not available, or a statement or expression cannot be translated, or a name it calls
            stands for another function.
    """
    return _Analysis(function).program


class _Analysis:
    """One pass over the function; ``uniform`` holds the names that depend on hyperparameters alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        tree, self.file, self.first = source_of(function)
        self.program = self._signature(tree, function)
        self.uniform = set(self.program.scalars)
        self.element = set(self.program.inputs)
        self.called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        self.conditions = {id(c) for n in ast.walk(tree) for c in _conditions(n)}
        self.read: set[str] = set()
        self.assigned: set[str] = set()
        self._statements(tree)
        if not is_source_of(tree, function.__code__):
            self.fail(
                tree,
                "its source is not what Python runs when it is called; import it anew if the file has changed since, "
                "and let nothing rewrite it on import",
            )

    def _signature(self, tree: ast.FunctionDef, function: Callable[..., Any]) -> Program:
        a = tree.args
        if a.vararg or a.kwarg or a.posonlyargs or a.defaults:
            self.fail(tree, "tensors are plain positional parameters, hyperparameters follow after '*'")
        if not a.args:
            self.fail(tree, "a rule needs at least one tensor parameter")
        if len(a.args) > 16:  # the kernel keeps a mask of 32 bits, and results out of place are lists as well
            self.fail(tree, f"{len(a.args)} tensor parameters; there may be 16")
        for arg in (*a.args, *a.kwonlyargs):
            self._check_name(arg, arg.arg)
        defaults = dict(function.__kwdefaults__ or {})
        for arg in a.kwonlyargs:
            if not isinstance(defaults.get(arg.arg, 0), int | float):
                self.fail(arg, f"the default of {arg.arg!r} is {defaults[arg.arg]!r}, not a number")
        return Program(tree.name, tuple(x.arg for x in a.args), tuple(x.arg for x in a.kwonlyargs), defaults, tree=tree)

    def _statements(self, tree: ast.FunctionDef) -> None:
        *statements, last = tree.body
        for position, statement in enumerate(statements):
            if position == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # docstring
            self._assignment(statement, position)
        if not isinstance(last, ast.Return) or last.value is None:
            self.fail(last, "a rule ends with 'return' of the new values")
        self._return(last)

    def _assignment(self, statement: ast.stmt, position: int) -> None:
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            load = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement)
            value: ast.expr = ast.copy_location(ast.BinOp(load, statement.op, statement.value), statement)
            name = statement.target.id
        elif (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            name, value = statement.targets[0].id, statement.value
        else:
            self.fail(statement, "only 'name = expression' and one final 'return' can be translated")
        self._check_name(statement, name)
        if self._is_uniform(value) and name not in self.element:
            if name in self.uniform:
                self.fail(statement, f"{name!r} is already a hyperparameter; use a new name")
            self._check(value)
            self.program.host.append(ast.Assign([ast.Name(name, ast.Store())], copy_of(value)))
            self.uniform.add(name)
        else:
            translated = self._element(value)
            if name in self.uniform:
                self.fail(statement, f"{name!r} is a hyperparameter and cannot vary per element; use a new name")
            if self._is_uniform(value):
                self.program.filled.add(position)
            self.program.body.append((name, translated))
            self.element.add(name)
            self.assigned.add(name)

    def _return(self, statement: ast.Return) -> None:
        program, value = self.program, statement.value
        assert value is not None
        values = list(value.elts) if isinstance(value, ast.Tuple) else [value]
        names = [v.id if isinstance(v, ast.Name) else None for v in values]
        if len(values) == 1 and names[0] not in program.inputs:
            program.writes = (0,)  # 'return x + y' overwrites the first tensor
        else:
            for v, name in zip(values, names, strict=True):
                if name not in program.inputs:
                    self.fail(statement, f"returns {ast.unparse(v)!r}; return the parameters that change, by name")
            program.writes = tuple(program.inputs.index(name) for name in names if name)
        if len(set(program.writes)) != len(program.writes):
            self.fail(statement, "returns one parameter twice")
        program.returns = [self._element(v) for v in values]
        program.reads = frozenset(i for i, name in enumerate(program.inputs) if name in self.read)

    def _is_uniform(self, node: ast.expr) -> bool:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - set(ELEMENT_FUNCTIONS)
        return names <= self.uniform

    def _element(self, node: ast.expr) -> ast.expr:
        """``node`` with each maximal uniform subexpression replaced by u0, u1, …"""
        if isinstance(node, ast.Constant):
            self._check(node)
            return node
        if self._is_uniform(node):
            self._check(node)
            text = ast.unparse(node)
            known = [ast.unparse(u) for u in self.program.uniforms]
            if text not in known:
                self.program.uniforms.append(node)
                known.append(text)
            return ast.Name(f"u{known.index(text)}", ast.Load())
        self._check(node, deep=False)
        if isinstance(node, ast.Name):
            if node.id not in self.assigned:
                self.read.add(node.id)
            return node
        changed = _copy_shallow(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and name != "func":
                setattr(changed, name, self._element(value))
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                setattr(changed, name, [self._element(v) for v in value])
        return changed

    def _check_name(self, node: ast.AST, name: str) -> None:
        if name in _CPP_WORDS | _OWN_WORDS or name.startswith("_") or re.fullmatch(r"u\d+", name):
            self.fail(node, f"the name {name!r} is reserved; choose another")

    def _check(self, node: ast.expr, deep: bool = True) -> None:
        for n in ast.walk(node) if deep else [node]:
            self._check_one(n)

    def _check_one(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, int | float):
                self.fail(node, f"constant {node.value!r} is not a number")
        elif isinstance(node, ast.BinOp):
            square = (
                isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in (2, 3)
            )
            on_host = isinstance(node.op, ast.Pow | ast.Mod | ast.FloorDiv) and self._is_uniform(node)
            if type(node.op) not in ARITHMETIC and not square and not on_host:
                self.fail(node, f"operator in {ast.unparse(node)!r}; use + - * / or the powers 2 and 3")
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            if name not in ELEMENT_FUNCTIONS or node.keywords or len(node.args) != ELEMENT_FUNCTIONS[name]:
                known = ", ".join(f"{f}/{n}" for f, n in ELEMENT_FUNCTIONS.items())
                self.fail(node, f"call {ast.unparse(node)!r}; a rule may call (name/arguments) {known}")
            self._check_binding(node, name)
        elif isinstance(node, ast.Name):
            called = id(node) in self.called and node.id in ELEMENT_FUNCTIONS
            if not called and node.id not in self.uniform | self.element:
                self.fail(node, f"the name {node.id!r} is not a parameter or an earlier assignment of the rule")
        elif isinstance(node, ast.Compare):
            if any(type(op) not in COMPARE for op in node.ops):
                self.fail(node, f"comparison {ast.unparse(node)!r}")
        elif isinstance(node, ast.BoolOp):
            if id(node) not in self.conditions:  # in Python its value is one of the operands, on tensors it is not
                self.fail(node, f"the value of {ast.unparse(node)!r}; 'and' and 'or' only stand in conditions")
        elif isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Invert):
                self.fail(node, f"operator in {ast.unparse(node)!r}; use - or 'not'")
        elif not isinstance(
            node, ast.IfExp | ast.operator | ast.unaryop | ast.cmpop | ast.boolop | ast.expr_context
        ):  # fmt: skip
            self.fail(
                node, f"{ast.unparse(node)!r}: use arithmetic, comparisons, 'a if c else b' and the known functions"
            )

    def _check_binding(self, node: ast.AST, name: str) -> None:
        """A name that is called must stand for the function that it is translated to."""
        if name not in (binding.name for binding, _ in self.program.calls):
            binding = Binding(self.function, name)
            if not binding.holds():
                self.fail(node, binding.complaint())
            self.program.calls.append((binding, self._place(node)))

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        raise RuleError(f"{self._place(node)}: cannot translate this rule: {why}")

    def _place(self, node: ast.AST) -> str:
        return f"{self.file}:{self.first + getattr(node, 'lineno', 1) - 1}"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The operands of ``node`` of which only the truth counts."""
    if isinstance(node, ast.IfExp):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _copy_shallow(node: ast.expr) -> ast.expr:
    return type(node)(**dict(ast.iter_fields(node)))


def copy_of(node: ast.expr) -> ast.expr:
    """A copy of an expression that may be changed without changing the original."""
    return ast.parse(ast.unparse(node), mode="eval").body
