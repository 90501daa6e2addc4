"""The functions that a rule may call on elements, and what each generated kernel and the reference call for them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def sign(x: float) -> float:
    """-1, 0 or 1."""
    return float((x > 0) - (x < 0))


def fma(a: float, b: float, c: float) -> float:
    """a * b + c; kernels round it once."""
    return a * b + c


sqrt = math.sqrt


@dataclass(frozen=True)
class ElementFunction:
    """A function that a rule may call.

    Attributes:
        arity: how many positional arguments it takes.
        host: the Python function that its name must stand for.
        home: the module to import it from; ``"builtins"``: no import is needed.
        tensor: the function on tensors.
        cuda: its template in ``kernels/numbers.cuh``.
        numba: its name in ``kernels/numba_numbers.py``.
    """

    arity: int
    host: Callable[..., Any]
    home: str
    tensor: Callable[..., Any]
    cuda: str
    numba: str


#: The functions, by the name that a rule calls.
FUNCTIONS: dict[str, ElementFunction] = {
    "sqrt": ElementFunction(1, math.sqrt, "math", torch.sqrt, "element_sqrt", "element_sqrt"),
    "abs": ElementFunction(1, builtins.abs, "builtins", torch.abs, "element_abs", "element_abs"),
    "sign": ElementFunction(1, sign, "pagedopt.rules", torch.sign, "element_sign", "element_sign"),
    "exp": ElementFunction(1, math.exp, "math", torch.exp, "element_exp", "element_exp"),
    "log": ElementFunction(1, math.log, "math", torch.log, "element_log", "element_log"),
    "min": ElementFunction(2, builtins.min, "builtins", torch.minimum, "element_min", "element_min"),
    "max": ElementFunction(2, builtins.max, "builtins", torch.maximum, "element_max", "element_max"),
    "fma": ElementFunction(3, fma, "pagedopt.rules", fma, "element_fma", "element_fma"),
}

__all__ = ["FUNCTIONS", "ElementFunction", "fma", "sign", "sqrt"]
