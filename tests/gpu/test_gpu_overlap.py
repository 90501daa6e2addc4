"""On a GPU: steps under forwards and within backwards end in the bits of plain ones, however late updates begin.

A wait that is missing reads a parameter before its update, or a gradient that is not there, and not by luck after it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from children import python
from gpu_support import NEEDED, deterministic_attention, no_synchronizing, settled
from often import both_ways
from overlapped import Ended, Loop, agree, run
from torch import nn

from pagedopt.optim.overlap import side_stream
from pagedopt.optim.overlap.side_stream import SideStream
from pagedopt.optim.queue import QueuedStep
from tests.optim.overlapped_found import FOUND
from tests.optim.overlapped_loops import ACTS, LOOPS, TRAINED, loop_of, often_and_long
from tests.optim.overlapped_models import clip
from tests.optim.test_overlap_lost import REPLACED, pending
from tests.optim.test_within import REFUSED, within

__all__ = ["deterministic_attention"]  # a fixture
pytestmark = [
    *NEEDED,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:this step was not queued"),
    pytest.mark.filterwarnings("ignore:.* parameters of the optimizer are in no attached model"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]
#: Those of the CPU whose pages and parameters are as large as they say on a GPU, too.
UNDER_FORWARDS = [name for name in TRAINED if name not in FOUND and name != "a group more" and "none is" not in name]


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Updates begin late: about 50 ms in front of each queued one, 2 ms behind each gradient of a backward."""
    launch_on, follow = QueuedStep._launch_on, SideStream.follow

    def launch_late(self: QueuedStep, side: torch.cuda.Stream, *launches: Any) -> None:
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
        launch_on(self, side, *launches)

    def follow_late(self: SideStream) -> None:
        follow(self)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(4_000_000)

    if request.param:
        monkeypatch.setattr(QueuedStep, "_launch_on", launch_late)
        monkeypatch.setattr(SideStream, "follow", follow_late)
    yield
    torch.cuda.synchronize()


def on_gpu(name: str, **changes: Any) -> tuple[Loop, int]:
    """A loop, and so many steps that the last is a graph."""
    loop = loop_of(name, device="cuda", **changes)
    return loop, loop.enough + 1


@functools.cache
def plainly(name: str) -> Ended:
    loop, steps = on_gpu(name)
    return run(loop, False, steps)


# --- under the forward ------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", UNDER_FORWARDS)
def test_bits_of_a_plain_step(name: str) -> None:
    loop, steps = on_gpu(name)
    agree(run(loop, True, steps), plainly(name), name not in ACTS and loop.hides)


@both_ways
@pytest.mark.parametrize("late", [True], indirect=True)
def test_a_missing_fence_is_a_wrong_number(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sleeping is for."""
    loop, steps = on_gpu("plain")
    plain = plainly("plain")
    monkeypatch.setattr(QueuedStep, "_hold", lambda self, side, stop: setattr(self, "begun", max(self.begun, stop)))
    assert not run(loop, True, steps, watch=False).same(plain)


def peak(attached: bool) -> int:
    loop = Loop(between=clip, device="cuda").start(attached, 3)
    settled()
    torch.cuda.reset_peak_memory_stats()
    loop.train(3)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@both_ways
@pytest.mark.exclusive
def test_gradients_of_a_queued_step_are_given_back() -> None:
    """The peak is at most that of plain steps and a tenth of the gradients' bytes."""
    gradients = sum(p.nbytes for p in Loop(device="cuda").start(False).models[0].parameters())
    assert peak(True) <= peak(False) + gradients // 10


@both_ways
def test_a_capture_waits_and_turns_the_overlap_off() -> None:
    loop = Loop(device="cuda").start(True, 3)
    (model,) = loop.models
    x, graph = loop.batch(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    values = loop.values()
    loop.start(False, 3)
    assert all(map(torch.equal, values, loop.values()))
    with torch.no_grad():
        assert torch.equal(y, loop.models[0](x))


CHILD = """
import sys, warnings
sys.path[:0] = {paths}
warnings.simplefilter("ignore")
from overlapped import Loop, equal
print(equal(Loop(device="cuda"), 4).hidden)
"""


@both_ways
@pytest.mark.parametrize("variable", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_one_after_the_other(variable: str) -> None:
    """Right where kernels block the host, and where all streams share one queue."""
    assert int(python("-c", CHILD.format(paths=sys.path), timeout=55, fresh=True, **{variable: "1"})) > 0


@both_ways
@pytest.mark.parametrize("late", [True], indirect=True)
@pytest.mark.parametrize("name", [name for name in REPLACED if "shared" not in name])
def test_memory_that_was_freed_is_not_written(name: str, late: None) -> None:
    """As a graph, which is not launched; and call by call, where the update is in its stream by then."""
    loop = pending(device="cuda")
    size = loop.models[0][0].weight.numel()  # type: ignore[index]
    REPLACED[name](loop)
    others = [torch.full((size,), 7.0, device="cuda") for _ in range(8)]
    with pytest.raises(RuntimeError, match="given other memory before it was waited for"):
        loop.opts[0].wait()
    torch.cuda.synchronize()
    assert all(bool((each == 7).all()) for each in others)
    with pytest.raises(RuntimeError, match=r"damaged: .* given other memory"):
        loop.opts[0].step()


# --- within the backward ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", often_and_long(name for name in LOOPS if name not in REFUSED))
def test_bits_of_a_plain_step_within(name: str) -> None:
    loop = within(name, device="cuda")
    assert run(loop, True, loop.enough + 1, watch=False).same(plainly(name))


STORED: list[dict[str, Any]] = [
    {"device_budget": None}, {"device_budget": "50%"}, {"device_budget": "auto"},
    {"placement": "mapped"}, {"placement": "mapped", "host_access": "in_place"},
    {"placement": "host"}, {"placement": "managed"}, {"transport": "struct"},
    {"state_format": "int8"}, {"state_format": "bfloat16"}, {"amsgrad": True},
]  # fmt: skip


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("options", STORED, ids=str)
def test_bits_wherever_and_however_state_is_stored(options: dict[str, Any]) -> None:
    loop = within("plain", device="cuda", options=options)
    assert run(loop, True, 4, watch=False).same(run(loop, False, 4))


LAYERS, WIDTH = 24, 2048


def training(**options: Any) -> Loop:
    """16 MiB of gradients a layer."""
    loop = Loop(
        lambda _: [nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])],
        overlap="backward", device="cuda", options=options,
    )  # fmt: skip
    loop.batch = lambda of=0: torch.ones(4, WIDTH, device="cuda")  # type: ignore[method-assign]
    return loop.start(True, 2)


@pytest.mark.parametrize("budget", [0, None])
def test_gradients_are_given_back_within(monkeypatch: pytest.MonkeyPatch, budget: Any) -> None:
    """The peak of a backward is far below all gradients."""
    monkeypatch.setattr(side_stream, "HELD", 32 << 20)
    loop = training(device_budget=budget)
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
    batch = loop.batch()
    with no_synchronizing():
        loop.models[0](batch).square().mean().backward()
        loop.opts[0].step()
