"""Clipped and scaled steps on a played card: in every order of streams they end in the bits of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from played_runs import Ends, Order, Run, ends_of, every_order, play, some_orders
from staged import both_ways

pytestmark = both_ways
SIZES = (3000, 17, 1500, 4097)


def clipped(run: Run, count: int = 3, **options: Any) -> Ends:
    params = run.params(SIZES)
    optimizer = run.adamw(params, **options)
    norms = []
    for number in range(count):
        optimizer.max_grad_norm = 2.0 + number
        run.gradients(params)
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm)
    return [*ends_of(params, optimizer), *(norm.cpu() for norm in norms)]


@every_order
def test_all_pages_visit(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    play(monkeypatch, lambda run: clipped(run, device_budget=0), order)


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": "24KiB"}, {"device_budget": 0, "host_access": "in_place"}, {"transport": "memcpy"},
     {"transport": "struct"}, {"state_format": "int8"}],
    ids=str,
)  # fmt: skip
@some_orders
def test_placements(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order) -> None:
    play(monkeypatch, lambda run: clipped(run, **options), order)
