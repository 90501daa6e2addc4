"""`pagedopt.run_with_room` beside a CPU: the host is full, and what state has of it goes to the file for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_support import stepped

from pagedopt import run_with_room
from pagedopt.placements import file

FULL: dict[str, Callable[[int], Any]] = {"torch": torch.empty, "numpy": np.empty}


@pytest.mark.parametrize("budget", [None, "50%"])
@pytest.mark.parametrize("allocate", FULL.values(), ids=FULL)
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


@pytest.mark.parametrize("allocate", FULL.values(), ids=FULL)
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
