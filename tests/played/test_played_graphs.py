"""Staged steps as graphs of ours, on a played card: when one is made, what it replays, and what a driver may refuse."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from often import both_ways
from torch import nn

from pagedopt.common.patience import Patience
from pagedopt.system.driver import CudaError, Event
from tests.card.card import Card
from tests.card.driver import Result
from tests.card.runs import WIDTH, Ends, Run, ends_of, played, some_orders

SIZES = (3000, 17, 1500, 4097)


@pytest.mark.parametrize("options", [{}, {"state_format": "int8"}, {"fused": True}, {"capturable": True}], ids=str)
@played(some_orders)
def test_the_second_step_is_a_graph(run: Run, options: dict[str, Any]) -> Ends:
    """Learning rates and gradients are other ones in each; from the third on no call is for a page."""
    graphs = 2 if "state_format" in options else 1  # beside state in 8 bits that of small parameters is in 32
    params, seen = run.params((9000, 17, 8000)), []
    optimizer = run.adamw(params, device_budget=0, **options)
    for number in range(5):
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        calls = run.step(params, optimizer)
        seen.append((calls["cuGraphLaunch"], calls["cuGraphInstantiate"], calls["cuMemcpy3DAsync"] > 0))
        assert number < 2 or sum(calls.values()) < 14 * graphs, calls
    if run.card is not None:
        assert seen == [(0, 0, True), (graphs, graphs, False), *[(graphs, 0, False)] * 3]
        assert options or optimizer.memory_report().graphs >= 8 * 6 * len(params), "the table's words"
    return ends_of(params, optimizer)


@played(some_orders)
def test_gradients_come_and_go(run: Run) -> Ends:
    """One graph serves them all, unless it would move more than a tenth of its pages in vain."""
    params = run.params((1024,) * 32)
    optimizer = run.adamw(params, device_budget=0)
    for absent, graphs in (((), 0), ((), 1), ((3,), 1), ((5, 7), 1), (range(16), 0), (range(31), 0)):
        calls = run.step(params, optimizer, absent)
        assert run.card is None or calls["cuGraphLaunch"] == graphs, absent
    for _ in range(6):  # with counts so different the table has other words
        calls = run.step(params, optimizer)
    assert run.card is None or calls["cuGraphLaunch"] == 1
    return ends_of(params, optimizer)


@played()
def test_a_plan_that_changes_is_not_made_a_graph_again_and_again(run: Run) -> Ends:
    """In three of four steps; once it stays it is."""
    params, made = run.params(SIZES), Counter[str]()
    optimizer = run.adamw(params, device_budget=0)
    for number in range(24):
        if number % 4:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[params[0]][name] = optimizer.state[params[0]][name].clone()
        made += run.step(params, optimizer)
    assert made["cuGraphInstantiate"] <= 1
    for _ in range(8):
        made += run.step(params, optimizer)
    assert made["cuGraphInstantiate"] <= 2
    calls = run.step(params, optimizer)
    assert run.card is None or calls["cuGraphLaunch"] == 1
    return ends_of(params, optimizer)


@pytest.mark.parametrize(
    ("name", "at"),
    [*((f"cuGraph{act}", 1) for act in ("Create", "AddMemcpyNode", "AddKernelNode", "Instantiate", "Upload", "Launch")),
     ("cuGraphLaunch", 2)],
)  # fmt: skip
@played()
def test_what_the_driver_refuses_goes_call_by_call(run: Run, name: str, at: int) -> Ends:
    """Where a graph is made, or replayed: no bit changes, nothing is damaged, and the log keeps nothing alive."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, device_budget=0)
    for number in range(4):
        with run.refused(name) if number == at else contextlib.nullcontext():
            calls = run.step(params, optimizer)
        if run.card is not None and number == at:
            assert calls[name] == 1
            assert calls["cuMemcpy3DAsync"], "it went call by call"
            gc.collect()
            assert not run.card.driver._executables
    assert not optimizer.damaged
    return ends_of(params, optimizer)


@played()
def test_an_error_behind_the_launch_damages(run: Run) -> Ends:
    """The step may have been taken; it is neither taken again nor counted."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, device_budget=0)
    for _ in range(3):
        run.step(params, optimizer)
    error = contextlib.nullcontext() if run.card is None else pytest.raises(RuntimeError, match="cuEventRecord")
    with run.refused("cuEventRecord", error=Result.CUDA_ERROR_UNKNOWN, behind="cuGraphLaunch"), error:
        run.step(params, optimizer)
    assert bool(optimizer.damaged) == (run.card is not None)
    return [p.detach().cpu() for p in params]


class Watch(nn.Module):
    """Waits until its input is there, then notes how much is still to be done."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.queues, self.seen = {} if run.card is None else run.card.order.queues, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        self.seen.append(sum(map(len, self.queues.values())))
        return x


@played(pytest.mark.parametrize("order", [{"first": (3, 2, 1, 0)}, {"first": (0, 1, 2, 3)}], ids=str))
def test_a_reader_waits_for_its_page_alone(run: Run) -> Ends:
    """Of a step that is one graph."""
    torch.default_generator.manual_seed(5)
    watches = [Watch(run) for _ in range(8)]
    layers = [each for watch in watches for each in (nn.Linear(WIDTH, WIDTH, bias=False), watch)]
    model = nn.Sequential(*layers).to(run.device)
    optimizer = run.adamw(model.parameters(), device_budget=0)
    run.attach(optimizer, model)
    for _ in range(5):
        with run.calls() as calls:
            run.backward(model)
        run.step([*model.parameters()], optimizer)
    if run.card is not None:
        assert (calls["cuGraphLaunch"], calls["cuGraphInstantiate"]) == (1, 0)
        left = [watch.seen[-1] for watch in watches]
        assert left == sorted(set(left), reverse=True), "each reader waits for some more"
        assert left[0] > 4 * left[-1]
    optimizer.wait()
    return ends_of(model.parameters(), optimizer)


@played()
def test_as_many_graphs_as_are_needed_live(run: Run) -> Ends:
    """That of a plan that is gone is destroyed."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, device_budget=0)
    for budget in (0, "24KiB", 0, "16KiB"):
        optimizer.set_device_budget(budget)
        for _ in range(8):
            calls = run.step(params, optimizer)
        if run.card is not None:
            assert calls["cuGraphLaunch"] == 1
            assert len(run.card.driver._executables) == 1
    ends = ends_of(params, optimizer)
    optimizer.state.clear()
    del optimizer
    assert run.card is None or not run.card.driver._executables
    return ends


# --- what an attack on staged steps as graphs has found: each once failed ---------------------------------------------


BOTH = (3000, 17, 1500)
UNKNOWN = CudaError("cuEventRecord", "CUDA_ERROR_UNKNOWN", "as asked for")


@both_ways
@pytest.mark.parametrize("error", [KeyboardInterrupt(), UNKNOWN], ids=["interrupt", "error"])
@played(first=(1, 0, 2, 3))
def test_others_wait_for_a_graph_whose_launch_was_broken_off(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> Ends:
    """Two optimizers share a ring, on two streams.  One is damaged, by an error or a second Ctrl-C; not the other."""
    ours, others, stream = run.params((30000, 17)), run.params((30000, 300)), run.stream()
    optimizer, other = run.adamw(ours, device_budget=0), run.adamw(others, device_budget=0)
    for _ in range(3):
        run.step(ours, optimizer)
    run.wait(stream, None)
    with run.on(stream):
        for _ in range(3):
            run.step(others, other)
    run.gradients(ours)
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
                optimizer.step()
        assert optimizer.damaged
    with run.on(stream):
        for _ in range(3):
            run.step(others, other)
    run.wait(None, stream)
    return ends_of(others, other)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Result.CUDA_ERROR_UNKNOWN], ids=["interrupt", "error"])
@played()
def test_a_table_whose_copy_has_no_event_is_not_overwritten(run: Run, error: Any, options: dict[str, Any]) -> Ends:
    """An interrupt is a second one: the step was not taken, and is taken again."""
    params = run.params(BOTH)
    optimizer = run.adamw(params, device_budget=0, **options)
    for number in range(10):
        run.gradients(params)
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        hit = run.refused("cuEventRecord", error=error, behind="Memcpy", once=True)
        try:
            with hit if number == 3 else contextlib.nullcontext():
                optimizer.step()
        except KeyboardInterrupt:
            optimizer.step()
    assert not optimizer.damaged
    return ends_of(params, optimizer)


@played()
def test_a_graph_is_launched_while_another_stream_is_captured(run: Run) -> Ends:
    params = run.params((300,) * 3)
    optimizer = run.adamw(params, device_budget=0)
    for _ in range(7):
        run.step(params, optimizer)
    if run.card is None:
        run.step(params, optimizer)
    else:
        main = torch.cuda.current_stream()
        run.gradients(params)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.cuda.stream(main), run.calls() as calls:
            optimizer.step()
        assert calls["cuGraphLaunch"] == 1
    return ends_of(params, optimizer)


@played()
def test_patience_counts_steps_and_not_buckets(run: Run) -> None:
    params = [nn.Parameter(run.numbers(2000).to(dtype)) for dtype in (torch.float32, torch.float64) for _ in range(4)]
    optimizer = run.adamw(params, device_budget=0)
    absent = {10: range(0, 8, 2), 11: range(0, 8, 4)}  # three step counts in each table, which has two sets
    for number in range(14):
        run.step(params, optimizer, absent.get(number, ()))
    assert optimizer.store.graphs.patience.wait == 1


@played()
def test_a_capture_loses_no_patience_and_reports_its_slots(run: Run) -> None:
    params = run.params(BOTH)
    optimizer = run.adamw(params, capturable=True, device_budget=0)
    run.step(params, optimizer)
    before = optimizer.memory_report()
    optimizer.store.graphs.patience = Patience(64)
    run.step(params, optimizer)
    replay = run.captured(optimizer)
    assert optimizer.store.graphs.patience.wait == 1
    after = optimizer.memory_report()
    assert after.ring + after.graphs > before.ring + before.graphs
    del replay


def test_memory_may_be_freed_in_the_middle_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    with Card(monkeypatch).playing() as card:
        memory = card.driver.cuMemAlloc(8)
        stream = card.order.stream()
        card.kernel(stream, "a kernel", (), (), lambda: card.driver.cuMemFree(memory))
        card.order.wait()
