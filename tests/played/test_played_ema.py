"""Averages of the weights on a played card: in each step, in replays, and shown in the place of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from staged import both_ways

from pagedopt import ema
from tests.card.runs import Ends, Run, ends_of, played, some_orders

pytestmark = both_ways
SIZES = (3000, 17, 1500, 4097)


@pytest.mark.parametrize(
    "options",
    [{}, {"device_budget": "24KiB"}, {"device_budget": 0, "state_format": "int8"}, {"param_rounding": "stochastic"},
     {"fused": True, "max_grad_norm": 1.0, "skip_nonfinite": True, "device_budget": 0}],
    ids=str,
)  # fmt: skip
@played(some_orders)
def test_averages_are_updated_and_shown(run: Run, options: dict[str, Any]) -> Ends:
    dtype = torch.bfloat16 if "param_rounding" in options else torch.float32
    params = run.params(SIZES, dtype)
    optimizer = run.adamw(params, after=ema(0.9), **options)
    found: Ends = []
    for number in range(4):
        run.gradients(params)
        if number == 2:
            params[1].grad[3] = float("inf" if "skip_nonfinite" in options else 5)
        optimizer.step()
        if number:
            with optimizer.averaged():
                found += [p.detach().cpu().clone() for p in params]
    return [*found, *ends_of(params, optimizer)]


@played(some_orders)
def test_replays_average(run: Run) -> Ends:
    params = run.params(SIZES)
    optimizer = run.adamw(params, after=ema(0.9), capturable=True, preallocate=True)
    run.gradients(params)
    replay = optimizer.step
    if run.card is not None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        replay = graph.replay
    for _ in range(3):
        replay()
    with optimizer.averaged():
        shown = [p.detach().cpu().clone() for p in params]
    replay()
    return [*shown, *ends_of(params, optimizer)]
