"""Generates CUDA C++: the functor that the multi-tensor kernel calls for each element."""

from __future__ import annotations

import ast
import math
import textwrap

from .functions import FUNCTIONS
from .parse import ARITHMETIC, COMPARE, Program


def cuda_functor(program: Program) -> str:
    """Return CUDA C++ text: a struct with ``apply(in, u, out)`` on elements of type S."""
    emit = CudaExpression()
    lines = [f"S {name} = in[{i}];" for i, name in enumerate(program.inputs) if i in program.reads]
    lines += [f"const S u{i} = u[{i}];  // {ast.unparse(e)}" for i, e in enumerate(program.uniforms)]
    known = {program.inputs[i] for i in program.reads}
    for name, value in program.body:
        lines.append(f"{'' if name in known else 'S '}{name} = {emit.visit(value)};")
        known.add(name)
    lines += [f"out[{i}] = {emit.visit(value)};" for i, value in enumerate(program.returns)]
    reads = sum(1 << i for i in program.reads)
    writes = sum(1 << i for i in program.writes)
    outputs = ", ".join(str(program.writes.index(i) if i in program.writes else -1) for i in range(len(program.inputs)))
    return (
        f"struct {program.functor} {{\n"
        f"    static constexpr int lists = {len(program.inputs)}, uniforms = {len(program.uniforms)}, "
        f"outputs = {len(program.returns)};\n"
        f"    static constexpr unsigned reads = {reads:#x}, writes = {writes:#x};\n"
        f"    static __host__ __device__ constexpr int output_of(int list) {{\n"
        f"        constexpr int slot[] = {{{outputs}}};\n        return slot[list];\n    }}\n"
        f"    template <class S> static __device__ void apply(const S* in, const S* u, S* out) {{\n"
        + textwrap.indent("\n".join(lines), " " * 8)
        + "\n    }\n};\n"
    )


class CudaExpression(ast.NodeVisitor):
    """Turns an expression into CUDA C++ text; every value has the arithmetic type S."""

    def visit_Constant(self, node: ast.Constant) -> str:
        value = float(node.value)  # type: ignore[arg-type]
        if math.isinf(value):  # NVRTC knows no INFINITY
            return f"S({'-' if value < 0 else ''}1.0 / 0.0)"
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
        """Return ``node`` as a bool expression."""
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
        function = FUNCTIONS[node.func.id]  # type: ignore[attr-defined]
        return f"{function.cuda}<S>({', '.join(self.visit(a) for a in node.args)})"
