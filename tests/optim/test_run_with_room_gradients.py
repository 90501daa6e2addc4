"""`pagedopt.run_with_room`: a second run adds nothing to gradients of the first; torch without a failure judges."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from pagedopt import PagedAdamW, run_with_room

pytestmark = pytest.mark.usefixtures("folder")
FULL: tuple[tuple[type[BaseException], str], ...] = (
    (torch.OutOfMemoryError, "CUDA out of memory"), (MemoryError, "no room"),
    (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
)  # fmt: skip
INPUTS, TARGETS = torch.randn(8, 200, generator=torch.Generator().manual_seed(1)), torch.arange(8)
#: More than the nodes of the graph of a loss.
MANY = 40


@pytest.fixture(scope="module")
def made() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model, and one that stays as it began."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 200))
    return model, copy.deepcopy(model)


@pytest.fixture
def models(made: tuple[torch.nn.Module, torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    for model in made:
        model.zero_grad()
    return made


def loss_of(model: torch.nn.Module, flip: bool = False) -> torch.Tensor:
    return cross_entropy(model(INPUTS.flip(0) if flip else INPUTS), TARGETS)


def nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Every node of the graph of a loss, each once."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


@dataclass
class Failing:
    """A forward and backward whose first run fails where node number ``at`` of the graph is to be computed."""

    model: torch.nn.Module
    at: int
    flip: bool = False
    clears: PagedAdamW | None = None
    runs: int = 0
    failed: bool = False

    def __call__(self) -> None:
        self.runs += 1
        if self.clears is not None:
            self.clears.zero_grad()
        loss = loss_of(self.model, self.flip)
        if self.runs == 1:
            for node in list(nodes(loss))[self.at : self.at + 1]:
                node.register_prehook(self.fail)
        loss.backward()

    def fail(self, *_: Any) -> None:
        self.failed = True
        kind, text = FULL[self.at % len(FULL)]
        raise kind(text)


def optimizer_of(model: torch.nn.Module) -> PagedAdamW:
    """An optimizer with state that can move."""
    optimizer = PagedAdamW(model.parameters(), lr=0.0, weight_decay=0.0, device_budget="50%", preallocate=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    mine, others = grads(ours), grads(theirs)
    return len(mine) == len(others) == 4 and all(map(torch.equal, mine, others))


@pytest.mark.parametrize("begun", [False, True], ids=["none before", "zero_grad"])
def test_a_run_that_begins_without_gradients_is_as_if_nothing_had_failed(models: Any, begun: bool) -> None:
    model, reference = models
    optimizer = optimizer_of(model)
    loss_of(reference).backward()
    failed = 0
    for at in range(begun, MANY, 2):
        model.zero_grad()
        if begun:
            loss_of(model, flip=True).backward()
        run = Failing(model, at, clears=optimizer if begun else None)
        run_with_room(optimizer, run)
        assert run.runs == 1 + run.failed
        assert same(model, reference), f"node {at}"
        failed += run.failed
    assert 4 < failed < MANY // 2


@pytest.mark.parametrize("restore", [False, True])
def test_a_run_that_adds_to_gradients_is_undone_or_refused(models: Any, restore: bool) -> None:
    model, reference = models
    optimizer = optimizer_of(model)
    for flip in (False, True):
        loss_of(reference, flip).backward()
    refused = again = 0
    for at in range(MANY):
        model.zero_grad()
        loss_of(model).backward()
        before, objects = grads(model), [p.grad for p in model.parameters()]
        run, places = Failing(model, at, flip=True), optimizer.memory_report().by_place
        try:
            run_with_room(optimizer, run, restore=restore)
        except (MemoryError, RuntimeError) as error:
            refused += 1
            written = sum(not torch.equal(a, b) for a, b in zip(before, grads(model), strict=True))
            assert written > 0
            (note,) = error.__notes__
            assert f"has written to {written} of 4 gradients in place" in note
            assert "Begin the function with optimizer.zero_grad(), or give restore=True" in note
            assert "(314 KiB) to the host" in note
            assert run.runs == 1
        else:
            again += run.failed
            assert same(model, reference), f"node {at}"
            assert all(p.grad is grad for p, grad in zip(model.parameters(), objects, strict=True))
        assert optimizer.memory_report().by_place == places
    assert again > 3
    assert (refused > 3) != restore


def test_a_gradient_that_the_run_replaces_is_not_kept_alive(models: Any) -> None:
    model, _ = models
    optimizer, dead = optimizer_of(model), []
    loss_of(model).backward()
    before = [weakref.ref(p.grad) for p in model.parameters()]

    def run() -> None:
        optimizer.zero_grad()
        dead.append(all(ref() is None for ref in before))
        if len(dead) == 1:
            raise MemoryError

    run_with_room(optimizer, run)
    assert dead == [True, True]


def test_with_restore_a_gradient_that_the_run_replaces_comes_back(models: Any) -> None:
    """As by a backward pass with ``create_graph=True``."""
    model, reference = models
    optimizer, runs = optimizer_of(model), []
    for each in (model, reference):
        loss_of(each).backward()
    loss_of(reference, flip=True).backward()

    def run() -> None:
        runs.append(1)
        params = list(model.parameters())
        for p, grad in zip(params, torch.autograd.grad(loss_of(model, flip=True), params), strict=True):
            p.grad = p.grad + grad
        if len(runs) == 1:
            raise MemoryError

    run_with_room(optimizer, run, restore=True)
    assert len(runs) == 2
    assert same(model, reference)


def test_a_gradient_without_a_version_is_let_be(models: Any) -> None:
    model, _ = models
    optimizer, runs = optimizer_of(model), []
    with torch.inference_mode():
        made = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), made, strict=True):
        p.grad = grad

    def run() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise MemoryError

    run_with_room(optimizer, run)
    assert [p.grad is grad for p, grad in zip(model.parameters(), made, strict=True)] == [True] * 4
    model.zero_grad()
