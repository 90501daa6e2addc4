"""`pagedopt.run_with_room` beside a CPU: the host is full, and what state has of it goes to the file for a while."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import stepped
from torch.nn.functional import cross_entropy

from pagedopt import PagedAdamW, run_with_room
from pagedopt.placements import file

pytestmark = pytest.mark.usefixtures("folder")

ALLOCATE: dict[str, Callable[[int], Any]] = {"torch": torch.empty, "numpy": np.empty}


@pytest.mark.parametrize("budget", [None, "50%"])
@pytest.mark.parametrize("allocate", ALLOCATE.values(), ids=ALLOCATE)
def test_state_makes_room_and_comes_back(allocate: Callable[[int], Any], budget: str | None) -> None:
    optimizer = stepped(1 << 20, device_budget=budget)[1]
    before, held = optimizer.memory_report().by_place, []

    def crowded() -> str:
        held.append(optimizer.memory_report().by_place.get("host", 0))
        if held[-1]:
            allocate(1 << 50)
        return "done"

    assert run_with_room(optimizer, crowded) == "done"
    assert held == [before["host"], 0]
    assert {k: n for k, n in optimizer.memory_report().by_place.items() if n} == before


@pytest.mark.parametrize("allocate", ALLOCATE.values(), ids=ALLOCATE)
def test_where_nothing_can_be_given_a_note_says_so(allocate: Callable[[int], Any]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        run_with_room(stepped(1 << 20, placement="device")[1], lambda: allocate(1 << 50))
    (note,) = caught.value.__notes__
    assert note.startswith(
        "run_with_room found no state that it could spill: state holds 8.00 MiB here; device_budget="
    )


def test_other_errors_are_no_reason_to_run_again() -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        raise RuntimeError("not of memory")

    with pytest.raises(RuntimeError, match="not of memory") as caught:
        run_with_room(stepped(1 << 20, device_budget="50%")[1], fails)
    assert len(calls) == 1
    assert not hasattr(caught.value, "__notes__")


def test_room_that_is_not_free_behind_it_is_taken_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = stepped(1 << 20, device_budget="50%")[1]
    before = optimizer.memory_report().by_place

    def refuse(*_: Any) -> None:
        raise MemoryError("the host is still full")

    def crowded() -> str:
        if optimizer.memory_report().by_place.get("host", 0):
            raise MemoryError("too large")
        monkeypatch.setattr(file, "check_host", refuse)
        return "done"

    assert run_with_room(optimizer, crowded) == "done"
    assert optimizer.memory_report().by_place.get("host", 0) == 0
    monkeypatch.undo()
    assert run_with_room(optimizer, lambda: optimizer.memory_report().by_place) == before


# --- `pagedopt.run_with_room`: a second run adds nothing to gradients of the first; torch without a failure judges ----


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
