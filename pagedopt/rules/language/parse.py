"""Splits the syntax tree of a rule into what the host computes once and what a kernel computes per element.

A rule is written on scalars.  Its positional parameters are elements of tensors, its keyword-only parameters are
hyperparameters.  Whatever depends on hyperparameters alone is *uniform*: it is hoisted out of the kernel and computed
once per step on the host, in double, so ``(1 - beta2) * grad`` rounds to float32 once, as in torch's default.
``cuda``, ``numba``, ``reference`` and ``host_expressions`` generate code from the :class:`Program` made here.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NoReturn

from . import instead
from .function_syntax import refuse, source_of
from .functions import FUNCTIONS
from .inline import InlinedRule, check_name
from .names import Dependencies

ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


@dataclass
class Program:
    """A rule after analysis: host part and element part, as syntax trees.

    Attributes:
        inputs: names of the element parameters, in order.
        scalars: names of the hyperparameters; ``defaults`` holds those that have a default.
        changes: for each returned value, the index of the input whose new value it is.
        writes: for each returned value, the index of the list it is stored to; in place, that input's own.
        statements: (name, expression) of all statements, unsplit.
        values: the expressions returned for the inputs in ``changes``, unsplit.
        filled: indices of the statements that assign one value to all elements.
        host: statements of hyperparameters only, run once per step in double.
        uniforms: expressions of ``host`` whose values the kernel receives, in order.
        carried: hyperparameters that the rule returns: name → index of the new value in ``uniforms``.
        body: element statements, with uniform expressions replaced by the names ``u0, u1, …``.
        returns: the expressions in ``values``, with the same replacement.
        reads: indices of the inputs whose values it uses.
        dependencies: what must not change for this translation to stay valid.
    """

    name: str
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    defaults: dict[str, float]
    changes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    statements: list[tuple[str, ast.expr]] = field(default_factory=list)
    values: list[ast.expr] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)
    host: list[tuple[str, ast.expr]] = field(default_factory=list)
    uniforms: list[ast.expr] = field(default_factory=list)
    carried: dict[str, int] = field(default_factory=dict)
    body: list[tuple[str, ast.expr]] = field(default_factory=list)
    returns: list[ast.expr] = field(default_factory=list)
    reads: frozenset[int] = frozenset()
    dependencies: Dependencies = field(default_factory=Dependencies)

    @property
    def functor(self) -> str:
        """The struct's name in CUDA C++, where the name of a rule, such as ``double``, may be reserved."""
        return f"rule_{self.name}"

    @property
    def prologue(self) -> str:
        """The struct's name of the part that depends on hyperparameters alone."""
        return f"prologue_{self.name}"

    def out_of_place(self) -> Program:
        """Return the program with one more list per result, after its inputs; results are stored there."""
        inputs = (*self.inputs, *(f"out_{self.inputs[i]}" for i in self.changes))
        return replace(self, name=f"{self.name}_out", inputs=inputs, writes=tuple(range(len(self.inputs), len(inputs))))


def analyse(function: Callable[..., Any]) -> Program:
    """Translate ``function``; raise RuleError if its source, a statement or a called name does not allow that."""
    tree = source_of(function)
    assert isinstance(function, FunctionType)
    program = _signature(tree, function)
    inlined = InlinedRule(function, tree)
    _Analysis(function, program, inlined)
    inlined.check_texts()
    return program


def _signature(tree: ast.FunctionDef, function: FunctionType) -> Program:
    a = tree.args
    if a.vararg or a.kwarg or a.posonlyargs or a.defaults:
        refuse(tree, "tensors are plain positional parameters, hyperparameters follow after '*'")
    if not a.args:
        refuse(tree, "a rule needs at least one tensor parameter")
    if len(a.args) > 16:  # the kernel has a mask of 32 bits; out of place, each result is one more list
        refuse(tree, f"{len(a.args)} tensor parameters; there may be 16")
    for arg in (*a.args, *a.kwonlyargs):
        check_name(arg, arg.arg)
    defaults = dict(function.__kwdefaults__ or {})
    for arg in a.kwonlyargs:
        if not isinstance(defaults.get(arg.arg, 0), int | float):
            refuse(arg, f"the default of {arg.arg!r} is {defaults[arg.arg]!r}, not a number")
    return Program(tree.name, tuple(x.arg for x in a.args), tuple(x.arg for x in a.kwonlyargs), defaults)


#: Nodes that are always allowed: choices, calls (checked when they were inlined), and parts of other nodes.
_NOTHING_TO_CHECK = ast.IfExp | ast.Call | ast.operator | ast.unaryop | ast.cmpop | ast.boolop | ast.expr_context


class _Analysis:
    """One pass over a rule's statements; ``uniform`` holds the names that depend on hyperparameters alone."""

    def __init__(self, function: FunctionType, program: Program, inlined: InlinedRule) -> None:
        self.function = function
        self.program = program
        self.within: ast.AST = inlined.tree
        self.uniform = set(program.scalars)
        self.element = set(program.inputs)
        expressions = [*(value for _, value, _ in inlined.statements), *inlined.values]
        nodes = [node for expression in expressions for node in ast.walk(expression)]
        self.called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
        self.conditions = {id(c) for n in nodes for c in _conditions(n)}
        self.read: set[str] = set()
        self.assigned: set[str] = set()
        program.dependencies = inlined.dependencies
        program.statements = [(name, value) for name, value, _ in inlined.statements]
        for position, (name, value, statement) in enumerate(inlined.statements):
            self.within = statement
            self._assignment(position, name, value)
        self.within = inlined.tree.body[-1]
        self._return(inlined)

    def _assignment(self, position: int, name: str, value: ast.expr) -> None:
        if self._is_uniform(value) and name not in self.element:
            if name in self.uniform:
                self.fail(self.within, f"{name!r} is already a hyperparameter; use a new name")
            self._check(value)
            self.program.host.append((name, value))
            self.uniform.add(name)
        else:
            translated = self._element(value)
            if name in self.uniform:
                self.fail(self.within, f"{name!r} is a hyperparameter and cannot vary per element; use a new name")
            if self._is_uniform(value):
                self.program.filled.add(position)
            self.program.body.append((name, translated))
            self.element.add(name)
            self.assigned.add(name)

    def _return(self, inlined: InlinedRule) -> None:
        program = self.program
        statement = inlined.tree.body[-1]
        assert isinstance(statement, ast.Return)
        assert statement.value is not None
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
        names = [v.id if isinstance(v, ast.Name) else None for v in values]
        if len(values) == 1 and names[0] not in program.inputs:
            program.changes = (0,)  # 'return x + y' overwrites the first tensor
        else:
            for v, name in zip(values, names, strict=True):
                if name not in program.inputs + inlined.carried:
                    said = f"returns {ast.unparse(v)!r}"
                    self.fail(statement, f"{said}; return the parameters that change, by name, assigned before")
            program.changes = tuple(program.inputs.index(name) for name in names if name in program.inputs)
        if len(names) > 1 and len(set(names)) != len(names):
            self.fail(statement, "returns one parameter twice")
        if not program.changes:
            self.fail(statement, "returns no tensor")
        program.writes = program.changes
        program.values = [v for v, name in zip(inlined.values, names, strict=True) if name not in inlined.carried]
        program.returns = [self._element(v) for v in program.values]
        program.reads = frozenset(i for i, name in enumerate(program.inputs) if name in self.read)
        for name in inlined.carried:
            self._carry(name, inlined)

    def _carry(self, name: str, inlined: InlinedRule) -> None:
        """Make the new value of a returned hyperparameter one of the uniforms."""
        if name == "step":
            self.fail(self.within, "returns 'step', which the optimizer counts")
        if name not in inlined.renewed:
            self.fail(self.within, f"returns the hyperparameter {name!r}, which it does not change")
        value = inlined.renewed[name]
        if not self._is_uniform(value):
            self.fail(value, f"{name!r} is one number for all elements; its new value must not depend on a tensor's")
        self.program.carried[name] = int(self._element(value).id[1:])  # type: ignore[attr-defined]

    def _is_uniform(self, node: ast.expr) -> bool:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - set(FUNCTIONS)
        return names <= self.uniform

    def _element(self, node: ast.expr) -> ast.expr:
        """Return ``node`` with each maximal uniform subexpression replaced by u0, u1, …"""
        if isinstance(node, ast.Constant):
            self._check(node)
            return node
        if self._is_uniform(node) and not _compares_with_zero(node):
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
        changed = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and name != "func":
                setattr(changed, name, self._element(value))
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                setattr(changed, name, [self._element(v) for v in value])
        return changed

    def _check(self, node: ast.expr, deep: bool = True) -> None:
        for n in ast.walk(node) if deep else [node]:
            self._check_one(n)

    def _check_one(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, int | float):
                self.fail(node, f"constant {node.value!r} is not a number")
        elif isinstance(node, ast.BinOp):
            exponent = node.right.value if isinstance(node.right, ast.Constant) else None
            square = isinstance(node.op, ast.Pow) and exponent in (2, 3)
            on_host = isinstance(node.op, ast.Pow | ast.Mod | ast.FloorDiv) and self._is_uniform(node)
            if type(node.op) not in ARITHMETIC and not square and not on_host:
                self.fail(node, instead.of_operator(node))
        elif isinstance(node, ast.Name):
            # Calls of other functions than FUNCTIONS have been inlined.
            if id(node) not in self.called and node.id not in self.uniform | self.element:
                self.fail(node, instead.of_name(self.function, node.id, "rule"))
        elif isinstance(node, ast.Compare):
            if any(type(op) not in COMPARE for op in node.ops):
                self.fail(node, f"comparison {ast.unparse(node)!r}")
        elif isinstance(node, ast.BoolOp):
            if id(node) not in self.conditions:  # Python returns one of the operands, a kernel a truth value
                self.fail(node, f"the value of {ast.unparse(node)!r}; 'and' and 'or' only stand in conditions")
        elif isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Invert):
                self.fail(node, f"operator in {ast.unparse(node)!r}; use - or 'not'")
        elif not isinstance(node, _NOTHING_TO_CHECK):
            self.fail(node, instead.of_expression(node))

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        refuse(node, why, self.within)


def _compares_with_zero(node: ast.expr) -> bool:
    """Whether ``node`` compares hyperparameters with 0.  Rounded to float32, only what is below 1e-45 becomes 0."""
    if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
        return False
    zero = node.comparators[0]
    return isinstance(zero, ast.Constant) and zero.value == 0 and not isinstance(node.left, ast.Constant)


def _conditions(node: ast.AST) -> list[ast.expr]:
    """Return the operands of ``node`` that are used as truth values only."""
    if isinstance(node, ast.IfExp):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def copy_of(node: ast.expr) -> ast.expr:
    """Return a copy in which no node occurs twice, so that a NodeTransformer may change it."""
    return ast.parse(ast.unparse(node), mode="eval").body


def call(name: str, *arguments: ast.expr) -> ast.Call:
    """Return the syntax of ``name(*arguments)``."""
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def define(
    name: str, filename: str, lines: list[str], namespace: dict[str, Any], program: Program
) -> Callable[..., Any]:
    """Compile the function ``name`` that ``lines`` define, with the defaults of ``program``."""
    exec(compile("\n".join(lines), filename, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    function.__kwdefaults__ = dict(program.defaults)
    return function
