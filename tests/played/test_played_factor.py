"""Clipped and scaled steps on a played card: in every order of streams they end in the bits of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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


def scaled(run: Run, count: int = 5, clip: bool = False, **options: Any) -> Ends:
    """Steps whose scale and ``found_inf`` are deleted right behind them, as GradScaler's are; some change nothing."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, fused=True, **options)
    norms = []
    for number in range(count):
        run.gradients(params)
        if number == 2:
            params[1].grad[3] = float("nan")
        optimizer.max_grad_norm = 2.0 + number if clip else None
        if number != 3:  # which is not scaled, as behind GradScaler(enabled=False)
            optimizer.grad_scale = torch.full((), 8.0 + number, device=run.device)
            optimizer.found_inf = torch.full((), float(number == 2), device=run.device)
        optimizer.step()
        if number != 3:
            del optimizer.grad_scale, optimizer.found_inf
        torch.full((), 3.0, device=run.device)  # whatever takes their memory
        if clip and number != 2:
            norms.append(optimizer.grad_norm)
    counts = [optimizer.state[p]["step"].detach().cpu() for p in params]
    return [*ends_of(params, optimizer), *counts, *(norm.cpu() for norm in norms)]


@pytest.mark.parametrize("clip", [False, True], ids=["scaled", "scaled and clipped"])
@every_order
def test_scaled_pages_visit(monkeypatch: pytest.MonkeyPatch, order: Order, clip: bool) -> None:
    play(monkeypatch, lambda run: scaled(run, clip=clip, device_budget=0), order)


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": "24KiB"}, {"device_budget": 0, "host_access": "in_place"}, {"transport": "struct"},
     {"state_format": "int8", "device_budget": 0}, {"amsgrad": True, "device_budget": "24KiB"}],
    ids=str,
)  # fmt: skip
@some_orders
def test_scaled_placements(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order) -> None:
    play(monkeypatch, lambda run: scaled(run, clip=True, **options), order)
