"""A graph owns what it reads: it leaks nothing, outlives its optimizer, and a capture that fails leaves no trace."""

from __future__ import annotations

import gc
import signal
import time
from typing import Any

import pytest
import torch
from captured_toys import KINDS, PLACES, assert_same, begun, captured, give
from gpu_support import count_held, launching, settled
from injector import interrupt_at
from optim_support import same
from stand_ins import raising

from pagedopt.kernels import cuda
from pagedopt.system import driver, virtual

pytestmark = launching()


def buffers() -> int:
    """How many pieces of the driver's memory are alive in this process; others use the card, too."""
    return sum(isinstance(each, driver.DeviceMemory | driver.Event | driver.Buffer) for each in gc.get_objects())


def test_a_thousand_captures_leak_nothing() -> None:
    params, optimizer = begun(KINDS["adamw"])

    def capture_and_replay(count: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(count):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()  # torch.cuda.graph collects all garbage each time
                optimizer.step()
                graph.capture_end()
                graph.replay()
        torch.cuda.synchronize()

    capture_and_replay(10)
    settled()
    before, reserved = (count_held(), buffers()), torch.cuda.memory_reserved()
    capture_and_replay(1000)
    settled()
    assert all(now <= then for now, then in zip((count_held(), buffers()), before, strict=True))
    assert torch.cuda.memory_reserved() <= reserved
    assert float(optimizer.state[params[0]]["step"]) == 2 + 1010


def test_a_graph_outlives_its_optimizer() -> None:
    eager = begun(KINDS["adamw"])
    params, optimizer = begun(KINDS["adamw"], **PLACES["in place"])
    graph = captured(optimizer)
    del optimizer
    settled()
    junk = [torch.full((70_001,), float("nan"), device="cuda") for _ in range(8)]
    for step in range(2, 6):
        give(eager[0], step)
        eager[1].step()
        give(params, step)
        graph.replay()
    torch.cuda.synchronize()
    assert same(eager[0], params)
    assert len(junk) == 8


def test_mapped_state_that_dies_in_a_capture_stays_until_it_has_ended() -> None:
    """A wait for the device would end the capture."""
    params, optimizer = begun(KINDS["adamw"])
    others, gone = begun(KINDS["adamw"], **PLACES["in place"])
    settled()
    assert not virtual.dead
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del gone
        gc.collect()
        assert virtual.dead
        optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    assert float(optimizer.state[params[0]]["step"]) == 3
    assert virtual.dead
    optimizer.step()
    assert not virtual.dead
    assert len(others) == len(params)


def test_a_graph_that_is_gone_lets_go() -> None:
    """The driver runs destructors on a thread of its own, soon."""
    _, optimizer = begun(KINDS["adamw"])
    graph = captured(optimizer)
    count = count_held()
    del graph
    settled()
    end = time.monotonic() + 10
    while count_held() != count - 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert count_held() == count - 1


@pytest.mark.parametrize("error", [RuntimeError("no launch"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_capture_that_fails_leaves_the_optimizer_as_it_was(error: BaseException, monkeypatch: Any) -> None:
    (params, optimizer), eager = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    count = count_held()
    with monkeypatch.context() as patch:
        patch.setattr(cuda.CudaKernel, "__call__", raising(error))
        with pytest.raises(type(error)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    settled()
    assert count_held() == count
    assert_same((params, optimizer), eager)
    for world in ((params, optimizer), eager):
        give(world[0], 2)
        world[1].step()
    assert_same((params, optimizer), eager)
    graph = captured(optimizer)
    graph.replay()
    eager[1].step()
    assert_same((params, optimizer), eager)


def test_an_interrupt_anywhere_in_a_refresh_is_mended_by_the_next_one() -> None:
    params, optimizer = begun(KINDS["adamw"])
    eager = begun(KINDS["adamw"])
    graph = captured(optimizer)
    give(params, 2, in_place=False)
    lines = interrupt_at(0, signal.SIGINT, optimizer.refresh).events
    assert lines > 20
    for step, at in enumerate(range(1, lines, lines // 25), 3):
        for world in ((params, optimizer), eager):
            give(world[0], step, in_place=False)
        interrupt_at(at, signal.SIGINT, optimizer.refresh)
        optimizer.refresh()
        graph.replay()
        eager[1].step()
        assert_same((params, optimizer), eager)
