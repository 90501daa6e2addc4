"""What is written, or read under autograd, while its update is queued, is told; what only looks like it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped import LAYERS, Loop, equal
from torch import nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]


def pending() -> Loop:
    """A model whose update is queued."""
    loop = Loop()
    loop.start(True)
    loop.train(3)
    return loop


def write_state(loop: Loop) -> None:
    next(iter(loop.opts[0].state.values()))["exp_avg"].mul_(0.5)


def part_without_hooks(loop: Loop) -> None:
    """Its gradients come before the forward that is seen."""
    loop.models[0][4].forward(loop.batch()).sum().backward()  # type: ignore[index]


def gradient_by_hand(loop: Loop) -> None:
    p = loop.models[0][4].weight  # type: ignore[index]
    p.grad = torch.zeros_like(p)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (write_state, "state was written"),
        (part_without_hooks, r"gradients were set, by a forward that attach\(\) did not see or by hand"),
        (gradient_by_hand, "gradients were set, by a forward .* or by hand"),
    ],
)
def test_the_next_step_tells(act: Callable[[Loop], Any], text: str) -> None:
    """Even if a forward that is seen comes in between; it is not taken, and the one behind it is."""
    loop = pending()
    act(loop)
    loop.gradients()
    before = [p.detach().clone() for p in loop.models[0].parameters()]
    with pytest.raises(RuntimeError, match=f"{text},? before it was waited for.*was not taken"):
        loop.opts[0].step()
    assert all(map(torch.equal, before, loop.models[0].parameters()))
    loop.train(2)
    with loop.opts[0].waited():
        act(loop)
    loop.train(1)


def test_a_parameter_that_autograd_has_saved_too_early_is_told() -> None:
    """A penalty that is computed before the forward, and is part of its backward."""
    loop = pending()
    penalty = loop.models[0][-2].weight.square().sum()  # type: ignore[index]
    loss = loop.loss(loop, loop.forward(loop.batch())) + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loop.opts[0].zero_grad()
    with loop.opts[0].waited():
        penalty = loop.models[0][-2].weight.square().sum()  # type: ignore[index]
    (loop.loss(loop, loop.forward(loop.batch())) + penalty).backward()
    loop.opts[0].step()


def test_parameters_that_are_views_of_one_tensor() -> None:
    """Their versions rise together, also when some are waited for before others; nobody has written them."""

    def make(width: int) -> list[nn.Module]:
        flat, layers = torch.randn(LAYERS, width, width) / width**0.5, [nn.Linear(width, width), nn.Tanh()]
        for weight in flat:
            layers += [nn.Linear(width, width), nn.Tanh()]
            layers[-2].weight = nn.Parameter(weight)
        return [nn.Sequential(*layers)]

    def first_is_last(loop: Loop) -> list[Any]:
        first, *others = loop.models[0][::2]  # type: ignore[index]
        return [loop.adamw(p for layer in (*others, first) for p in layer.parameters())]

    equal(Loop(make, optimizers=first_is_last, budget="50%"), 4, hidden=False)
