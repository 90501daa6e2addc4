"""A mistake in a rule, in a function for torch.compile, in a string of CUDA: where does the message of each point?"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.lab import Row
from pagedopt.kernels.nvrtc import compile_cuda
from pagedopt.rules import rule


def wrong_rule(param: Any, grad: Any, *, lr: Any) -> Any:
    """A rule with a loop, which no rule has."""
    while lr:  # the mistake
        lr = lr - 1
    return param - lr * grad


def wrong_function(x: torch.Tensor) -> torch.Tensor:
    """Adds what does not fit."""
    return torch.sin(x + torch.ones(3))  # the mistake


WRONG_STRING = """
extern "C" __global__ void wrong(float* param) {
    param[0] = gradient;  // the mistake
}
"""
MISTAKES: dict[str, Callable[[], object]] = {
    "a rule (ours)": lambda: rule(wrong_rule),
    "torch.compile": lambda: torch.compile(wrong_function, backend="eager", fullgraph=True)(torch.ones(4)),
    "a string of CUDA": lambda: compile_cuda(WRONG_STRING, ("wrong",), "sm_90"),
}


def mistakes() -> Iterator[Row]:
    """What a mistake's message says of where it is: the line of this file, or one of a text that has no file."""
    code, first = inspect.getsourcelines(inspect.getmodule(wrong_rule) or wrong_rule)
    places = [i + max(first, 1) for i, line in enumerate(code) if line.rstrip().endswith("# the mistake")]
    lines = dict(zip(MISTAKES, [*places, 3], strict=False))
    for of, mistake in MISTAKES.items():
        error = raised_by(mistake)
        if error is None or isinstance(error, ImportError):
            yield {"what": "failed", "case": f"a mistake in {of}", "ended": str(error or "it is none")}
            continue
        said = str(error)
        line = re.search(rf"{re.escape(Path(__file__).name)}\D+{lines[of]}\b", said)
        at = next((text.strip() for text in said.splitlines() if re.search(rf"\b{lines[of]}\b", text)), "")
        at = at.replace(f"{Path(__file__).parent}/", "")
        yield {"what": "mistake", "case": of, "error": type(error).__name__, "at": at[:160], "named": bool(line)}


def raised_by(mistake: Callable[[], object]) -> Exception | None:
    """What a mistake raises, without what the compiler logs of it."""
    logging.disable(logging.ERROR)
    try:
        mistake()
    except Exception as error:  # what each raises is the question
        return error
    finally:
        logging.disable(logging.NOTSET)
    return None
