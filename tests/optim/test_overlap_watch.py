"""``watch_reads()`` names the line that reads or writes what passed no fence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlapped import LAYERS, Loop, linears
from torch import nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")]
READS = r"test_overlap_watch\.py:\d+ reads parameter '0\.(?:weight|bias)' .* still to be updated"
WRITES = r"test_overlap_watch\.py:\d+ writes parameter '0\.weight' .* still to be updated"


def pending(steps: int = 2, layers: int = 12) -> Loop:
    return Loop(lambda width: [linears(width, layers)]).start(True, steps)


def average(net: nn.Module) -> None:
    twin = [torch.zeros_like(p) for p in net.parameters()]
    torch._foreach_lerp_(twin, list(net.parameters()), 0.1)


def clamp(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-1, 1)


FOUND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "average": (average, READS),
    "clamp_": (clamp, WRITES),
    "norm": (lambda net: nn.utils.get_total_norm(net.parameters()), READS),
    "item": (lambda net: next(net.parameters())[0, 0].item(), READS),
    "data": (lambda net: next(net.parameters()).data.sum(), READS),
    "init": (lambda net: nn.init.zeros_(next(net.parameters())), WRITES),
    "a forward without hooks": (lambda net: net[0].forward(torch.ones(1, net[0].in_features)), READS),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_nothing_else_sees_is_found(name: str) -> None:
    act, text = FOUND[name]
    loop = pending()
    with loop.opts[0].watch_reads(), pytest.raises(RuntimeError, match=text):
        act(loop.models[0])
    with loop.opts[0].watch_reads(), loop.opts[0].waited():
        act(loop.models[0])


def test_a_gradient_that_is_written() -> None:
    """As ``model.zero_grad(set_to_none=False)`` does."""
    loop = pending(1)
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


def write_state(loop: Loop) -> None:
    next(iter(loop.opts[0].state.values()))["exp_avg"].mul_(0.5)


def part_without_hooks(loop: Loop) -> None:
    """Its gradients come before the forward that is seen."""
    loop.models[0][4].forward(loop.batch()).sum().backward()  # type: ignore[index]


def gradient_by_hand(loop: Loop) -> None:
    p = loop.models[0][4].weight  # type: ignore[index]
    p.grad = torch.zeros_like(p)


def clamp_one(loop: Loop) -> None:
    with torch.no_grad():
        next(loop.models[0].parameters()).clamp_(-0.1, 0.1)


def write_gradient(loop: Loop) -> None:
    """Which is another step's, that is queued."""
    loop.gradients()
    grad = next(loop.models[0].parameters()).grad
    assert grad is not None
    loop.opts[0].step()
    loop.opts[0].zero_grad()
    grad.zero_()


def unseen(loop: Loop) -> None:
    net: Any = loop.models[0]
    net.forward = lambda x: x  # so that no hook but the outermost one's is called
    x = loop.batch()
    for module in net:
        x = module.forward(x)
    x.sum().backward()
    del net.forward


BY_HAND = r"gradients were set, by a forward that attach\(\) did not see or by hand"
TOLD: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "state": (write_state, "state was written"),
    "a parameter": (clamp_one, "a parameter was written"),
    "a gradient": (write_gradient, "a gradient was written"),
    "a part's gradients": (part_without_hooks, BY_HAND),
    "a gradient of the user's": (gradient_by_hand, BY_HAND),
    "all gradients": (unseen, BY_HAND),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_next_step_tells(name: str) -> None:
    """Even if a forward that is seen comes in between; it is not taken, and the one behind it is."""
    act, text = TOLD[name]
    loop = pending(3, LAYERS)
    act(loop)
    loop.gradients()
    before = [p.detach().clone() for p in loop.models[0].parameters()]
    with pytest.raises(RuntimeError, match=f"{text},? before it was waited for.*was not taken"):
        loop.opts[0].step()
    assert all(map(torch.equal, before, loop.models[0].parameters()))
    loop.opts[0].step()
    loop.opts[0].wait()
    assert not any(map(torch.equal, before, loop.models[0].parameters()))
    loop.train(2)
    if act is not write_gradient:  # which writes behind the wait
        with loop.opts[0].waited():
            act(loop)
        loop.train(1)


def test_a_parameter_that_autograd_has_saved_too_early_is_told() -> None:
    """A penalty that is computed before the forward, and is part of its backward."""
    loop = pending(3, LAYERS)
    penalty = loop.models[0][-2].weight.square().sum()  # type: ignore[index]
    loss = loop.loss(loop, loop.forward(loop, loop.batch())) + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loop.opts[0].zero_grad()
    with loop.opts[0].waited():
        penalty = loop.models[0][-2].weight.square().sum()  # type: ignore[index]
    (loop.loss(loop, loop.forward(loop, loop.batch())) + penalty).backward()
    loop.opts[0].step()
