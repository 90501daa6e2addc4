"""On a GPU: steps within backwards end in the bits of plain ones, however late updates begin; gradients are freed.

A wait that is missing reads a gradient that is not there, or a parameter before its update, and not by luck after it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, assert_clean, deterministic_attention, no_synchronizing, settled
from overlapped import Ended, Loop, run
from stand_ins import raising
from torch import nn

from pagedopt.optim.overlap import side_stream
from pagedopt.optim.overlap.side_stream import SideStream
from pagedopt.placements.movers import OwnMover
from tests.optim.overlapped_models import LONG, LOOPS, STEPS
from tests.optim.test_within import REFUSED, loop_of

__all__ = ["deterministic_attention"]  # a fixture
pytestmark = [
    *NEEDED,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]
#: About 2 ms, behind each gradient.
SPIN = 4_000_000


@pytest.fixture(params=[0, SPIN], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Updates begin late."""
    follow = SideStream.follow

    def spin(self: SideStream) -> None:
        follow(self)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(request.param)

    if request.param:
        monkeypatch.setattr(SideStream, "follow", spin)
    yield
    torch.cuda.synchronize()


def on_gpu(name: str, **options: Any) -> Loop:
    loop = loop_of(name)
    loop.device = "cuda"
    if options:
        loop.optimizers = lambda loop: [loop.adamw((p for m in loop.models for p in m.parameters()), **options)]
    return loop


@functools.cache
def plainly(name: str) -> Ended:
    return run(on_gpu(name), False, STEPS.get(name, 3) + 1, watch=False)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in LOOPS if n not in REFUSED]
)
def test_bits_of_a_plain_step(name: str) -> None:
    assert run(on_gpu(name), True, STEPS.get(name, 3) + 1, watch=False).same(plainly(name))


PLACES: list[dict[str, Any]] = [
    {"device_budget": None}, {"device_budget": "50%"}, {"device_budget": "auto"},
    {"placement": "mapped"}, {"placement": "mapped", "host_access": "in_place"},
    {"placement": "host"}, {"placement": "managed"}, {"transport": "struct"},
]  # fmt: skip


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("options", PLACES, ids=str)
def test_bits_wherever_state_is(options: dict[str, Any]) -> None:
    assert run(on_gpu("plain", **options), True, 4, watch=False).same(plainly("plain"))


@pytest.mark.parametrize(
    "options", [{"state_format": "int8"}, {"state_format": "bfloat16"}, {"amsgrad": True}], ids=str
)
def test_bits_of_formats(options: dict[str, Any]) -> None:
    within, plain = (run(on_gpu("plain", **options), attached, 4, watch=False) for attached in (True, False))
    assert within.same(plain)


LAYERS, WIDTH = 24, 2048


def training(**options: Any) -> Loop:
    """16 MiB of gradients a layer."""
    loop = Loop(
        lambda _: [nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])], overlap="backward"
    )
    loop.device = "cuda"
    loop.optimizers = lambda loop: [loop.adamw(loop.models[0].parameters(), **options)]
    loop.batch = lambda of=0: torch.ones(4, WIDTH, device="cuda")  # type: ignore[method-assign]
    return loop


@pytest.mark.parametrize("budget", [0, None])
def test_gradients_are_given_back(monkeypatch: pytest.MonkeyPatch, budget: Any) -> None:
    """The peak of a backward is far below all gradients."""
    monkeypatch.setattr(side_stream, "HELD", 32 << 20)
    loop = training(device_budget=budget)
    loop.start(True)
    loop.train(2)
    settled()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loop.gradients()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    loop.opts[0].step()
    assert peak < LAYERS * WIDTH * WIDTH * 4 / 3


def test_nothing_waits_for_the_device() -> None:
    loop = training()
    loop.start(True)
    loop.train(2)
    batch = loop.batch()
    with no_synchronizing():
        loop.models[0](batch).square().mean().backward()
        loop.opts[0].step()


@pytest.mark.parametrize("call", ["fetch", "arrive", "evict", "finish"])
def test_a_driver_that_fails_in_a_hook_damages_state_at_most(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Loading mends it, and training goes on in the bits of a plain one."""
    loop, plain = on_gpu("plain"), on_gpu("plain")
    loop.start(True)
    plain.start(False)
    for each in (loop, plain):
        each.train(2)
    (opt,) = loop.opts
    saved = [p.detach().clone() for p in loop.models[0].parameters()], plain.opts[0].state_dict()
    with monkeypatch.context() as patched:
        patched.setattr(OwnMover, call, raising(OSError("says the test")))
        with pytest.raises(OSError, match="says the test"):
            loop.train(1)
    assert_clean()
    assert opt.damaged or call in ("fetch", "arrive")
    with torch.no_grad():
        for p, value in zip(loop.models[0].parameters(), saved[0], strict=True):
            p.copy_(value)
            p.grad = None
    opt.load_state_dict(saved[1])
    loop.number = plain.number
    for each in (loop, plain):
        each.train(2)
    assert all(map(torch.equal, loop.values(), plain.values()))
