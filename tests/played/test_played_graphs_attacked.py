"""What an attack on staged steps as graphs has found: each once failed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from played_card import Card
from played_driver import Result
from played_runs import Ends, Run, ends_of, play
from test_played_captures import captured
from test_played_graphs import counted, step
from torch import nn

from pagedopt.common.patience import Patience
from pagedopt.system.driver import CudaError, Event

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
def test_a_table_whose_copy_was_broken_off_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """By a second Ctrl-C; the step was not taken, and is taken again."""

    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, {})


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


def test_a_graph_is_launched_while_another_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, {})


@pytest.mark.parametrize("options", [{"device_budget": 0}, {}], ids=str)
def test_a_refresh_brings_a_gradient_that_was_absent_in_the_capture(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, {})


def test_patience_counts_steps_and_not_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(run: Run) -> Ends:
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
        if run.card is not None:
            assert optimizer.store.graphs.patience.wait == 1
        return []

    play(monkeypatch, act, {})


def test_a_capture_loses_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(run: Run) -> Ends:
        params = run.params(BOTH)
        optimizer = run.adamw(params, capturable=True, device_budget=0)
        for _ in range(3):
            step(run, params, optimizer)
        if run.card is not None:
            optimizer.store.graphs.patience = Patience(64)
            step(run, params, optimizer)
            captured(run, optimizer)
            assert optimizer.store.graphs.patience.wait == 1
        return []

    play(monkeypatch, act, {})


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


def test_slots_of_captured_steps_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(run: Run) -> Ends:
        params = run.params(BOTH)
        optimizer = run.adamw(params, capturable=True, device_budget=0)
        step(run, params, optimizer)
        if run.card is not None:
            before = optimizer.memory_report()
            replay = captured(run, optimizer)
            after = optimizer.memory_report()
            assert after.ring + after.graphs > before.ring + before.graphs
            del replay
        return []

    play(monkeypatch, act, {})


def test_memory_may_be_freed_in_the_middle_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    with Card(monkeypatch).playing() as card:
        memory = card.driver.cuMemAlloc(8)
        stream = card.order.stream()
        card.kernel(stream, "a kernel", (), (), lambda: card.driver.cuMemFree(memory))
        card.order.wait()
