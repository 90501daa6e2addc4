"""What cannot be captured, or not yet, and what is said then."""

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from captured_toys import (
    CAPTURABLE,
    HYPER,
    KINDS,
    assert_same,
    begun,
    captured,
    give,
    parameters,
)
from gpu_support import launching

from pagedopt import PagedAdamW, PagedSGD

pytestmark = launching()


def refused(optimizer: Any, words: str) -> None:
    """A capture is refused, and afterwards the optimizer steps."""
    with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.step()


def test_a_group_that_is_not_capturable_is_refused_as_in_torch() -> None:
    params, optimizer = begun(functools.partial(PagedAdamW, **HYPER))
    refused(
        optimizer, "Attempting CUDA graph capture of step.. for an instance of PagedAdamW but .*capturable is False"
    )
    theirs = torch.optim.AdamW(params)
    theirs.step()
    with pytest.raises(RuntimeError, match="Attempting CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        theirs.step()


def test_eager_steps_are_warned_of_once_where_torch_does() -> None:
    """torch's constructor marks the warning as given, so that only optimizers that come from a pickle give it."""

    def told(optimizer: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p)
                optimizer.step()
        return [str(w.message)[:50] for w in found]

    said = {}
    for kind in (torch.optim.AdamW, PagedAdamW):
        optimizer = kind(parameters(), capturable=True)
        said[kind] = told(optimizer), told(pickle.loads(pickle.dumps(optimizer)))
    assert said[PagedAdamW] == said[torch.optim.AdamW]
    assert len(said[PagedAdamW][1]) == 1


def test_a_first_step_is_refused_unless_its_state_is_made() -> None:
    params = parameters()
    give(params, 0)
    optimizer = PagedAdamW(params, **CAPTURABLE)
    refused(optimizer, "state 'step' of parameter 0 is not made yet: step once before the capture, or give preall")
    plain = PagedSGD(params, lr=0.1)
    refused(plain, "its kernel is not made yet")


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_step_is_captured_where_its_state_is_made(kind: str) -> None:
    eager, replayed = parameters(), parameters()
    mine = KINDS[kind](replayed, preallocate=True)
    theirs = KINDS[kind](eager)
    give(eager, 0)
    give(replayed, 0)
    held = torch.cuda.memory_allocated()
    graph = captured(mine)
    assert torch.cuda.memory_allocated() <= held + 1024, "state was made in the capture"  # torch's own graph has 1,024
    for step in range(4):
        give(eager, step)
        theirs.step()
        give(replayed, step)
        graph.replay()
    assert_same((eager, theirs), (replayed, mine))


def test_preallocated_state_is_that_of_the_first_step() -> None:
    for place in ({}, {"placement": "mapped", "device_budget": 0}, {"placement": "mapped", "device_budget": "50%"}):
        worlds = []
        for preallocate in (False, True):
            params = parameters()
            optimizer = PagedAdamW(params, **HYPER, preallocate=preallocate, **place)
            assert not optimizer.state
            for step in range(3):
                give(params, step)
                optimizer.step()
            worlds.append((params, optimizer))
        assert_same(*worlds)
        assert worlds[0][1].memory_report().by_place == worlds[1][1].memory_report().by_place


def test_a_budget_that_moves_pages_is_refused() -> None:
    _, optimizer = begun(KINDS["adamw"], placement="mapped", device_budget="auto", host_access="in_place")
    refused(optimizer, "device_budget='auto', which moves pages")


def test_strides_that_need_copies_are_refused() -> None:
    p = torch.nn.Parameter(torch.randn(40, 30, device="cuda")[:, ::2])
    p.grad = torch.ones_like(p)
    optimizer = PagedAdamW([p], **CAPTURABLE)
    optimizer.step()
    refused(optimizer, "complex, have gaps or differ in strides")


def test_a_table_by_value_is_not_refreshed() -> None:
    params, optimizer = begun(KINDS["adamw"], transport="struct")
    graph = captured(optimizer)
    give(params, 3, in_place=False)
    with pytest.raises(RuntimeError, match="transport='struct' passes its table by value"):
        optimizer.refresh()
    graph.replay()


def test_a_gradient_of_another_dtype_is_refused_by_a_refresh() -> None:
    params, optimizer = begun(KINDS["adamw"])
    graph, eager = captured(optimizer), begun(KINDS["adamw"])
    params[1].grad = None
    params[1].grad_dtype = torch.bfloat16 if hasattr(params[1], "grad_dtype") else None
    if params[1].grad_dtype is None:
        pytest.skip("this torch has no gradients of another dtype")
    params[1].grad = torch.ones_like(params[1], dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match=r"the gradient of parameter 1 is torch.bfloat16, the captured one reads torch.float32"
    ):
        optimizer.refresh()
    graph.replay()
    eager[1].step()
    assert_same((params, optimizer), eager)
