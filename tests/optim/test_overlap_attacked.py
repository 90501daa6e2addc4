"""What an adversary found: programs as users write them, in which attached steps had other numbers or failed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from overlapped import Loop, agree, equal, linears, run
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Moving(nn.Module):
    """Reads a bias of whichever module has it now."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.old, self.new = nn.Module(), nn.Module()
        self.old.bias = nn.Parameter(torch.zeros(3 * width * width))
        self.net = linears(width)

    def forward(self, x: Tensor) -> Tensor:
        bias: Any = (self.old if hasattr(self.old, "bias") else self.new).bias
        y: Tensor = self.net(x) + bias.view(3, -1)[:, : x.shape[-1]].sum(0) + bias.sum() * 0.01
        return y


def test_a_parameter_moves_from_one_module_to_another() -> None:
    def move(loop: Loop) -> None:
        if loop.number == 2:
            net: Any = loop.models[0]
            net.new.bias = net.old.bias
            del net.old.bias

    equal(Loop(lambda width: [Moving(width)], between=move), 6)


class Shift(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Block(nn.Module):
    """Owns no parameter that is trained; the module within does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.net = Shift(width), nn.Linear(width, width)
        self.net.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shift(self.net(x))
        return y


class Logged(nn.Module):
    """Calls its blocks through two more functions, once it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks, self.logged = nn.ModuleList(Block(width) for _ in range(30)), False
        self.pad = nn.Parameter(torch.zeros(60))
        for block in self.blocks[:3]:
            block.compile(backend="eager")

    def timed(self, block: nn.Module, x: Tensor) -> Any:
        return self.call(block, x)

    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.timed(block, x) if self.logged else block(x)
        return x + self.pad[: x.shape[-1]]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
    reason="torch 2.6 ends the process where more than eight equal blocks are compiled, before this change, too",
)
def test_blocks_are_compiled_once_their_needs_are_known() -> None:
    """A call of a compiled block is as deep in the stack as one that was not, if its caller's is two deeper."""

    def before(loop: Loop) -> None:
        if loop.number == 4:
            model: Any = loop.models[0]
            model.logged = True
            for block in model.blocks[3:]:
                block.compile(backend="eager")

    def make(width: int) -> list[nn.Module]:
        torch._dynamo.reset()
        return [Logged(width)]

    queued, plain = (run(Loop(make, before=before), attached, 7) for attached in (True, False))
    assert queued.same(plain)


def test_blocks_are_compiled_while_nothing_is_queued() -> None:
    def before(loop: Loop) -> None:
        if loop.number == 3:
            net: Any = loop.models[0]
            loop.opts[0].wait()
            for layer in net[::2]:
                layer.compile(backend="eager")

    assert not equal(Loop(before=before), 6).plain


class Tied(nn.Module):
    """Tries a fast way once, and goes on without it."""

    class Fast(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            raise NotImplementedError

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fast, self.tried, self.net = self.Fast(), False, linears(width)

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.net[-2]
        if not self.tried:
            self.tried = True
            with contextlib.suppress(NotImplementedError):
                x = self.fast(x, last.weight)
        y: Tensor = self.net(x @ last.weight.t())
        return y


def test_the_recorded_forward_goes_on_behind_an_error_of_a_module() -> None:
    equal(Loop(lambda width: [Tied(width)]), 5)


def test_gradients_of_inference_mode_are_not_queued() -> None:
    """They count no writes, so that nobody could tell whether they were written."""

    def between(loop: Loop) -> None:
        with torch.inference_mode():
            made = [torch.ones(p.shape) for p in loop.models[0].parameters()]
        for p, grad in zip(loop.models[0].parameters(), made, strict=True):
            p.grad = grad

    with pytest.warns(RuntimeWarning, match="inference_mode, which count no writes"):
        equal(Loop(between=between), 4, hidden=False)


def test_a_shallow_copy_of_a_module_shares_its_hooks() -> None:
    loop = Loop()
    loop.start(True)
    net: Any = loop.models[0]
    net[4] = copy.copy(net[4])
    loop.train(3)
    loop.opts[0].wait()
    net.load_state_dict(net.state_dict())
    copy.deepcopy(net)
    for _ in range(5):
        copy.copy(net)(loop.batch())
    assert len(net._forward_hooks) == 1


def test_a_closure_takes_a_module_out_of_the_model() -> None:
    """``step()`` waits for what no attached model holds any more, and says so."""

    def without_the_last(loop: Loop, gradients: Any) -> Tensor:
        loss: Tensor = gradients()
        net: Any = loop.models[0]

        def closure() -> None:
            if loop.number == 2:
                loop.tool, net[-2] = net[-2], nn.Identity()

        loop.opts[0].step(closure)
        loop.opts[0].zero_grad()
        if loop.tool is not None:
            loop.more.append(float(loop.tool.weight.detach().abs().sum()))
        return loss

    loop = Loop(step=without_the_last)
    with pytest.warns(RuntimeWarning, match="2 of 72 parameters of the optimizer are in no attached model"):
        queued = run(loop, True, 4, watch=False)
    agree(queued, run(loop, False, 4), hidden=False)


def test_recorders_do_not_note_the_looks_of_other_optimizers() -> None:
    loop = Loop(optimizers=lambda loop: [loop.adamw([p]) for p in loop.models[0].parameters()][:2])
    loop.start(True)
    loop.train(4)
    reads = [opt._overlap._reads for opt in loop.opts]
    loop.opts[0].detach()
    loop.opts[0].attach(loop.models[0])
    loop.train(3)
    assert not any(others for modules in reads for modes in modules.values() for others in modes.values())


def test_evaluation_in_threads_between_steps() -> None:
    def behind(loop: Loop) -> None:
        with ThreadPoolExecutor(2) as pool, torch.no_grad():
            for y in pool.map(loop.models[0], [loop.batch(1), loop.batch(2)]):
                loop.more.append(float(y.detach().sum()))

    equal(Loop(behind=behind), 5, hidden=False)
