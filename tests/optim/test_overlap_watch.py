"""``watch_reads()`` names the line that reads or writes what passed no fence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped import LAYERS, Loop, equal, linears
from torch import nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]
READS = r"test_overlap_watch\.py:\d+ reads parameter '0\.(?:weight|bias)' .* still to be updated"
WRITES = r"test_overlap_watch\.py:\d+ writes parameter '0\.weight' .* still to be updated"


def pending() -> Loop:
    loop = Loop(lambda width: [linears(width, 12)])
    loop.start(True)
    loop.train(2)
    return loop


def average(net: nn.Module) -> None:
    twin = [torch.zeros_like(p) for p in net.parameters()]
    torch._foreach_lerp_(twin, list(net.parameters()), 0.1)


def clamp(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-1, 1)


def by_hand(net: nn.Module) -> None:
    net.forward(torch.ones(1, next(net.parameters()).shape[1]))
    for module in net:  # type: ignore[attr-defined]
        module.forward(torch.ones(1, next(net.parameters()).shape[1]))


FOUND: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "average": (average, READS),
    "clamp_": (clamp, WRITES),
    "norm": (lambda net: nn.utils.get_total_norm(net.parameters()), READS),
    "item": (lambda net: next(net.parameters())[0, 0].item(), READS),
    "data": (lambda net: next(net.parameters()).data.sum(), READS),
    "init": (lambda net: nn.init.zeros_(next(net.parameters())), WRITES),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_nothing_else_sees_is_found(name: str) -> None:
    act, text = FOUND[name]
    loop = pending()
    with loop.opts[0].watch_reads(), pytest.raises(RuntimeError, match=text):
        act(loop.models[0])
    with loop.opts[0].watch_reads(), loop.opts[0].waited():
        act(loop.models[0])


def test_a_copy_of_a_model() -> None:
    """Which refuses by itself, too."""
    loop = pending()
    with loop.opts[0].watch_reads(), pytest.raises(RuntimeError, match=r"call optimizer\.wait\(\) before"):
        copy.deepcopy(loop.models[0])


def test_a_forward_without_hooks() -> None:
    loop = pending()
    with loop.opts[0].watch_reads(), pytest.raises(RuntimeError, match=READS):
        loop.models[0][0].forward(loop.batch())  # type: ignore[index]


def test_a_gradient_that_is_written() -> None:
    """As ``model.zero_grad(set_to_none=False)`` does."""
    loop = Loop(lambda width: [linears(width, 12)])
    loop.start(True)
    loop.train(1)
    loop.gradients()
    loop.opts[0].step()
    with loop.opts[0].watch_reads():
        with pytest.raises(RuntimeError, match=r"test_overlap_watch\.py:\d+ writes a gradient .* still to be read"):
            loop.models[0].zero_grad(set_to_none=False)
        loop.opts[0].wait()
        loop.models[0].zero_grad(set_to_none=False)


def test_what_reads_nothing_is_not_found() -> None:
    loop = pending()
    p = next(loop.models[0].parameters())
    with loop.opts[0].watch_reads():
        p.detach().view(-1)[:3].view(3, 1).t().reshape(3, 1).expand(3, 2)
        torch.zeros_like(p), torch.empty_like(p), p.new_zeros(3), p.shape, p.dtype, p.data_ptr()
        loop.models[0].requires_grad_(True)
        loop.opts[0].zero_grad()
        loop.models[0].zero_grad()
        loop.models[0].train()
        loop.train(2)


def test_fences_count_and_not_time() -> None:
    """A parameter is free from its own module's fence on, those behind it are not."""
    loop = pending()
    first, last = loop.models[0][0].weight, loop.models[0][-2].weight  # type: ignore[index]
    with loop.opts[0].watch_reads():
        loop.models[0].eval()
        loop.models[0].train()
        handle = loop.models[0][3].register_forward_hook(lambda *_: (first.sum(), last.sum()))  # type: ignore[index]
        with pytest.raises(RuntimeError, match=r"reads parameter '22\.weight'"):
            loop.models[0](loop.batch())
        handle.remove()
        loop.train(1)


# --- what is written, or read under autograd, while its update is queued, is told; what only looks like it is not -----


def queued_loop() -> Loop:
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
    loop = queued_loop()
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
    loop = queued_loop()
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
