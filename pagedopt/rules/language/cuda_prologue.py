"""Generates CUDA C++: the part of a rule that depends on hyperparameters alone, for a device to compute in double."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Iterable

from .cuda import CudaExpression
from .functions import FUNCTIONS
from .parse import Program

#: Operators that are functions in ``kernels/prologue.cu``.
_OPERATORS: dict[type[ast.operator], str] = {ast.Pow: "power", ast.Mod: "modulo", ast.FloorDiv: "floor_divide"}


def cuda_prologue(program: Program) -> str:
    """Return CUDA C++ text: a struct whose ``compute(in, u)`` makes the uniforms of hyperparameters.

    ``in`` holds the hyperparameters in the order of ``program.scalars``, ``u`` takes the numbers of
    :meth:`Rule.uniforms`.  Both are doubles.  Arithmetic is that of Python's floats, with these differences:

    * Where Python raises, the result is infinity or NaN: a division by zero, ``log(0)``, an overflow; the root of a
      negative number is NaN.
    * An int that depends on a hyperparameter (the truth of a comparison is one) is a double, exact up to 2**53.
    * Where a value is an int in one case and a float in another, a zero may have another sign: ``-max(0, lr)`` is -0.0
      for a negative ``lr``, in Python 0.

    On a GPU ``**``, ``exp`` and ``log`` may differ from Python's in the last bit.
    """
    emit = _PrologueExpression()
    lines = ["typedef double S;"]
    lines += [f"const S {_cpp(name)} = in[{i}];" for i, name in enumerate(program.scalars)]
    for name, value in program.host:
        lines.append(f"const S {_cpp(name)} = {emit.visit(value)};")
        if emit.is_int(value):
            emit.ints.add(name)
    lines += [f"u[{i}] = {emit.visit(value)};" for i, value in enumerate(program.uniforms)]
    step_at = program.scalars.index("step") if "step" in program.scalars else -1
    return (
        f"struct {program.prologue} {{\n"
        f"    static constexpr int scalars = {len(program.scalars)}, uniforms = {len(program.uniforms)}, "
        f"step_at = {step_at}, carried = {len(program.carried)};\n"
        + _constants("carried_scalar", map(program.scalars.index, program.carried))
        + _constants("carried_uniform", program.carried.values())
        + "    static __device__ void compute(const double* in, double* u) {\n"
        + textwrap.indent("\n".join(lines), " " * 8)
        + "\n    }\n};\n"
    )


def _constants(name: str, values: Iterable[int]) -> str:
    """Return the text of a function of k that gives value k."""
    listed = ", ".join(map(str, values)) or "-1"  # C++ has no empty arrays
    return (
        f"    static __host__ __device__ constexpr int {name}(int k) {{\n"
        f"        constexpr int at[] = {{{listed}}};\n        return at[k];\n    }}\n"
    )


class _PrologueExpression(CudaExpression):
    """Turns an expression of hyperparameters into CUDA C++ text; S is double.

    Functions are called as ``python::…``, so that no name of a rule hides them.  ``ints`` are the names of ints.
    """

    def __init__(self) -> None:
        self.ints: set[str] = set()

    def visit(self, node: ast.AST) -> str:
        """Return the text of ``node``; what holds no name is computed here, so that ints are Python's."""
        known, value = _value(node)
        text: str = self.visit_Constant(ast.Constant(value)) if known else super().visit(node)
        return text

    def visit_Constant(self, node: ast.Constant) -> str:
        return "S(0.0 / 0.0)" if math.isnan(node.value) else super().visit_Constant(node)  # type: ignore[arg-type]

    def visit_Name(self, node: ast.Name) -> str:
        return _cpp(node.id)

    def visit_BinOp(self, node: ast.BinOp) -> str:
        if type(node.op) in _OPERATORS:
            text = f"python::{_OPERATORS[type(node.op)]}({self.visit(node.left)}, {self.visit(node.right)})"
        else:
            text = super().visit_BinOp(node)
        return self._without_sign(node, text) if isinstance(node.op, ast.Mult | ast.Mod | ast.FloorDiv) else text

    def visit_UnaryOp(self, node: ast.UnaryOp) -> str:
        text = super().visit_UnaryOp(node)
        return self._without_sign(node, text) if isinstance(node.op, ast.USub) else text

    def visit_Call(self, node: ast.Call) -> str:
        name: str = node.func.id  # type: ignore[attr-defined]
        return f"python::{name}({', '.join(self.visit(a) for a in node.args)})"

    def is_int(self, node: ast.expr) -> bool:
        """Whether Python has an int (or bool) for ``node``, whatever the hyperparameters."""
        known, value = _value(node)
        if known:
            return isinstance(value, int)
        match node:
            case ast.Name(id=name):
                return name in self.ints
            case ast.BinOp(left=left, op=op, right=right):
                return not isinstance(op, ast.Div) and self.is_int(left) and self.is_int(right)
            case ast.UnaryOp(op=op, operand=operand):
                return isinstance(op, ast.Not) or self.is_int(operand)
            case ast.IfExp(body=body, orelse=otherwise):
                return self.is_int(body) and self.is_int(otherwise)
            case ast.Call(func=ast.Name(id="abs" | "min" | "max"), args=arguments):
                return all(map(self.is_int, arguments))
        return isinstance(node, ast.Compare)

    def _without_sign(self, node: ast.expr, text: str) -> str:
        """Return ``text``, whose zero loses its sign if ``node`` is an int."""
        return f"python::whole({text})" if self.is_int(node) else text


def _cpp(name: str) -> str:
    """Return a name for C++, which NVRTC takes in ASCII alone; no rule has names that begin with "_"."""
    return name if name.isascii() else f"_{name.encode().hex()}"


def _value(node: ast.AST) -> tuple[bool, int | float]:
    """Return whether ``node`` holds no name of the rule, and its value then; NaN where Python raises."""
    if not isinstance(node, ast.expr) or any(isinstance(n, ast.Name) and n.id not in FUNCTIONS for n in ast.walk(node)):
        return False, math.nan
    try:
        value = eval(ast.unparse(node), {name: function.host for name, function in FUNCTIONS.items()})
        float(value)  # raises for complex numbers, and ints that are too large
        return True, value
    except (ArithmeticError, TypeError, ValueError):
        return True, math.nan


__all__ = ["cuda_prologue"]
