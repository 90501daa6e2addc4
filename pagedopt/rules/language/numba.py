"""Generates Python for Numba: the statements in the CPU kernel's loop over elements."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .functions import FUNCTIONS
from .parse import Program, call, copy_of


def numba_lines(program: Program, load: Sequence[str], store: Sequence[str]) -> list[str]:
    """Return statements for one element; ``load[i]`` reads list i, ``store[i]`` stores the value put for its ``{}``."""
    emit = _NumbaExpression()
    lines = [f"{name} = {load[i]}" for i, name in enumerate(program.inputs) if i in program.reads]
    lines += [f"{name} = {ast.unparse(emit.visit(copy_of(value)))}" for name, value in program.body]
    # Compute all values before the first store: a returned expression may read an input that another one overwrites.
    lines += [f"_out{i} = {ast.unparse(emit.visit(copy_of(value)))}" for i, value in enumerate(program.returns)]
    lines += [store[target].format(f"_out{i}") for i, target in enumerate(program.writes)]
    return lines


class _NumbaExpression(ast.NodeTransformer):
    """Casts literals to the arithmetic type S, as Numba would widen float32 to float64; renames called functions."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return call("S", ast.Constant(float(node.value)))  # type: ignore[arg-type]

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if not isinstance(node.op, ast.Pow):
            return self.generic_visit(node)  # type: ignore[return-value]
        left = self.visit(node.left)
        product = ast.BinOp(left, ast.Mult(), left)
        return product if node.right.value == 2 else ast.BinOp(product, ast.Mult(), left)  # type: ignore[attr-defined]

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        return call("S", self.condition(node))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return call("S", self.condition(node))
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return ast.IfExp(self.condition(node.test), self.visit(node.body), self.visit(node.orelse))

    def condition(self, node: ast.expr) -> ast.expr:
        """Return ``node`` as a bool expression."""
        if isinstance(node, ast.Compare):
            return self.generic_visit(node)  # type: ignore[return-value]
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, [self.condition(v) for v in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self.condition(node.operand))
        return ast.Compare(self.visit(node), [ast.NotEq()], [call("S", ast.Constant(0.0))])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = FUNCTIONS[node.func.id].numba  # type: ignore[attr-defined]
        return call("S", call(name, *map(self.visit, node.args)))
