"""From one Python function to a CUDA functor, a Numba loop body and a float64 reference.

A rule is written on scalars.  Its positional parameters are elements of tensors, its keyword-only parameters are
hyperparameters.  Whatever depends on hyperparameters alone is *uniform*: it is hoisted out of the kernel and computed
once per step on the host, in double, so ``(1 - beta2) * grad`` rounds to float32 once, as torch's kernels do.

This module reads syntax trees and writes text.  It touches no memory and imports no compiler.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

#: Functions a rule may call on elements: name -> number of arguments.
ELEMENT_FUNCTIONS = {"sqrt": 1, "abs": 1, "sign": 1, "exp": 1, "log": 1, "min": 2, "max": 2, "fma": 3}

#: What C++ takes for a keyword or a macro, and Python does not.
_CPP_WORDS = frozenset(
    "alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl const "
    "const_cast constexpr decltype default delete do double dynamic_cast enum explicit export extern false float "
    "friend goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq private protected "
    "public register reinterpret_cast short signed sizeof static static_assert static_cast struct switch template "
    "this thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t xor "
    "xor_eq INFINITY NAN NULL".split()  # noqa: SIM905
)
#: Names the generated CUDA or Python text needs for itself.
_OWN_WORDS = {"in", "u", "out", "S", "range", *ELEMENT_FUNCTIONS, *(f"element_{f}" for f in ELEMENT_FUNCTIONS)}

_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


class RuleError(TypeError):
    """A rule that cannot be translated; the message names the file, the line and what to write instead."""


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
    tree: ast.FunctionDef | None = None

    @property
    def functor(self) -> str:
        """Its name in CUDA C++, where a rule may be called ``load`` or ``double``, too."""
        return f"rule_{self.name}"


def analyse(function: Callable[..., Any]) -> Program:
    """Read ``function`` and split it into what the host computes once and what the kernel computes per element.

    Raises:
        RuleError: the source is not available, or a statement or expression cannot be translated.
    """
    return _Analysis(function).program


def host_function(program: Program) -> Callable[..., list[float]]:
    """The per-step function of a program: hyperparameters as keywords → the uniforms, as Python floats."""
    values = ast.List([ast.Call(ast.Name("float", ast.Load()), [u], []) for u in program.uniforms], ast.Load())
    arguments = ast.arguments([], [], None, [ast.arg(s) for s in program.scalars], [None] * len(program.scalars), None, [])
    definition = ast.FunctionDef(
        "host", arguments, [*program.host, ast.Return(values)], [], None, None, type_params=[]
    )
    function: Callable[..., list[float]] = _define(definition, dict(_HOST_FUNCTIONS))
    return function


def reference_function(program: Program, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The rule itself, with every operation that scalars and tensors do differently taken from ``functions``.

    ``functions`` holds ELEMENT_FUNCTIONS and ``where``.
    """
    assert program.tree is not None
    tree = _Vectorise().visit(ast.parse(ast.unparse(program.tree)).body[0])
    tree.decorator_list = []
    function: Callable[..., Any] = _define(tree, dict(functions))
    return function


def cuda_functor(program: Program) -> str:
    """CUDA C++ text of the program: a struct with ``apply(in, u, out)`` on elements of type S."""
    emit = _CudaExpression()
    lines = [f"S {name} = in[{i}];" for i, name in enumerate(program.inputs) if i in program.reads]
    lines += [f"const S u{i} = u[{i}];  // {ast.unparse(e)}" for i, e in enumerate(program.uniforms)]
    known = {program.inputs[i] for i in program.reads}
    for name, value in program.body:
        lines.append(f"{'' if name in known else 'S '}{name} = {emit.visit(value)};")
        known.add(name)
    lines += [f"out[{i}] = {emit.visit(value)};" for i, value in enumerate(program.returns)]
    reads = sum(1 << i for i in program.reads)
    writes = sum(1 << i for i in program.writes)
    slots = ", ".join(str(_slot(program.writes, i)) for i in range(len(program.inputs)))
    return (
        f"struct {program.functor} {{\n"
        f"    static constexpr int lists = {len(program.inputs)}, uniforms = {len(program.uniforms)}, "
        f"outputs = {len(program.returns)};\n"
        f"    static constexpr unsigned reads = {reads:#x}, writes = {writes:#x};\n"
        f"    static __host__ __device__ constexpr int output_of(int list) {{\n"
        f"        constexpr int slot[] = {{{slots}}};\n        return slot[list];\n    }}\n"
        f"    template <class S> static __device__ void apply(const S* in, const S* u, S* out) {{\n"
        + textwrap.indent("\n".join(lines), " " * 8)
        + "\n    }\n};\n"
    )


def numba_lines(program: Program, load: Sequence[str], store: Sequence[str]) -> list[str]:
    """Python statements for one element.  ``load[i]`` reads list i, ``store[i]`` is a template with ``{}`` for the value."""
    emit = _NumbaExpression()
    lines = [f"{name} = {load[i]}" for i, name in enumerate(program.inputs) if i in program.reads]
    lines += [f"{name} = {ast.unparse(emit.visit(_copy(value)))}" for name, value in program.body]
    # All values are computed before the first store: a returned expression may read an input that another overwrites.
    lines += [f"_out{i} = {ast.unparse(emit.visit(_copy(value)))}" for i, value in enumerate(program.returns)]
    lines += [store[target].format(f"_out{i}") for i, target in enumerate(program.writes)]
    return lines


def _slot(writes: Sequence[int], index: int) -> int:
    return writes.index(index) if index in writes else -1


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _define(definition: ast.FunctionDef, namespace: dict[str, Any]) -> Any:
    module = ast.fix_missing_locations(ast.Module([definition], []))
    exec(compile(module, f"<rule {definition.name}>", "exec"), namespace)
    return namespace[definition.name]


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


def _fma(a: float, b: float, c: float) -> float:
    return a * b + c


_HOST_FUNCTIONS: dict[str, Any] = {
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "abs": abs, "min": min, "max": max, "sign": _sign, "fma": _fma,
    "float": float,
}  # fmt: skip


class _Analysis:
    """One pass over the function; ``uniform`` holds the names that depend on hyperparameters alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.file = inspect.getsourcefile(function) or "<unknown>"
        try:
            source, self.first = inspect.getsourcelines(function)
        except (OSError, TypeError) as error:
            raise RuleError(
                f"rule {function.__name__!r}: its source cannot be read ({error}); define it in a file or a notebook cell"
            ) from error
        tree = ast.parse(textwrap.dedent("".join(source))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise RuleError(f"rule {function!r}: a rule is a plain function written with def")
        self.program = self._signature(tree, function)
        self.uniform = set(self.program.scalars)
        self.element = set(self.program.inputs)
        self.called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        self.conditions = {id(c) for n in ast.walk(tree) for c in _conditions(n)}
        self.read: set[str] = set()
        self.assigned: set[str] = set()
        self._statements(tree)

    def _signature(self, tree: ast.FunctionDef, function: Callable[..., Any]) -> Program:
        a = tree.args
        if a.vararg or a.kwarg or a.posonlyargs or a.defaults:
            self.fail(tree, "tensors are plain positional parameters, hyperparameters follow after '*'")
        if not a.args:
            self.fail(tree, "a rule needs at least one tensor parameter")
        for arg in (*a.args, *a.kwonlyargs):
            self._check_name(arg, arg.arg)
        defaults = dict(function.__kwdefaults__ or {})
        for arg in a.kwonlyargs:
            if not isinstance(defaults.get(arg.arg, 0), int | float):
                self.fail(arg, f"the default of {arg.arg!r} is {defaults[arg.arg]!r}, not a number")
        return Program(
            tree.name, tuple(x.arg for x in a.args), tuple(x.arg for x in a.kwonlyargs), defaults, tree=tree
        )

    def _statements(self, tree: ast.FunctionDef) -> None:
        *statements, last = tree.body
        for position, statement in enumerate(statements):
            if position == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # docstring
            self._assignment(statement)
        if not isinstance(last, ast.Return) or last.value is None:
            self.fail(last, "a rule ends with 'return' of the new values")
        self._return(last)
        program = self.program
        if max(len(program.inputs) * 2, len(program.uniforms)) > 32:  # a warp fetches a row and a set in one go
            self.fail(tree, f"{len(program.inputs)} tensors and {len(program.uniforms)} hyperparameter expressions; the "
                      "limits are 15 (out-of-place results included) and 32")

    def _assignment(self, statement: ast.stmt) -> None:
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
        if self._is_uniform(value):
            if name in self.element:
                self.fail(statement, f"{name!r} varies per element and cannot become a hyperparameter; use a new name")
            if name in self.uniform:
                self.fail(statement, f"{name!r} is already a hyperparameter; use a new name")
            self._check(value)
            self.program.host.append(ast.Assign([ast.Name(name, ast.Store())], _copy(value)))
            self.uniform.add(name)
        else:
            translated = self._element(value)
            if name in self.uniform:
                self.fail(statement, f"{name!r} is a hyperparameter and cannot vary per element; use a new name")
            self.program.body.append((name, translated))
            self.element.add(name)
            self.assigned.add(name)

    def _return(self, statement: ast.Return) -> None:
        program, value = self.program, statement.value
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
            square = isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in (2, 3)
            on_host = isinstance(node.op, ast.Pow | ast.Mod | ast.FloorDiv) and self._is_uniform(node)
            if type(node.op) not in _BINARY and not square and not on_host:
                self.fail(node, f"operator in {ast.unparse(node)!r}; use + - * / or the powers 2 and 3")
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            if name not in ELEMENT_FUNCTIONS or node.keywords or len(node.args) != ELEMENT_FUNCTIONS[name]:
                known = ", ".join(f"{f}/{n}" for f, n in ELEMENT_FUNCTIONS.items())
                self.fail(node, f"call {ast.unparse(node)!r}; a rule may call (name/arguments) {known}")
        elif isinstance(node, ast.Name):
            called = id(node) in self.called and node.id in ELEMENT_FUNCTIONS
            if not called and node.id not in self.uniform | self.element:
                self.fail(node, f"the name {node.id!r} is not a parameter or an earlier assignment of the rule")
        elif isinstance(node, ast.Compare):
            if any(type(op) not in _COMPARE for op in node.ops):
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
            self.fail(node, f"{ast.unparse(node)!r}: use arithmetic, comparisons, 'a if c else b' and the known functions")

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        line = self.first + getattr(node, "lineno", 1) - 1
        raise RuleError(f"{self.file}:{line}: cannot translate this rule: {why}")


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The operands of ``node`` of which only the truth counts."""
    if isinstance(node, ast.IfExp):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _copy_shallow(node: ast.expr) -> ast.expr:
    return type(node)(**dict(ast.iter_fields(node)))


class _CudaExpression(ast.NodeVisitor):
    """Syntax → CUDA C++ text; every element has the arithmetic type S."""

    def visit_Constant(self, node: ast.Constant) -> str:
        value = float(node.value)  # type: ignore[arg-type]
        if math.isinf(value):
            return f"S({'-' if value < 0 else ''}INFINITY)"
        return f"S({value!r})"

    def visit_Name(self, node: ast.Name) -> str:
        return node.id

    def visit_BinOp(self, node: ast.BinOp) -> str:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Pow):
            power = int(node.right.value)  # type: ignore[attr-defined]
            return "(" + " * ".join([left] * power) + ")"
        return f"({left} {_BINARY[type(node.op)]} {right})"

    def visit_UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return f"S{self.condition(node)}"
        return f"(-{self.visit(node.operand)})" if isinstance(node.op, ast.USub) else self.visit(node.operand)

    def visit_Compare(self, node: ast.Compare) -> str:
        return f"S{self.condition(node)}"

    def visit_IfExp(self, node: ast.IfExp) -> str:
        return f"({self.condition(node.test)} ? {self.visit(node.body)} : {self.visit(node.orelse)})"

    def condition(self, node: ast.expr) -> str:
        """``node`` as a bool."""
        if isinstance(node, ast.Compare):
            terms = [self.visit(t) for t in (node.left, *node.comparators)]
            pairs = [f"{a} {_COMPARE[type(op)]} {b}" for a, op, b in zip(terms, node.ops, terms[1:], strict=False)]
            return "(" + " && ".join(pairs) + ")"
        if isinstance(node, ast.BoolOp):
            sign = " && " if isinstance(node.op, ast.And) else " || "
            return "(" + sign.join(self.condition(v) for v in node.values) + ")"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"(!{self.condition(node.operand)})"
        return f"({self.visit(node)} != S(0))"

    def visit_Call(self, node: ast.Call) -> str:
        return f"element_{node.func.id}<S>({', '.join(self.visit(a) for a in node.args)})"  # type: ignore[attr-defined]


class _NumbaExpression(ast.NodeTransformer):
    """Literals take the arithmetic type (Numba would widen float32 to float64), functions their element versions."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Call(ast.Name("S", ast.Load()), [ast.Constant(float(node.value))], [])  # type: ignore[arg-type]

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if not isinstance(node.op, ast.Pow):
            return self.generic_visit(node)  # type: ignore[return-value]
        left = self.visit(node.left)
        product = ast.BinOp(left, ast.Mult(), left)
        return product if node.right.value == 2 else ast.BinOp(product, ast.Mult(), left)  # type: ignore[attr-defined]

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        return ast.Call(ast.Name("S", ast.Load()), [self.condition(node)], [])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return ast.Call(ast.Name("S", ast.Load()), [self.condition(node)], [])
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return ast.IfExp(self.condition(node.test), self.visit(node.body), self.visit(node.orelse))

    def condition(self, node: ast.expr) -> ast.expr:
        """``node`` as a bool."""
        if isinstance(node, ast.Compare):
            return self.generic_visit(node)  # type: ignore[return-value]
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self.condition(v) for v in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self.condition(node.operand))
        zero = ast.Call(ast.Name("S", ast.Load()), [ast.Constant(0.0)], [])
        return ast.Compare(self.visit(node), [ast.NotEq()], [zero])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = f"element_{node.func.id}"  # type: ignore[attr-defined]
        call = ast.Call(ast.Name(name, ast.Load()), [self.visit(a) for a in node.args], [])
        return ast.Call(ast.Name("S", ast.Load()), [call], [])


class _Vectorise(ast.NodeTransformer):
    """What is a choice on scalars is a selection on tensors."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return ast.Call(ast.Name("where", ast.Load()), [node.test, node.body, node.orelse], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return self._fold("logical_and" if isinstance(node.op, ast.And) else "logical_or", node.values)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        terms = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            ast.Compare(a, [op], [b]) for a, op, b in zip(terms, node.ops, terms[1:], strict=False)
        ]
        return self._fold("logical_and", pairs)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return ast.Call(ast.Name("logical_not", ast.Load()), [node.operand], [])
        return node

    @staticmethod
    def _fold(name: str, values: list[ast.expr]) -> ast.expr:
        result = values[0]
        for value in values[1:]:
            result = ast.Call(ast.Name(name, ast.Load()), [result, value], [])
        return result
