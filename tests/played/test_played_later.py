"""A queued step that is a graph is launched when the next forward begins, or somebody waits, on a played card.

The driver serves copies to the device in the order in which it was asked: what a user asks for between ``step()`` and
the forward, as a batch, must not come behind all pages.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from often import both_ways
from torch import nn

from pagedopt.placements.movers import Ring, StagedMover
from tests.card.driver import Result
from tests.card.runs import WIDTH, Ends, Run, ends_of, played, some_orders

pytestmark = pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")
Act = Callable[[Run, nn.Module, Any], None]
#: How a step is launched: as a graph, or call by call.
LAUNCHES = "cuGraphLaunch", "cuMemcpy3DAsync"


def train(run: Run, model: nn.Module, optimizer: Any, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        run.backward(model)
        optimizer.step()


def with_a_queued_step(run: Run) -> tuple[nn.Module, Any]:
    """A model behind four steps, of which the last is queued as a graph."""
    model, optimizer = run.net()
    train(run, model, optimizer, 4)
    return model, optimizer


def launched(run: Run) -> int:
    """How many graphs have been launched; none on a CPU."""
    return 0 if run.card is None else run.card.driver.calls.count("cuGraphLaunch")


def forward(run: Run, model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model(run.numbers(4, WIDTH))


def wait(run: Run, model: nn.Module, optimizer: Any) -> None:
    optimizer.wait()


def start(run: Run, model: nn.Module, optimizer: Any) -> None:
    """Nothing is left for the forward to launch, and all to wait for."""
    optimizer.start()
    first, before = launched(run), optimizer.overlap_report().hidden
    model(run.numbers(4, WIDTH))
    assert launched(run) == first
    assert optimizer.overlap_report().hidden > before or run.card is None


def checkpoint(run: Run, model: nn.Module, optimizer: Any) -> None:
    optimizer.state_dict()


def captured_forward(run: Run, model: nn.Module, optimizer: Any) -> None:
    """The host waits for the step, as the stream cannot."""
    batch = run.numbers(4, WIDTH)
    if run.card is not None:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(batch)


@pytest.mark.parametrize("options", [{}, {"state_format": "int8"}, {"max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("act", [forward, wait, start, checkpoint, captured_forward], ids=lambda act: act.__name__)
@played(some_orders)
def test_what_launches_it(run: Run, act: Act, options: dict[str, Any]) -> Ends:
    """``step()`` launches nothing; then the bits are those of a CPU."""
    model, optimizer = run.net(**options)
    train(run, model, optimizer, 4)
    optimizer.wait()
    train(run, model, optimizer)
    first = launched(run)
    act(run, model, optimizer)
    assert launched(run) > first or run.card is None
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


@played()
def test_step_launches_nothing_and_the_first_module_finds_pages_on_their_way(run: Run) -> Ends:
    """Between both a batch is copied."""
    model, optimizer = with_a_queued_step(run)
    optimizer.wait()
    optimizer.zero_grad()
    run.backward(model)
    first = launched(run)
    optimizer.step()
    batch = torch.ones(4, WIDTH).to(run.device)
    assert launched(run) == first
    counts = []
    model[0].register_forward_hook(lambda *_: counts.append(launched(run)))
    model(batch)
    assert counts == [first + (run.card is not None)]
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


@played()
def test_the_end_of_an_optimizer_launches_it(run: Run) -> Ends:
    model, optimizer = with_a_queued_step(run)
    first = launched(run)
    del optimizer
    gc.collect()
    assert launched(run) > first or run.card is None
    return [p.detach().cpu() for p in model.parameters()]


@played()
def test_a_graph_that_is_refused_then_goes_call_by_call(run: Run) -> Ends:
    """Where the forward begins, with a gradient that is absent: no bit changes, and nothing is damaged."""
    model, optimizer = run.net(16)
    train(run, model, optimizer, 4)
    optimizer.zero_grad()
    run.backward(model)
    model[6].weight.grad = model[6].bias.grad = None
    optimizer.step()
    if run.card is not None:
        ((work, _),) = optimizer._overlap.queued._later
        whole = work.launch.route.whole_plan(work.launch.sweep.table.host)
        assert len(work.plan) < len(whole), "a page has no gradient"
    with run.refused("cuGraphLaunch"), run.calls() as calls:
        forward(run, model, optimizer)
    assert calls["cuMemcpy3DAsync"] or run.card is None, "it went call by call"
    assert not optimizer.damaged
    train(run, model, optimizer, 3)
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


@played()
def test_the_forward_of_another_model_launches_nothing(run: Run) -> Ends:
    """On whatever stream or thread that runs; what is pending there may itself wait for the first model."""
    other, _its = run.net()
    model, optimizer = run.net()
    train(run, model, optimizer, 4)
    first = launched(run)
    other(run.numbers(4, WIDTH))
    assert launched(run) == first
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


@played()
def test_it_is_not_behind_what_the_forwards_stream_was_given_since(run: Run) -> Ends:
    """The work of another model there hides it, too."""
    model, optimizer = with_a_queued_step(run)
    if run.card is not None:
        stream = run.stream()
        run.card.kernel(stream.cuda_stream, "work of another model", (), (), lambda: None)
        with run.on(stream):
            optimizer._overlap.queued.start()
        side = optimizer._overlap.queued.side.cuda_stream
        assert not run.card.order.behind(side).get(stream.cuda_stream, 0)
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


@pytest.mark.filterwarnings("ignore:.* parameters of the optimizer are in no attached model")
@played()
def test_an_error_while_step_waits_for_parameters_outside(run: Run) -> None:
    """They are waited for in ``step()``, which launches the graph: it raises, and the state is damaged."""
    model, optimizer = run.net()
    optimizer.detach()
    rest = torch.nn.ModuleList(model[2:])
    optimizer.attach(rest)
    train(run, model, optimizer, 4)
    optimizer.zero_grad()
    run.backward(model)
    with run.refused(*LAUNCHES, error=Result.CUDA_ERROR_UNKNOWN), pytest.raises(RuntimeError, match="_UNKNOWN"):
        optimizer.step()
    assert "failed in the middle" in optimizer.damaged


@played()
def test_an_error_behind_the_launch_damages(run: Run) -> None:
    """The step is counted: the forward raises, those behind it need no events, and the next step says what to do."""
    model, optimizer = with_a_queued_step(run)
    refused = run.refused("cuEventRecord", error=Result.CUDA_ERROR_UNKNOWN, behind="cuGraphLaunch")
    with refused, pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
        forward(run, model, optimizer)
    optimizer._overlap._needs.clear()  # as if no need were known
    forward(run, model, optimizer)
    with pytest.raises(RuntimeError, match=r"damaged: a queued step failed in the middle \(CudaError"):
        train(run, model, optimizer)


@pytest.mark.parametrize("act", [forward, wait, captured_forward], ids=lambda act: act.__name__)
@played()
def test_what_is_refused_altogether_is_launched_by_the_next_fence(run: Run, act: Act) -> Ends:
    """As a graph and call by call: nothing has been launched, and nothing is damaged."""
    model, optimizer = with_a_queued_step(run)
    if run.card is not None:
        with run.refused(*LAUNCHES), pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            act(run, model, optimizer)
        assert not optimizer.damaged
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


class Mixed(nn.Module):
    """Of two dtypes, so that its optimizer has two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).to(torch.bfloat16)).float()
        return found


@pytest.mark.parametrize(
    ("hit", "mixed"),
    [("fetch", False), ("evict", False), ("evict, and refused behind", False), ("fetch", True), ("evict", True)],
)
@played(first=(4, 3, 2, 1, 0))
def test_the_garbage_collector_in_the_middle_of_another_step(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hit: str, mixed: bool
) -> Ends:
    """An optimizer in a cycle dies where another one's pages use the slots: its step is launched behind that one.

    If the driver refuses it there, the other step is none the worse, and the model's next call launches it.
    """
    name, refused = hit.split(",")[0], hit.endswith("behind") and run.card is not None
    params = run.params((30000, 300))
    plain = run.adamw(params, device_budget=0)
    model, optimizer = run.net()
    if mixed:
        model = Mixed().to(run.device)
        optimizer = run.adamw(model.parameters(), device_budget="16KiB")
        run.attach(optimizer, model)
    run.step(params, plain)
    train(run, model, optimizer, 6)
    assert run.card is None or optimizer._overlap.queued._later, "it is to be launched later"
    optimizer.cycle = optimizer
    kept = [dict(optimizer.state[p]) for p in model.parameters()]
    first = launched(run)
    del optimizer
    plain.store.graphs.wanted = False
    real, release, seen = getattr(StagedMover, name), Ring.release, list[int]()

    def collect(self: StagedMover, *args: Any) -> None:
        real(self, *args)
        seen.append(1)
        if len(seen) == 2:
            gc.collect()

    def refuse(self: Ring) -> None:
        before = run.card.driver.before
        run.before(lambda call: Result.CUDA_ERROR_OUT_OF_MEMORY if call in LAUNCHES else None)
        release(self)
        run.before(before)

    with monkeypatch.context() as patched:
        patched.setattr(StagedMover, name, collect)
        if refused:
            patched.setattr(Ring, "release", refuse)
        run.step(params, plain)
    gc.collect()
    assert not refused or "was not launched" in caplog.text
    assert not plain.damaged
    assert run.card is None or refused or launched(run) > first
    if refused:
        with torch.no_grad():
            model(torch.ones(4, WIDTH, device=run.device))
    del kept
    return [*ends_of(params, plain), *(p.detach().float().cpu() for p in model.parameters())]


@played(first=(3, 2, 1, 0))
def test_another_thread_calls_the_model_while_it_is_launched(run: Run) -> Ends:
    """Its forward begins behind the launch, and reads what the step has updated."""
    model, optimizer = with_a_queued_step(run)
    batch, read = run.numbers(4, WIDTH), []

    def evaluate() -> None:
        with run.card.torch.modes() if run.card else contextlib.nullcontext(), torch.no_grad():
            read.append(model(batch))

    thread = threading.Thread(target=evaluate)
    if run.card is None:
        thread.start()
    else:

        def before(name: str) -> None:
            if name == "cuGraphLaunch" and thread.ident is None:
                thread.start()
                thread.join(0.3)

        run.card.driver.before = before
        optimizer.start()
    thread.join()
    optimizer.wait()
    return [*(y.cpu() for y in read), *ends_of(model.parameters(), optimizer)]


@pytest.mark.parametrize("at", ["cuGraphLaunch", "cuEventRecord"])
@played()
def test_a_signal_handler_that_waits_while_it_is_launched(run: Run, at: str) -> None:
    """At the second Ctrl-C, as to save a checkpoint: the step is not launched twice, and state is damaged."""
    model, optimizer = with_a_queued_step(run)
    first, shots = launched(run), []

    def shoot(name: str) -> None:
        if name == at and not shots:
            shots.append(name)
            signal.raise_signal(signal.SIGINT)  # deferred
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: optimizer.wait())
    run.before(shoot)
    try:
        with pytest.raises(RuntimeError, match="a signal handler has waited"):
            forward(run, model, optimizer)
    finally:
        signal.signal(signal.SIGINT, before)
    assert shots
    assert launched(run) <= first + 1
    assert "a signal handler has waited" in optimizer.damaged


# --- what a forward reads was updated, and nobody comes too early at what a step uses ---------------------------------


def nothing(run: Run, model: nn.Module, optimizer: Any) -> None:
    """The forward comes next."""


def trained(run: Run, between: Act = nothing, count: int = 4) -> Ends:
    model, optimizer = run.net()
    losses = []
    for _ in range(count):
        losses.append(run.backward(model))
        optimizer.step()
        optimizer.zero_grad()
        between(run, model, optimizer)
    optimizer.wait()
    report = optimizer.overlap_report()
    if run.card is not None:
        assert report.hidden + report.waited > 5
        assert report.hidden or between is not nothing
    return [*(loss.cpu() for loss in losses), *ends_of(model.parameters(), optimizer)]


@both_ways
@played(some_orders)
def test_the_forward_hides_a_step(run: Run) -> Ends:
    return trained(run)


def wait_and_read(run: Run, model: nn.Module, optimizer: Any) -> None:
    """State and parameters, as for a checkpoint."""
    optimizer.wait()
    for p in model.parameters():
        for t in optimizer.state[p].values():
            t.sum()


def wait_elsewhere(run: Run, model: nn.Module, optimizer: Any) -> None:
    """On a stream that is not the one of the gradients."""
    other = run.stream()
    with run.on(other):
        optimizer.wait()
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].sum()
    run.wait(None, other)


def forward_elsewhere(run: Run, model: nn.Module, optimizer: Any) -> None:
    other = run.stream()
    with run.on(other), torch.no_grad():
        model(torch.ones(2, WIDTH, device=run.device)).sum()
    run.wait(None, other)


def move(run: Run, model: nn.Module, optimizer: Any) -> None:
    optimizer.set_device_budget("16KiB")


@pytest.mark.parametrize("between", [wait_and_read, wait_elsewhere, forward_elsewhere, move], ids=lambda f: f.__name__)
@both_ways
@played(some_orders)
def test_what_is_done_before_the_next_forward(run: Run, between: Act) -> Ends:
    return trained(run, between)
