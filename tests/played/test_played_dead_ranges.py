"""Mapped state that dies while a stream is captured, or on a card that cannot be waited for, is not unmapped then."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from played_card import Card
from played_driver import GRANULE, Result
from played_runs import Run

from pagedopt.system import virtual
from pagedopt.system.driver import CudaError, Location

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
