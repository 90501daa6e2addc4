"""Tables for kernels of a user's own, on a played card: no row is rewritten, or given back, under a kernel."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver as real

from pagedopt import DeviceTable
from pagedopt.foreach_ops import foreach_norm
from pagedopt.system import driver, internals, virtual
from pagedopt.system.driver import CudaError, Location
from pagedopt.transports.choose import TRANSPORTS
from pagedopt.transports.ring import RING_SIZE
from tests.card.card import Card
from tests.card.driver import GRANULE, Result
from tests.card.order import Touched
from tests.card.runs import Ends, Run, played, some_orders


def scale(run: Run, rows: int, count: int) -> None:
    """Multiply the tensors of a table by two: a kernel that reads its rows when its turn comes."""

    def work() -> Touched:
        words = np.frombuffer((ctypes.c_int64 * (3 * count)).from_address(rows), np.int64).reshape(count, 3)
        tensors = [(at, at + 4 * numel) for at, numel, _ in words.tolist()]
        for first, end in tensors:
            values = np.frombuffer((ctypes.c_float * ((end - first) // 4)).from_address(first), np.float32)
            values *= 2
        return [(rows, rows + words.nbytes), *tensors], tensors

    if run.card is None:
        work()
    else:
        run.card.order.submit(internals.current_stream(0), "scaling", work)


@pytest.mark.parametrize("transport", ["managed", "mapped", "memcpy"])
@played(some_orders)
def test_a_kernel_reads_the_rows_of_its_own_launch(run: Run, transport: Any) -> Ends:
    """More launches, on two streams, than there are buffers; the table ends before the last has run."""
    tensors, streams = [run.numbers(n) for n in (3, 700)], [None, run.stream()]
    kept = [tensors]  # torch would give them back in the order of one stream
    table = DeviceTable([tensors], writes=[0], transport=transport)
    for number in range(2 * RING_SIZE + 2):
        run.wait(streams[number % 2], streams[(number + 1) % 2])
        with run.on(streams[number % 2]):
            if number % 3:
                tensors = [t.clone() for t in tensors]
                kept.append(tensors)
                table.refresh([tensors])
            with table.rows_on_device() as rows:
                scale(run, rows, len(table))
    del table
    run.wait(None, streams[1])
    return [t.cpu() for t in tensors]


# --- norms: through every transport the bits of a CPU, and no sum is given back under its reader ----------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@played(some_orders)
def test_norms(run: Run, transport: Any) -> Ends:
    """Of tensors that are one chunk each, of chunks whose sums are added in a second launch, and of no elements."""
    small, large = ([run.numbers(n) for n in sizes] for sizes in ((6,) * 200, (5, 0, 40_001, 3000)))
    found = [foreach_norm(tensors, transport=transport) for tensors in (small, large, large[1:2], small)]
    return [norm.cpu() for norms in found for norm in norms]


# --- when a card is gone, nothing that was played reaches the driver of a real one ------------------------------------


@pytest.mark.parametrize("kept", [False, True], ids=["given back with the tables", "kept alive by somebody"])
def test_events_are_given_back_to_the_card_alone(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    reached: list[int] = []
    monkeypatch.setattr(real, "cuEventDestroy", reached.append)
    with pytest.MonkeyPatch.context() as patch:
        card = Card(patch)
        events = [driver.Event(0)]
        handle = int(events[0].handle)
        patch.setattr(driver, "kept_in_a_table", events.copy(), raising=False)
        if not kept:
            events.clear()
    gc.collect()
    assert (handle in card.driver._events) is kept
    del events
    gc.collect()
    assert not reached


# --- mapped state that dies in a capture, or on a card that cannot be waited for, is not unmapped then ----------------


IN_CAPTURE = (
    "STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED", "STREAM_CAPTURE_ISOLATION", "STREAM_CAPTURE_IMPLICIT",
    "CAPTURED_EVENT", "STREAM_CAPTURE_WRONG_THREAD",
)  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with Card(monkeypatch, first=(3, 2, 1, 0)).playing() as played:
        yield played


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What is raised where no caller is."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: found.append(one.exc_value))
    return found


def pages(card: Card) -> virtual.Range:
    made = virtual.Range(2 * GRANULE, 0)
    made.give(0, GRANULE, Location.DEVICE)
    made.give(GRANULE, GRANULE, Location.HOST)
    return made


def refuse(card: Card, error: Any, call: str = "cuCtxSynchronize") -> None:
    card.driver.calls.clear()
    card.driver.before = lambda name: error if name == call else None


def test_a_range_that_dies_in_a_capture_is_kept_until_it_has_ended(card: Card) -> None:
    made = pages(card)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        del made
        assert len(card.driver.mapped) == 2
        card.driver.calls.clear()
        virtual.free_dead()
        assert not card.driver.calls, "nothing that a capture does not allow is asked for"
        assert len(virtual.dead) == 1
    assert len(card.driver.mapped) == 2
    del (another := [pages(card)])[:]  # which frees what is left before it is made, and itself at its end
    assert not another
    assert not card.driver.mapped
    assert not card.driver.handles
    assert not card.driver.ranges
    assert not virtual.dead
    assert not virtual.device_pages


def test_a_step_frees_what_another_optimizer_left_in_a_capture(card: Card) -> None:
    run = Run(card)
    params, others = run.params((3000, 17)), run.params((3000, 17))
    optimizer = run.adamw(params, capturable=True)
    gone: Any = run.adamw(others, device_budget=0, host_access="in_place")
    for each in (params, others):
        run.gradients(each)
    optimizer.step()
    gone.step()
    assert card.driver.mapped
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del gone
        gc.collect()
        optimizer.step()
        assert card.driver.mapped
    graph.replay()
    assert card.driver.mapped
    optimizer.step()
    assert not card.driver.mapped


@pytest.mark.parametrize("name", IN_CAPTURE)
def test_a_capture_of_another_stream_is_told_by_the_error_of_the_wait(
    card: Card, unraisable: list[BaseException], name: str
) -> None:
    made = pages(card)
    refuse(card, getattr(Result, f"CUDA_ERROR_{name}"))
    del made
    virtual.free_dead()
    assert set(card.driver.calls) == {"cuCtxSynchronize"}
    assert len(card.driver.mapped) == 2
    refuse(card, None, "")
    virtual.free_dead()
    assert not card.driver.mapped
    assert not virtual.dead
    assert not unraisable


@pytest.mark.parametrize("name", ["ILLEGAL_ADDRESS", "LAUNCH_FAILED", "UNKNOWN"])
def test_what_a_card_that_cannot_be_waited_for_may_still_use_stays_mapped(
    card: Card, unraisable: list[BaseException], name: str
) -> None:
    made = pages(card)
    refuse(card, getattr(Result, f"CUDA_ERROR_{name}"))
    del made
    (error,) = unraisable
    assert str(error) == (
        f"{2 * GRANULE:,} bytes of optimizer state on cuda:0 stay mapped, as kernels may still use them: "
        f"cuCtxSynchronize failed with CUDA_ERROR_{name}: as asked for"
    )
    assert card.driver.calls == ["cuCtxSynchronize"]
    assert len(card.driver.mapped) == 2
    refuse(card, None, "")
    virtual.free_dead()
    assert len(unraisable) == 1, "it is said once"
    assert len(card.driver.mapped) == 2


@pytest.mark.parametrize("name", ["DEINITIALIZED", "CONTEXT_IS_DESTROYED", "INVALID_CONTEXT"])
def test_nothing_is_said_of_memory_that_went_with_its_context(
    card: Card, unraisable: list[BaseException], name: str
) -> None:
    made = pages(card)
    refuse(card, getattr(Result, f"CUDA_ERROR_{name}"))
    del made
    assert card.driver.calls == ["cuCtxSynchronize"]
    assert not unraisable
    assert not virtual.dead


def test_a_copy_that_cannot_be_waited_for_keeps_its_temporary_address(card: Card) -> None:
    made = pages(card)
    refuse(card, Result.CUDA_ERROR_LAUNCH_FAILED, "cuStreamSynchronize")
    with pytest.raises(CudaError, match="cuStreamSynchronize failed with CUDA_ERROR_LAUNCH_FAILED"):
        made.move([0], Location.HOST, 0)
    assert "cuMemUnmap" not in card.driver.calls
    assert len(card.driver.mapped) == 3
    refuse(card, None, "")
    assert made.bytes_at(Location.DEVICE) == GRANULE
