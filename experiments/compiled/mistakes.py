"""A mistake in a rule, and in a string of CUDA: where does the message point?"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.lab import Row
from pagedopt.kernels.nvrtc import compile_cuda
from pagedopt.rules import rule


def wrong_rule(param: Any, grad: Any, *, lr: Any) -> Any:
    """A rule that asks in a loop whether a hyperparameter is true."""
    while lr:
        lr = lr - 1
    return param - lr * grad


WRONG_STRING = """
extern "C" __global__ void wrong(float* param) {
    param[0] = gradient;
}
"""
#: What raises, and the line of its mistake: the third, in this file or in the string.
MISTAKES: dict[str, tuple[Callable[[], object], int]] = {
    "a rule (ours)": (lambda: rule(wrong_rule).cuda_source(), wrong_rule.__code__.co_firstlineno + 2),
    "a string of CUDA": (lambda: compile_cuda(WRONG_STRING, ("wrong",), "sm_90"), 3),
}


def message(of: str) -> Row:
    """What a mistake's message says of where it is, and whether it names this file and the line.

    Raises:
        ImportError: the compiler is not here.
    """
    mistake, line = MISTAKES[of]
    try:
        mistake()
    except ImportError:
        raise
    except Exception as error:  # what each raises is the question
        kind, said = type(error).__name__, str(error).replace(f"{Path(__file__).parent}/", "")
    at = next((text.strip() for text in said.splitlines() if re.search(rf"\b{line}\b", text)), "")
    named = re.search(rf"{re.escape(Path(__file__).name)}\D+{line}\b", said)
    return {"what": "mistake", "case": of, "error": kind, "at": at[:160], "named": bool(named)}
