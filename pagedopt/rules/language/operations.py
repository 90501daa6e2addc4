"""The operations of rules: one table, with a column for each language in which kernels and host code are printed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]


def exp(x: Any) -> Any:
    """Return e to the power of a number, of each element of a tensor, or of a rule's value."""
    return x.exp() if isinstance(x, torch.Tensor) else math.exp(x)


def log(x: Any) -> Any:
    """Return the natural logarithm of a number, of each element of a tensor, or of a rule's value."""
    return x.log() if isinstance(x, torch.Tensor) else math.log(x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of a number, of each element of a tensor, or of a rule's value."""
    return x.tanh() if isinstance(x, torch.Tensor) else math.tanh(x)


def sqrt(x: Any) -> Any:
    """Return the square root of a number, of each element of a tensor, or of a rule's value."""
    return x.sqrt() if isinstance(x, torch.Tensor) else math.sqrt(x)


def sign(x: Any) -> Any:
    """Return -1, 0 or 1 for a number, for each element of a tensor, or for a rule's value."""
    return x.sign() if isinstance(x, torch.Tensor) else float((x > 0) - (x < 0))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c; kernels round it once."""
    return a * b + c


for _function in (exp, log, tanh, sqrt, sign, fma):
    _function.__module__ = "pagedopt.rules"
#: The functions that a rule may call, by name, as they are on numbers.  Kernels have each as ``element_NAME``.
FUNCTIONS: dict[str, Function] = {
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "tanh": math.tanh, "abs": abs, "sign": sign, "min": min,
    "max": max, "fma": fma,
}  # fmt: skip
#: Their names, also of those that take tensors.
NAMES = {function: name for name, function in FUNCTIONS.items()} | {f: f.__name__ for f in (exp, log, tanh, sqrt)}
#: How many arguments each takes.
ARITY = {name: {"min": 2, "max": 2, "fma": 3}.get(name, 1) for name in FUNCTIONS}


@dataclass(frozen=True)
class Operation:
    """What a node computes of its operands, as text; ``{0}``, ``{1}``, … are these, ``{f}`` begins names of functions.

    Attributes:
        python: for Python's numbers.
        array: for NumPy's arrays and numbers (:data:`EXACT`, :data:`REFERENCE`); "": as ``python``.
        cuda: for elements in CUDA C++; "": as ``python``.
        prologue: for doubles in CUDA C++, as Python computes it (``kernels/prologue.cu``); "": as ``cuda``.
        numba: for elements in Numba; "": as ``python``.
        truth: whether the result is a truth value.
        conditions: which operands are taken as truth values.
        risky: whether Python may raise.
        whole: of which operands the result is an int if they are; None: it never is.
    """

    python: str
    array: str = ""
    cuda: str = ""
    prologue: str = ""
    numba: str = ""
    truth: bool = False
    conditions: tuple[int, ...] = ()
    risky: bool = False
    whole: tuple[int, ...] | None = (0, 1)

    def text(self, column: str) -> str:
        """Return the text of a column."""
        return getattr(self, column) or (self.cuda if column == "prologue" else "") or self.python


def _compared(op: str) -> Operation:
    text = f"({{0}} {op} {{1}})"
    return Operation(text, f"{{f}}number({text})", truth=True, whole=())


def _joined(op: str, cuda: str) -> Operation:
    text = f"{{f}}number({{f}}{op}({{0}}, lambda: {{1}}))"
    return Operation(f"({{0}} {op} {{1}})", text, f"({{0}} {cuda} {{1}})", truth=True, conditions=(0, 1), whole=())


def _on_host(op: str, name: str) -> Operation:
    text = f"{{f}}{name}({{0}}, {{1}})"
    return Operation(f"({{0}} {op} {{1}})", text, prologue=text, risky=True)


def _called(name: str) -> Operation:
    given = ", ".join(f"{{{i}}}" for i in range(ARITY[name]))
    cuda, numba, python = f"element_{name}<S>({given})", f"S(element_{name}({given}))", f"{{f}}{name}({given})"
    whole = {"abs": (0,), "min": (0, 1), "max": (0, 1)}.get(name)
    return Operation(python, "", cuda, python, numba, risky=name in ("sqrt", "exp", "log"), whole=whole)


OPERATIONS: dict[str, Operation] = {
    **{op: Operation(f"({{0}} {op} {{1}})") for op in "+-*"},
    "/": Operation("({0} / {1})", "{f}divide({0}, {1})", "({0} / {1})", risky=True, whole=None),
    "**": _on_host("**", "power"), "%": _on_host("%", "modulo"), "//": _on_host("//", "floor_divide"),
    "neg": Operation("(-{0})", whole=(0,)),
    **{op: _compared(op) for op in ("<", "<=", ">", ">=", "==", "!=")},
    "and": _joined("and", "&&"), "or": _joined("or", "||"),
    "not": Operation("(not {0})", "{f}not({0})", "(!{0})", truth=True, conditions=(0,), whole=()),
    "choice": Operation("({1} if {0} else {2})", "{f}choice({0}, lambda: {1}, lambda: {2})", "({0} ? {1} : {2})",
                        conditions=(0,), whole=(1, 2)),
    "raise": Operation("{f}fail({0}, {1})", cuda="S(0.0 / 0.0)", numba="S(_np.nan)", risky=True, whole=None),
    # What a list loads again after it has stored a number.
    "stored": Operation("{1}", cuda="stored<{0}, S, T...>({1})", numba="{stored}", whole=None),
    **{name: _called(name) for name in FUNCTIONS},
}  # fmt: skip


# ---- what the columns "python" and "array" call ----


def _either(on_numbers: Function, on_arrays: Function) -> Function:
    return lambda *args: (on_arrays if any(isinstance(a, np.ndarray) for a in args) else on_numbers)(*args)


def _on_each(function: Function, arity: int = 2) -> Function:
    """Apply Python's function to each value of arrays: NumPy's function of that name may round differently."""
    each = np.frompyfunc(function, arity, 1)
    return _either(function, lambda *args: each(*args).astype(np.float64))


def _divided(a: Any, b: Any) -> Any:
    """Divide arrays; raise where Python does: by IEEE 754 inf / 0 and nan / 0 raise no flag."""
    if not np.all(b):
        raise ZeroDivisionError
    return a / b


def _fail(kind: type[Exception], why: str) -> Any:
    """Raise what Python raised for numbers of a branch, while the rule was traced."""
    raise kind(why)


#: For numbers alone.
PYTHON: dict[str, Function] = {**FUNCTIONS, "fail": _fail}
_LOGIC: dict[str, Function] = {
    "and": _either(lambda a, b: a and b(), lambda a, b: np.logical_and(a, b())),
    "or": _either(lambda a, b: a or b(), lambda a, b: np.logical_or(a, b())),
    "not": _either(operator.not_, np.logical_not), "fail": _fail,
    "number": _either(bool, lambda truth: truth.astype(np.float64)),  # to be subtracted
    "choice": _either(lambda test, yes, no: yes() if test else no(),
                      lambda test, yes, no: np.where(test != 0, 1 * yes(), 1 * no())),  # times 1: no truth values
}  # fmt: skip
#: With the bits of Python's numbers, where NumPy raises (:func:`strict`).  ``np.float_power`` calls the C library's
#: ``pow``, as Python does; ``np.power`` is vectorized, with other bits.
EXACT: dict[str, Function] = {
    **{name: _on_each(function, ARITY[name]) for name, function in FUNCTIONS.items()}, **_LOGIC,
    "divide": _either(operator.truediv, _divided), "power": _either(operator.pow, np.float_power),
    "modulo": _on_each(operator.mod),
    "floor_divide": _on_each(operator.floordiv),
}  # fmt: skip
_ON_ARRAYS: dict[str, Function] = {
    "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "tanh": np.tanh, "abs": np.abs, "min": np.minimum, "max": np.maximum,
    "sign": lambda x: 1.0 * (x > 0) - (x < 0), "fma": fma,
}  # fmt: skip
#: On elements as kernels compute them, but for roundings: NaN is handed on.
REFERENCE: dict[str, Function] = {
    **{name: _either(function, _ON_ARRAYS[name]) for name, function in FUNCTIONS.items()}, **_LOGIC,
    "divide": operator.truediv, "power": operator.pow, "modulo": operator.mod, "floor_divide": operator.floordiv,
}  # fmt: skip


def strict() -> np.errstate:
    """Make NumPy raise wherever Python might raise; the caller then computes with Python."""
    return np.errstate(divide="raise", over="raise", invalid="raise")
