"""tanh, the lecture's ``mymuladd`` and relu, by how much a compiler sees of the one in the middle."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial

import torch

from experiments.works.fusible import EAGER
from experiments.works.muladd import FAKE, told
from experiments.works.witnesses import Call, Way, Works
from pagedopt import compose, multi_tensor_apply, rule

WORK, C = "tanh, mymuladd, relu", 0.5
OPAQUE, SEEN, SHOWN = "compiled, opaque", "compiled, torch's operators", "compiled, triton_op"
RULES = "rules, composed (ours)"


@rule
def tanh_of(x, b):
    x = math.tanh(x)
    return x


@rule
def muladd(x, b, *, c):
    x = x * b + c
    return x


@rule
def relu(x, b):
    x = max(x, 0.0)
    return x


def plain(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """In torch's own operators."""
    return a * b + c


def between(operator: Callable[..., torch.Tensor], x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The operator between two of torch's own."""
    return torch.relu(operator(torch.tanh(x), b, C))


def ruled(x: torch.Tensor, b: torch.Tensor) -> Call:
    """One launch of ours."""
    one, out = compose(tanh_of, muladd, relu), torch.empty_like(x)

    def run() -> torch.Tensor:
        multi_tensor_apply(one, [[x], [b]], {"c": C}, out=[[out]])
        return out

    return run


def triple(device: torch.device, quick: bool) -> tuple[int, dict[str, Way]]:
    """The ways; bytes are told in units of the tensor's."""
    x, b = torch.rand(2, 1 << (12 if quick else 26 if device.type == "cuda" else 22), device=device).unbind()

    def compiled(operator: Callable[..., torch.Tensor]) -> Call:
        return partial(torch.compile(between, dynamic=False), operator, x, b)

    ways = {
        EAGER: Way(lambda: partial(between, plain, x, b)),
        OPAQUE: Way(lambda: compiled(told(FAKE)), compiled=True),
        SEEN: Way(lambda: compiled(plain), compiled=True),
        RULES: Way(lambda: ruled(x, b), 3, seen=False),
    }
    if device.type == "cuda":
        shown = importlib.import_module("experiments.works.triton_epilogues").muladd
        ways[SHOWN] = Way(lambda: compiled(shown), compiled=True)
    return x.nbytes, ways


WORKS: Works = {WORK: triple}
