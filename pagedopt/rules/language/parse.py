"""What a rule says: its syntax tree, split into what the host computes once and what a kernel computes per element.

A rule is written on scalars.  Its positional parameters are elements of tensors, its keyword-only parameters are
hyperparameters.  Whatever depends on hyperparameters alone is *uniform*: it is hoisted out of the kernel and computed
once per step on the host, in double, so ``(1 - beta2) * grad`` rounds to float32 once, as torch's kernels do.

This module reads; ``cuda``, ``numba``, ``reference`` and ``host`` write.  None touches memory or imports a compiler.
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
from .inline import Line, check_name, straight_line
from .names import NameWatch

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
        changes: for each returned value, the index of the input whose new value it is.
        writes: for each returned value, the index of the list that takes it; in place, that input's own.
        statements: all of the rule's, unsplit: name and expression.
        values: what it returns for those inputs, unsplit.
        filled: which statements give one value to all elements.
        host: statements over hyperparameters only, run once per step in double.
        uniforms: expressions (over the host statements) the kernel receives, in order.
        carried: for each hyperparameter that it changes, which of these is the new value.
        body: element statements, with uniform expressions replaced by the names ``u0, u1, …``.
        returns: element expressions returned.
        reads: indices of the inputs whose values it uses.
        watch: what must stay as it is for this to be what the function computes.
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
    watch: NameWatch = field(default_factory=NameWatch)

    @property
    def functor(self) -> str:
        """Its name in CUDA C++, where a rule may be called ``load`` or ``double``, too."""
        return f"rule_{self.name}"

    def out_of_place(self) -> Program:
        """The same with one more list per result, behind its inputs, that takes the result instead."""
        count = len(self.inputs)
        outs = tuple(f"out_{self.inputs[i]}" for i in self.changes)
        writes = tuple(range(count, count + len(outs)))
        return replace(self, name=f"{self.name}_out", inputs=self.inputs + outs, writes=writes)


def analyse(function: Callable[..., Any]) -> Program:
    """Read ``function`` and split it into what the host computes once and what the kernel computes per element.

    Raises:
        RuleError: the source is not available, or a statement or expression cannot be translated, or a name it calls
            stands for another function.
    """
    tree = source_of(function)
    assert isinstance(function, FunctionType)
    program = _signature(tree, function)
    line = straight_line(function, tree)
    _Analysis(function, program, line)
    line.check_texts()
    return program


def _signature(tree: ast.FunctionDef, function: FunctionType) -> Program:
    a = tree.args
    if a.vararg or a.kwarg or a.posonlyargs or a.defaults:
        refuse(tree, "tensors are plain positional parameters, hyperparameters follow after '*'")
    if not a.args:
        refuse(tree, "a rule needs at least one tensor parameter")
    if len(a.args) > 16:  # the kernel keeps a mask of 32 bits, and results out of place are lists as well
        refuse(tree, f"{len(a.args)} tensor parameters; there may be 16")
    for arg in (*a.args, *a.kwonlyargs):
        check_name(arg, arg.arg)
    defaults = dict(function.__kwdefaults__ or {})
    for arg in a.kwonlyargs:
        if not isinstance(defaults.get(arg.arg, 0), int | float):
            refuse(arg, f"the default of {arg.arg!r} is {defaults[arg.arg]!r}, not a number")
    return Program(tree.name, tuple(x.arg for x in a.args), tuple(x.arg for x in a.kwonlyargs), defaults)


class _Analysis:
    """One pass over a rule's statements; ``uniform`` holds the names that depend on hyperparameters alone."""

    def __init__(self, function: FunctionType, program: Program, line: Line) -> None:
        self.function = function
        self.program = program
        self.within: ast.AST = line.tree
        self.uniform = set(program.scalars)
        self.element = set(program.inputs)
        expressions = [*(value for _, value, _ in line.statements), *line.values]
        nodes = [node for expression in expressions for node in ast.walk(expression)]
        self.called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
        self.conditions = {id(c) for n in nodes for c in _conditions(n)}
        self.read: set[str] = set()
        self.assigned: set[str] = set()
        program.watch = line.watch
        program.statements = [(name, value) for name, value, _ in line.statements]
        for position, (name, value, statement) in enumerate(line.statements):
            self.within = statement
            self._assignment(position, name, value)
        self.within = line.tree.body[-1]
        self._return(line)

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

    def _return(self, line: Line) -> None:
        program = self.program
        statement = line.tree.body[-1]
        assert isinstance(statement, ast.Return)
        assert statement.value is not None
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
        names = [v.id if isinstance(v, ast.Name) else None for v in values]
        if len(values) == 1 and names[0] not in program.inputs:
            program.changes = (0,)  # 'return x + y' overwrites the first tensor
        else:
            for v, name in zip(values, names, strict=True):
                if name not in program.inputs + line.carried:
                    self.fail(
                        statement,
                        f"returns {ast.unparse(v)!r}; return the parameters that change, by name, assigned before",
                    )
            program.changes = tuple(program.inputs.index(name) for name in names if name in program.inputs)
        if len(names) > 1 and len(set(names)) != len(names):
            self.fail(statement, "returns one parameter twice")
        if not program.changes:
            self.fail(statement, "returns no tensor")
        program.writes = program.changes
        program.values = [v for v, name in zip(line.values, names, strict=True) if name not in line.carried]
        program.returns = [self._element(v) for v in program.values]
        program.reads = frozenset(i for i, name in enumerate(program.inputs) if name in self.read)
        for name in line.carried:
            self._carry(name, line)

    def _carry(self, name: str, line: Line) -> None:
        """A hyperparameter that the rule returns: its new value is computed with the uniforms, and is one of them."""
        if name == "step":
            self.fail(self.within, "returns 'step', which the optimizer counts")
        if name not in line.renewed:
            self.fail(self.within, f"returns the hyperparameter {name!r}, which it does not change")
        value = line.renewed[name]
        if not self._is_uniform(value):
            self.fail(value, f"{name!r} is one number for all elements; its new value must not depend on a tensor's")
        self.program.carried[name] = int(self._element(value).id[1:])  # type: ignore[attr-defined]

    def _is_uniform(self, node: ast.expr) -> bool:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - set(FUNCTIONS)
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
            square = (
                isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in (2, 3)
            )
            on_host = isinstance(node.op, ast.Pow | ast.Mod | ast.FloorDiv) and self._is_uniform(node)
            if type(node.op) not in ARITHMETIC and not square and not on_host:
                self.fail(node, instead.of_operator(node))
        elif isinstance(node, ast.Name):
            # No other call than those of FUNCTIONS is left.
            if id(node) not in self.called and node.id not in self.uniform | self.element:
                self.fail(node, instead.of_name(self.function, node.id, "rule"))
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
            node, ast.IfExp | ast.Call | ast.operator | ast.unaryop | ast.cmpop | ast.boolop | ast.expr_context
        ):  # fmt: skip
            self.fail(node, instead.of_expression(node))

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        refuse(node, why, self.within)


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The operands of ``node`` of which only the truth counts."""
    if isinstance(node, ast.IfExp):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def copy_of(node: ast.expr) -> ast.expr:
    """A copy of an expression that may be changed without changing the original."""
    return ast.parse(ast.unparse(node), mode="eval").body
