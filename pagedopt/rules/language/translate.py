"""From an analysed rule to text and functions: CUDA functor, lines of a Numba loop, the host's part, reference."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from .functions import KNOWN
from .parse import ARITHMETIC, COMPARE, Program, copy_of


def host_function(program: Program) -> Callable[..., list[float]]:
    """The per-step function of a program: hyperparameters as keywords → the uniforms, as Python floats."""
    lines = [
        f"def host(*, {', '.join(program.scalars)}):" if program.scalars else "def host():",
        *(f"    {ast.unparse(ast.fix_missing_locations(s))}" for s in program.host),
        f"    return [{', '.join(f'float({ast.unparse(u)})' for u in program.uniforms)}]",
    ]
    function: Callable[..., list[float]] = _define("\n".join(lines), "host", dict(_HOST_FUNCTIONS))
    return function


def reference_function(program: Program, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The rule itself, with every operation that scalars and tensors do differently taken from ``functions``.

    ``functions`` holds ELEMENT_FUNCTIONS, ``_where``, the logical functions, ``_number`` (of a truth) and ``_filled``
    (with one value for all elements).
    """
    assert program.tree is not None
    tree = _Vectorise().visit(ast.parse(ast.unparse(program.tree)).body[0])
    for position in program.filled:
        statement = tree.body[position]
        like = ast.Name(statement.targets[0].id, ast.Load())
        statement.value = ast.Call(ast.Name("_filled", ast.Load()), [statement.value, like], [])
    tree.decorator_list = []
    function: Callable[..., Any] = _define(ast.unparse(ast.fix_missing_locations(tree)), program.name, dict(functions))
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
    """Python statements for one element; ``load[i]`` reads list i, ``store[i]`` stores what stands for its ``{}``."""
    emit = _NumbaExpression()
    lines = [f"{name} = {load[i]}" for i, name in enumerate(program.inputs) if i in program.reads]
    lines += [f"{name} = {ast.unparse(emit.visit(copy_of(value)))}" for name, value in program.body]
    # All values are computed before the first store: a returned expression may read an input that another overwrites.
    lines += [f"_out{i} = {ast.unparse(emit.visit(copy_of(value)))}" for i, value in enumerate(program.returns)]
    lines += [store[target].format(f"_out{i}") for i, target in enumerate(program.writes)]
    return lines


def _slot(writes: Sequence[int], index: int) -> int:
    return writes.index(index) if index in writes else -1


def _define(text: str, name: str, namespace: dict[str, Any]) -> Any:
    exec(compile(text, f"<rule {name}>", "exec"), namespace)
    return namespace[name]


_HOST_FUNCTIONS: dict[str, Any] = {**{name: function for name, (function, _) in KNOWN.items()}, "float": float}


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
        return f"({left} {ARITHMETIC[type(node.op)]} {right})"

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
            pairs = [f"{a} {COMPARE[type(op)]} {b}" for a, op, b in zip(terms, node.ops, terms[1:], strict=False)]
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
        return ast.Call(ast.Name("_where", ast.Load()), [node.test, node.body, node.orelse], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return self._fold("_logical_and" if isinstance(node.op, ast.And) else "_logical_or", node.values)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        terms = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            ast.Compare(a, [op], [b]) for a, op, b in zip(terms, node.ops, terms[1:], strict=False)
        ]
        return ast.Call(ast.Name("_number", ast.Load()), [self._fold("_logical_and", pairs), *terms], [])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            truth = ast.Call(ast.Name("_logical_not", ast.Load()), [node.operand], [])
            return ast.Call(ast.Name("_number", ast.Load()), [truth, node.operand], [])
        return node

    @staticmethod
    def _fold(name: str, values: list[ast.expr]) -> ast.expr:
        result = values[0]
        for value in values[1:]:
            result = ast.Call(ast.Name(name, ast.Load()), [result, value], [])
        return result
