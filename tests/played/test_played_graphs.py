"""Staged steps as graphs of ours, on a played card: when one is made, what it replays, and what a driver may refuse."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_played_captures import captured
from torch import nn

from pagedopt.common.patience import Patience
from pagedopt.system.driver import CudaError, Event
from tests.card.card import Card
from tests.card.driver import Result
from tests.card.runs import Ends, Order, Run, ends_of, play, played, some_orders

SIZES = (3000, 17, 1500, 4097)
MANY = (1024,) * 32


@contextmanager
def counted(run: Run) -> Iterator[Counter[str]]:
    """How often each function of the driver is called in the block."""
    calls = Counter[str]()
    if run.card is None:
        yield calls
        return
    first = len(run.card.driver.calls)
    yield calls
    calls.update(run.card.driver.calls[first:])


def step(run: Run, params: Sequence[torch.nn.Parameter], optimizer: Any, absent: Sequence[int] = ()) -> Counter[str]:
    run.gradients(params)
    for i in absent:
        params[i].grad = None
    with counted(run) as calls:
        optimizer.step()
    return calls


def launches(run: Run, calls: Counter[str]) -> int | None:
    """Of graphs; None on a CPU."""
    return None if run.card is None else calls["cuGraphLaunch"]


@pytest.mark.parametrize("options", [{}, {"state_format": "int8"}, {"fused": True}, {"capturable": True}], ids=str)
@some_orders
def test_the_second_step_is_a_graph(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order) -> None:
    """Learning rates and gradients are other ones in each; from the third on no call is for a page."""
    graphs = 2 if "state_format" in options else 1  # beside state in 8 bits that of small parameters is in 32

    def act(run: Run) -> Ends:
        params, seen = run.params((9000, 17, 8000)), []
        optimizer = run.adamw(params, device_budget=0, **options)
        for number in range(5):
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
            calls = step(run, params, optimizer)
            if run.card is not None:
                seen.append((calls["cuGraphLaunch"], calls["cuGraphInstantiate"], calls["cuMemcpy3DAsync"] > 0))
                if number > 1:
                    assert sum(calls.values()) < 14 * graphs, calls
        assert seen in ([], [(0, 0, True), (graphs, graphs, False), *[(graphs, 0, False)] * 3])
        if run.card is not None and not options:
            assert optimizer.memory_report().graphs >= 8 * 6 * len(params), "the table's words"
        state = [t for p in params for t in optimizer.state[p].values()]
        return [t.detach().cpu() for t in (*params, *state)]

    play(monkeypatch, act, order)


@played(some_orders)
def test_gradients_come_and_go(run: Run) -> Ends:
    """One graph serves them all, unless it would move more than a tenth of its pages in vain."""
    params = run.params(MANY)
    optimizer = run.adamw(params, device_budget=0)
    for absent, graphs in (((), 0), ((), 1), ((3,), 1), ((5, 7), 1), (range(16), 0), (range(31), 0)):
        calls = step(run, params, optimizer, absent)
        assert launches(run, calls) in (None, graphs), absent
    for _ in range(6):  # with counts so different the table has other words
        calls = step(run, params, optimizer)
    assert launches(run, calls) in (None, 1)
    return ends_of(params, optimizer)


@played()
def test_a_plan_that_changes_is_not_made_a_graph_again_and_again(run: Run) -> Ends:
    """In three of four steps; once it stays it is."""
    params, made = run.params(SIZES), Counter[str]()
    optimizer = run.adamw(params, device_budget=0)
    for number in range(24):
        if number % 4:
            optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone()
            optimizer.state[params[0]]["exp_avg_sq"] = optimizer.state[params[0]]["exp_avg_sq"].clone()
        made += step(run, params, optimizer)
    assert made["cuGraphInstantiate"] <= 1
    for _ in range(8):
        made += step(run, params, optimizer)
    calls = step(run, params, optimizer)
    assert made["cuGraphInstantiate"] <= 2
    assert launches(run, calls) in (None, 1)
    return ends_of(params, optimizer)


@pytest.mark.parametrize("at", [1, 2], ids=["made", "replayed"])
def test_what_the_driver_refuses_goes_call_by_call(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Each function of graphs in turn: no bit changes, and nothing is damaged."""
    names = "cuGraphCreate cuGraphAddMemcpyNode cuGraphAddKernelNode cuGraphInstantiate cuGraphUpload cuGraphLaunch"

    def act(run: Run) -> Ends:
        ends: Ends = []
        for name in names.split()[0 if at == 1 else -1 :]:
            params = run.params(SIZES)
            optimizer = run.adamw(params, device_budget=0)
            for number in range(4):
                if run.card is not None:
                    refused = name if number == at else ""
                    run.card.driver.before = lambda call, no=refused: (
                        Result.CUDA_ERROR_OUT_OF_MEMORY if call == no else None
                    )
                calls = step(run, params, optimizer)
                if run.card is not None and number == at:
                    assert calls[name] == 1
                    assert calls["cuMemcpy3DAsync"], "it went call by call"
            assert not optimizer.damaged
            ends += ends_of(params, optimizer)
        return ends

    play(monkeypatch, act, {})


@played()
def test_an_error_behind_the_launch_damages(run: Run) -> Ends:
    """The step may have been taken; it is neither taken again nor counted."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, device_budget=0)
    for _ in range(3):
        step(run, params, optimizer)
    if run.card is None:
        step(run, params, optimizer)
        return [p.detach() for p in params]
    seen = []

    def before(call: str) -> Any:
        seen.append(call)
        behind = call == "cuEventRecord" and "cuGraphLaunch" in seen
        return Result.CUDA_ERROR_UNKNOWN if behind else None

    run.card.driver.before = before
    with pytest.raises(RuntimeError, match="cuEventRecord"):
        step(run, params, optimizer)
    run.card.driver.before = lambda call: None
    assert optimizer.damaged
    run.card.order.wait()
    return [p.detach().cpu() for p in params]


class Watch(nn.Module):
    """Waits until its input is there, then notes how much is still to be done."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.order, self.seen = run.card and run.card.order, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        if self.order is not None:
            self.seen.append(sum(map(len, self.order.queues.values())))
        return x


@pytest.mark.parametrize("order", [{"first": (3, 2, 1, 0)}, {"first": (0, 1, 2, 3)}], ids=str)
def test_a_reader_waits_for_its_page_alone(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    """Of a step that is one graph."""

    def act(run: Run) -> Ends:
        torch.default_generator.manual_seed(5)
        watches = [Watch(run) for _ in range(8)]
        layers = [each for watch in watches for each in (nn.Linear(40, 40, bias=False), watch)]
        model = nn.Sequential(*layers).to(run.device)
        optimizer = run.adamw(model.parameters(), device_budget=0)
        if run.card is not None:
            optimizer.attach(model)
        for _ in range(5):
            with counted(run) as calls:
                model(run.numbers(4, 40)).square().mean().backward()
            step(run, [*model.parameters()], optimizer)
        if run.card is not None:
            assert (calls["cuGraphLaunch"], calls["cuGraphInstantiate"]) == (1, 0)
            left = [watch.seen[-1] for watch in watches]
            assert left == sorted(set(left), reverse=True), "each reader waits for some more"
            assert left[0] > 4 * left[-1]
            optimizer.wait()
        return ends_of(model.parameters(), optimizer)

    play(monkeypatch, act, order)


@played()
def test_as_many_graphs_as_are_needed_live(run: Run) -> Ends:
    """That of a plan that is gone is destroyed."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, device_budget=0)
    for budget in (0, "24KiB", 0, "16KiB"):
        if run.card is not None:
            optimizer.set_device_budget(budget)
        for _ in range(8):
            calls = step(run, params, optimizer)
        if run.card is not None:
            assert calls["cuGraphLaunch"] == 1
            assert len(run.card.driver._executables) == 1
    ends = ends_of(params, optimizer)
    if run.card is not None:
        optimizer.state.clear()
        del optimizer
        assert not run.card.driver._executables
    return ends


# --- what an attack on staged steps as graphs has found: each once failed ---------------------------------------------


BOTH = (3000, 17, 1500)


def refused(call: str) -> CudaError:
    return CudaError(call, "CUDA_ERROR_UNKNOWN", "as asked for")


@pytest.mark.parametrize("staged", ["graph", "calls"])  # fmt: skip
@pytest.mark.parametrize("error", [KeyboardInterrupt(), refused("cuEventRecord")], ids=["interrupt", "error"])
def test_others_wait_for_a_graph_whose_launch_was_broken_off(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, staged: str
) -> None:
    """Two optimizers share a ring, on two streams.  One is damaged, by an error or a second Ctrl-C; not the other."""
    monkeypatch.setenv("PAGEDOPT_STAGED", staged)

    def act(run: Run) -> Ends:
        ours, others, stream = run.params((30000, 17)), run.params((30000, 300)), run.stream()
        optimizer, other = run.adamw(ours, device_budget=0), run.adamw(others, device_budget=0)

        def step(params: Any, optimizer: Any) -> None:
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()

        for _ in range(3):
            step(ours, optimizer)
        run.wait(stream, None)
        with run.on(stream):
            for _ in range(3):
                step(others, other)
        if run.card is not None:
            ended, real, seen = optimizer.store.ring(run.device).ended, Event.record, list[int]()
            assert other.store.ring(run.device).ended is ended

            def record(self: Event, stream: int) -> None:
                if self is ended and not seen:
                    seen.append(1)
                    raise error
                real(self, stream)

            with monkeypatch.context() as patched:
                patched.setattr(Event, "record", record)
                with pytest.raises(type(error)):
                    step(ours, optimizer)
            assert optimizer.damaged
        with run.on(stream):
            for _ in range(3):
                step(others, other)
        run.wait(None, stream)
        return ends_of(others, other)

    play(monkeypatch, act, {"first": (1, 0, 2, 3)})


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@played()
def test_a_table_whose_copy_was_broken_off_is_not_overwritten(run: Run, options: dict[str, Any]) -> Ends:
    """By a second Ctrl-C; the step was not taken, and is taken again."""
    params = run.params(BOTH)
    optimizer = run.adamw(params, device_budget=0, **options)
    for number in range(10):
        run.gradients(params)
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        if run.card is not None and number == 3:
            seen: list[str] = []

            def before(call: str, seen: list[str] = seen) -> None:
                seen.append(call)
                if call == "cuEventRecord" and any("Memcpy" in each for each in seen):
                    seen.clear()
                    raise KeyboardInterrupt

            run.card.driver.before = before
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            run.card.driver.before = lambda call: None
            assert not optimizer.damaged
        optimizer.step()
    return ends_of(params, optimizer)


def test_a_table_whose_copy_has_no_event_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(run: Run) -> Ends:
        params = run.params(BOTH)
        optimizer = run.adamw(params, device_budget=0, fused=True)
        for number in range(9):
            seen: list[str] = []

            def before(call: str, seen: list[str] = seen) -> Any:
                seen.append(call)
                copied = call == "cuEventRecord" and "Memcpy" in "".join(seen[:-1])
                return Result.CUDA_ERROR_UNKNOWN if copied and seen.count(call) == behind else None

            if run.card is not None:
                run.card.driver.before = before if number == 2 else lambda call: None
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
            step(run, params, optimizer)
        return ends_of(params, optimizer)

    behind = 1
    play(monkeypatch, act, {})


@played()
def test_a_graph_is_launched_while_another_stream_is_captured(run: Run) -> Ends:
    params = run.params((300,) * 3)
    optimizer = run.adamw(params, device_budget=0)
    for _ in range(7):
        step(run, params, optimizer)
    if run.card is None:
        step(run, params, optimizer)
    else:
        main = torch.cuda.current_stream()
        run.gradients(params)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.cuda.stream(main), counted(run) as calls:
            optimizer.step()
        assert calls["cuGraphLaunch"] == 1
    return ends_of(params, optimizer)


@pytest.mark.parametrize("options", [{"device_budget": 0}, {}], ids=str)
@played()
def test_a_refresh_brings_a_gradient_that_was_absent_in_the_capture(run: Run, options: dict[str, Any]) -> Ends:
    params = run.params((*BOTH, 9000))
    optimizer = run.adamw(params, capturable=True, **options)
    step(run, params, optimizer)
    run.gradients(params)
    params[1].grad = None
    replay: Callable[[], object] = captured(run, optimizer)
    for _ in range(3):
        run.gradients(params)
        if run.card is not None:
            optimizer.refresh()
        replay()
    return ends_of(params, optimizer)


@played()
def test_patience_counts_steps_and_not_buckets(run: Run) -> None:
    dtypes = torch.float32, torch.bfloat16, torch.float64, torch.float16
    params = [nn.Parameter(run.numbers(2000 + i).to(dtype)) for dtype in dtypes for i in range(4)]
    optimizer = run.adamw(params, device_budget=0)
    absent = {40: params[::2], 41: params[::4]}  # three step counts in each table, which has two sets
    for number in range(44):
        for p in params:
            p.grad = run.numbers(*p.shape).to(p.dtype)
        for p in absent.get(number, ()):
            p.grad = None
        optimizer.step()
    assert optimizer.store.graphs.patience.wait == 1


@played()
def test_a_capture_loses_no_patience(run: Run) -> None:
    params = run.params(BOTH)
    optimizer = run.adamw(params, capturable=True, device_budget=0)
    for _ in range(3):
        step(run, params, optimizer)
    optimizer.store.graphs.patience = Patience(64)
    step(run, params, optimizer)
    captured(run, optimizer)
    assert optimizer.store.graphs.patience.wait == 1


def test_what_was_refused_is_not_kept_by_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def act(run: Run) -> Ends:
        params = run.params(BOTH)
        optimizer = run.adamw(params, device_budget=0)
        for number in range(3):
            if run.card is not None:
                failing = "cuGraphUpload" if number == 1 else ""
                run.card.driver.before = lambda call, no=failing: Result.CUDA_ERROR_UNKNOWN if call == no else None
            step(run, params, optimizer)
        if run.card is not None:
            gc.collect()
            assert not run.card.driver._executables
        return []

    with caplog.at_level(logging.WARNING, "pagedopt"):
        play(monkeypatch, act, {})


@played()
def test_slots_of_captured_steps_are_reported(run: Run) -> None:
    params = run.params(BOTH)
    optimizer = run.adamw(params, capturable=True, device_budget=0)
    step(run, params, optimizer)
    before = optimizer.memory_report()
    replay = captured(run, optimizer)
    after = optimizer.memory_report()
    assert after.ring + after.graphs > before.ring + before.graphs
    del replay


def test_memory_may_be_freed_in_the_middle_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    with Card(monkeypatch).playing() as card:
        memory = card.driver.cuMemAlloc(8)
        stream = card.order.stream()
        card.kernel(stream, "a kernel", (), (), lambda: card.driver.cuMemFree(memory))
        card.order.wait()
