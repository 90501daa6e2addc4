"""On a GPU: queued steps end in the bits of plain ones, also with 50 ms of spinning in front of every queued update.

A fence that is missing reads a parameter before its update, and not by luck after it.
"""

from __future__ import annotations

import copy
import functools
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from children import python
from gpu_support import NEEDED, deterministic_attention
from injector import Outcome, interrupt_at
from overlapped import Ended, Loop, agree, equal, run
from shots import NEVER
from staged import both_ways
from stand_ins import raising

from pagedopt.optim.overlap.overlap import Overlap
from pagedopt.optim.pending import Pending
from pagedopt.optim.queue import QueuedStep
from tests.optim.overlapped_acts import ACTS
from tests.optim.overlapped_joins import JOINS, loop_of
from tests.optim.overlapped_models import LOOPS, STEPS, clip
from tests.optim.test_overlap_lost import REPLACED, pending

__all__ = ["deterministic_attention"]  # a fixture
pytestmark = [
    both_ways,
    *NEEDED,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
    pytest.mark.filterwarnings("ignore:.* parameters of the optimizer are in no attached model"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]
#: About 50 ms.
SPIN = 100_000_000
#: Loops whose state takes more than 50 pages.
LONG = ("plain", "tied", "attention", "checkpoint", "frozen", "accumulation", "scaler", "old weight_norm")
NAMES = [name for name in LOOPS if name != "a group more"]


@pytest.fixture(params=[0, SPIN], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Queued updates begin late."""
    launch_on = QueuedStep._launch_on

    def spin(self: QueuedStep, side: torch.cuda.Stream, *launches: Any) -> None:
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(request.param)
        launch_on(self, side, *launches)

    if request.param:
        monkeypatch.setattr(QueuedStep, "_launch_on", spin)
    yield
    torch.cuda.synchronize()


def on_gpu(name: str) -> Loop:
    loop = LOOPS[name]()
    loop.device = "cuda"
    return loop


def steps(name: str) -> int:
    return STEPS.get(name, 3) + 1  # so that the last is a graph


@functools.cache
def plainly(name: str) -> Ended:
    return run(on_gpu(name), False, steps(name))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_a_plain_step(name: str) -> None:
    agree(run(on_gpu(name), True, steps(name)), plainly(name))


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", LONG)
def test_bits_of_200_steps(name: str) -> None:
    equal(on_gpu(name), 200)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", ACTS)
def test_what_is_done_between_a_step_and_the_next_forward(name: str) -> None:
    loop = Loop(behind=ACTS[name], device="cuda")
    agree(run(loop, True, 4), run(Loop(behind=ACTS[name], device="cuda"), False, 4), hidden=False)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", JOINS)
def test_modules_change_while_a_step_is_queued(name: str) -> None:
    def on_gpu() -> Loop:
        loop = loop_of(name, queued=True)
        loop.device = "cuda"
        return loop

    agree(run(on_gpu(), True, 5), run(on_gpu(), False, 5))


@pytest.mark.parametrize("late", [SPIN], indirect=True)
def test_step_waits_for_parameters_outside(late: None) -> None:
    """They are read as soon as it has returned; for others the stream has not waited by then."""
    loop, plain = on_gpu("encoder outside"), on_gpu("encoder outside")
    loop.start(True)
    plain.start(False)
    loop.train(3)
    plain.train(3)
    encoder, decoder = loop.models
    assert loop.opts[0]._overlap.queued.begun < loop.opts[0]._overlap.queued.total
    assert all(map(torch.equal, encoder.parameters(), plain.models[0].parameters()))
    loop.opts[0].wait()
    assert all(map(torch.equal, decoder.parameters(), plain.models[1].parameters()))


@pytest.mark.parametrize("late", [SPIN], indirect=True)
def test_a_missing_fence_is_a_wrong_number(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the spinning is for."""
    plain = plainly("plain")
    monkeypatch.setattr(QueuedStep, "_hold", lambda self, side, stop: setattr(self, "begun", max(self.begun, stop)))
    assert not run(on_gpu("plain"), True, steps("plain"), watch=False).same(plain)


@pytest.mark.usefixtures("late")
def test_a_forward_on_another_stream() -> None:
    """It waits for each page itself: the stream of the step has waited for none so far."""

    def elsewhere(loop: Loop) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            loop.tool = loop.models[0](loop.batch()).double().sum()
        torch.cuda.current_stream().wait_stream(stream)
        loop.more.append(float(loop.tool))

    made: Callable[[], Loop] = lambda: Loop(behind=elsewhere, device="cuda")  # noqa: E731
    agree(run(made(), True, 5), run(made(), False, 5))


def peak(attached: bool) -> int:
    loop = Loop(between=clip, device="cuda")
    loop.start(attached)
    loop.train(3)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    loop.train(3)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.exclusive
def test_gradients_are_given_back() -> None:
    """The peak is at most that of plain steps and a tenth of the gradients' bytes."""
    loop = Loop(device="cuda")
    loop.start(False)
    gradients = sum(p.nbytes for p in loop.models[0].parameters())
    del loop
    assert peak(True) <= peak(False) + gradients // 10


@pytest.mark.parametrize("late", [SPIN], indirect=True)
def test_after_an_error_in_the_middle_of_queueing_the_stream_waits(
    late: None, staged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read next is what the launches that were queued leave, and what is loaded next stays."""
    if staged == "graph":
        pytest.skip("a graph has no middle: it is launched or not")
    loop = Loop(device="cuda")
    loop.start(True)
    loop.train(2)
    loop.gradients()
    (model,), (opt,) = loop.models, loop.opts
    saved = copy.deepcopy([model.state_dict(), opt.state_dict()])
    before = [p.detach().clone() for p in model.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(opt._overlap._events[5], "record", raising(OSError("says the test")))
        with pytest.raises(OSError, match="says the test") as raised:
            opt.step()
    found = [p.detach().clone() for p in model.parameters()]
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, model.parameters()))
    assert not all(map(torch.equal, found, before))
    assert "failed in the middle" in opt.damaged
    for each, state in zip((model, opt), saved, strict=True):
        each.load_state_dict(state)
    del raised  # with its frames; no page that was on its way comes back now
    opt.zero_grad()
    loop.train(1)
    assert all(map(torch.equal, loop.values(), plainly_trained(3)))


@functools.cache
def plainly_trained(steps: int) -> list[torch.Tensor]:
    loop = Loop(device="cuda")
    loop.start(False)
    loop.train(steps)
    return loop.values()


@pytest.mark.parametrize("late", [SPIN], indirect=True)
def test_an_interrupt_at_a_line_of_a_fence(late: None) -> None:
    """The next fence waits for what is left."""
    lines = Overlap._finish, Overlap._end_of, QueuedStep.finish, QueuedStep._hold, Pending.let_go, QueuedStep._drop

    def hit(at: int) -> tuple[Loop, Outcome]:
        loop = Loop(device="cuda")
        loop.start(True)
        loop.train(2)
        return loop, interrupt_at(at, signal.SIGINT, loop.opts[0].wait, of=lines)

    for at in hit(NEVER)[1].last_times:
        loop, outcome = hit(at)
        assert isinstance(outcome.error, KeyboardInterrupt), outcome.shots
        loop.train(1)
        assert all(map(torch.equal, loop.values(), plainly_trained(3))), outcome.shots


def test_a_capture_waits_and_turns_the_overlap_off() -> None:
    loop = Loop(device="cuda")
    loop.start(True)
    loop.train(3)
    (model,) = loop.models
    x, graph = loop.batch(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    values = loop.values()
    loop.start(False)
    loop.train(3)
    assert all(map(torch.equal, values, loop.values()))
    with torch.no_grad():
        assert torch.equal(y, loop.models[0](x))


def test_plain_steps_of_another_optimizer_share_the_ring() -> None:
    """It has other parameters and the same slots, on the current stream."""

    def ends(attached: bool) -> list[Any]:
        loop, other = Loop(device="cuda"), Loop(device="cuda")
        loop.start(attached)
        other.start(False)
        losses: list[Any] = []
        for _ in range(5):
            losses += [*loop.train(1), *other.train(1)]
        return [*losses, *loop.values(), *other.values()]

    for ours, plain in zip(ends(True), ends(False), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(plain))


CHILD = """
import sys, warnings
sys.path[:0] = {paths}
warnings.simplefilter("ignore")
from overlapped import Loop, equal
print(equal(Loop(device="cuda"), 4).hidden)
"""


@pytest.mark.parametrize("variable", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_one_after_the_other(variable: str) -> None:
    """Right where kernels block the host, and where all streams share one queue."""
    assert int(python("-c", CHILD.format(paths=sys.path), timeout=55, fresh=True, **{variable: "1"})) > 0


# --- on a GPU: memory that was freed while an update is queued is not written by it, whoever has it by then -----------


@pytest.mark.parametrize("late", [SPIN], indirect=True)
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
