"""The recorded forward: an interrupt or an error in it, several optimizers that record, and what is known behind it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from injector import Outcome, interrupt_at
from overlapped import Loop, agree, equal, linears, run
from shots import EVERY, NEVER, assert_rose
from torch import Tensor, nn

from pagedopt import PagedAdamW
from pagedopt.optim.overlap import record
from pagedopt.optim.overlap.record import Recorder

pytestmark = [
    pytest.mark.timeout(600 if EVERY else 60),
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
]


def modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


class Reads(nn.Module):
    """Its end reads a weight that is not its own; what comes before may raise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = linears(width)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        if self.error is not None:
            raise self.error
        return self.net[1:](F.linear(x, self.net[-2].weight))


def attached(optimizers: int, net: nn.Module) -> list[PagedAdamW]:
    made = [PagedAdamW(net.parameters(), device_budget=0, placement="file") for _ in range(optimizers)]
    for optimizer in made:
        optimizer.attach(net)
    return made


def assert_modes_are_whole(net: nn.Module) -> None:
    """A device mode works, before anything of ours runs again and after it; then no mode is left."""
    for _ in range(2):
        with torch.device("meta"):
            assert torch.empty(1).is_meta
        assert not torch.empty(1).is_meta
        net(torch.ones(2, 4))
        assert not modes()


@pytest.mark.parametrize("optimizers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interrupt_in_the_recorded_forward(optimizers: int) -> None:
    """At each line of the package, or at every third."""
    x = torch.ones(2, 4)

    def shot(at: int) -> tuple[Outcome, nn.Module, list[PagedAdamW]]:
        net = nn.Sequential(nn.Linear(4, 4))
        made = attached(optimizers, net)
        return interrupt_at(at, signal.SIGINT, lambda: net(x)), net, made

    events = shot(NEVER)[0].events
    try:
        for at in range(1, events + 1, EVERY or 3):
            outcome, net, made = shot(at)
            assert_rose(outcome)
            assert_modes_are_whole(net)
            assert len(made) == optimizers
    finally:
        while modes():
            torch.overrides._pop_mode()


@pytest.mark.parametrize("within", [False, True], ids=["alone", "within a device mode"])
def test_an_interrupt_in_the_users_part_of_it(within: bool) -> None:
    """Also if a mode of the user stands above or below the recorder by the time that it is taken away."""
    net = Reads(4)
    (optimizer,) = attached(1, net)
    net.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(2, 4))
    net.error = None
    if within:
        with torch.device("meta"):
            optimizer.wait()
            assert torch.empty(1).is_meta
            assert len(modes()) == 1
    assert_modes_are_whole(net)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_was_not_reached_is_not_known(error: Callable[[], BaseException]) -> None:
    """A module whose recorded call did not end is recorded again: who knows what it reads."""

    def fails(loop: Loop) -> None:
        model: Any = loop.models[0]
        if loop.number == 0:
            model.net(loop.batch())  # from now on each weight is known to be read by its own module
            model.error = error()
            with pytest.raises((KeyboardInterrupt, ValueError)):
                model(loop.batch())
            model.error = None

    ended = equal(Loop(lambda width: [Reads(width)], before=fails), 4)
    assert not ended.plain


def test_recorders_of_several_optimizers_do_not_see_each_other_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are looked at as often for each of many optimizers as for one alone."""
    looks = 0

    def counted(tensor: Tensor) -> int | None:
        nonlocal looks
        looks += 1
        return memory_of(tensor)

    memory_of = record.memory_of
    monkeypatch.setattr(record, "memory_of", counted)
    counts = []
    for optimizers in (1, 5):
        net, looks = linears(4, 2), 0
        made = attached(optimizers, net)
        net(torch.ones(2, 4))
        counts.append(looks)
        assert not any(others for each in made for modes in each._overlap._reads.values() for others in modes.values())  # type: ignore[union-attr]
    assert counts[1] == 5 * counts[0]


def test_recorders_stand_aside_of_a_compiler() -> None:
    """Whole graphs of blocks that are compiled one by one can be made in the recorded forward."""

    def make(width: int) -> list[nn.Module]:
        net = linears(width)
        for i in range(0, len(net), 8):
            net[i] = torch.compile(net[i], backend="eager", fullgraph=True)  # type: ignore[assignment]
        return [net]

    torch._dynamo.reset()
    assert not agree(run(Loop(make), True, 4, watch=False), run(Loop(make), False, 4)).plain
    torch._dynamo.reset()


def test_parameters_that_are_not_initialized() -> None:
    """They have no memory yet; their module, which runs later, is recorded then."""

    class Later(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net, self.lazy, self.calls = linears(width), nn.LazyLinear(width), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.net(self.lazy(x) if self.calls > 3 else x)
            return y

    def initialized(loop: Loop) -> list[Any]:
        return [loop.adamw(loop.models[0].net.parameters())]  # type: ignore[union-attr]

    assert not equal(Loop(lambda width: [Later(width)], optimizers=initialized), 6).plain


def test_a_recorder_is_taken_away_from_between_others() -> None:
    other, frame = torch.overrides.BaseTorchFunctionMode, Any
    with other() as below:
        recorder = Recorder([], nn.Identity(), frame)  # type: ignore[arg-type]
        recorder.start(lambda *_: None)
        with other() as above:
            recorder.stop()
            recorder.stop()
            assert modes() == [below, above]
    assert not modes()
