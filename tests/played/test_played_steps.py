"""Steps on a played card, of pages that visit it, lie in it, or move: no wait is missing, and no bit differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from staged import both_ways

from tests.card.runs import Ends, Run, ends_of, every_order, played, some_orders

pytestmark = both_ways
SIZES = (3000, 17, 1500, 4097)


def steps(run: Run, count: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> Ends:
    params = run.params(SIZES, dtype)
    optimizer = run.adamw(params, **options)
    for _ in range(count):
        run.gradients(params)
        optimizer.step()
    if run.card is not None and options.get("host_access") != "in_place":
        assert optimizer.memory_report().ring > 0
    return ends_of(params, optimizer)


@played(every_order)
def test_all_pages_visit(run: Run) -> Ends:
    return steps(run, device_budget=0)


@pytest.mark.parametrize(
    "options",
    [{"device_budget": "24KiB"}, {"device_budget": 0, "host_access": "in_place"}, {"placement": "host"},
     {"device_budget": 0, "transport": "memcpy"}, {"device_budget": 0, "transport": "mapped"}],
    ids=str,
)  # fmt: skip
@played(some_orders)
def test_placements(run: Run, options: dict[str, Any]) -> Ends:
    return steps(run, **options)


@pytest.mark.parametrize(
    "options",
    [{"device_budget": 0, "param_format": "bfloat16+8", "state_format": "int8"},
     {"device_budget": "24KiB", "param_format": "bfloat16+16", "fused": True},
     {"device_budget": 0, "param_rounding": "stochastic", "fused": True}],
    ids=str,
)  # fmt: skip
@played(some_orders)
def test_parameters_in_16_bits(run: Run, options: dict[str, Any]) -> Ends:
    """With step counts on the host and on the device, by which they are drawn."""
    return steps(run, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("transport", ["managed", "memcpy"])
@played(some_orders)
def test_a_second_main_stream(run: Run, transport: str) -> Ends:
    """Steps go to one and the other, each behind the one before; the last optimizer ends in flight."""
    params, streams = run.params(SIZES), [None, run.stream()]
    optimizer = run.adamw(params, device_budget="16KiB", transport=transport)
    for number in range(6):
        now, before = streams[number % 2], streams[(number + 1) % 2]
        run.wait(now, before)
        with run.on(now):
            run.gradients(params)
            optimizer.step()
        if number == 3:
            optimizer = run.adamw(params, device_budget="16KiB", transport=transport)
    del optimizer
    run.wait(None, streams[1])
    return [p.detach().cpu() for p in params]


@played(some_orders)
def test_parameters_of_one_page_on_streams_of_their_own(run: Run) -> Ends:
    """A step updates one or the other, and its stream does not wait for the other's."""
    params, streams = run.params((300, 200)), [run.stream(), run.stream()]
    optimizer = run.adamw(params, device_budget=0)
    run.gradients(params)
    optimizer.step()
    for stream in streams:
        run.wait(stream, None)
    for number in range(4):
        params[1 - number % 2].grad = None
        with run.on(streams[number % 2]):
            run.gradients([params[number % 2]])
            optimizer.step()
    for stream in streams:
        run.wait(None, stream)
    return ends_of(params, optimizer)


@pytest.mark.parametrize("transport", ["managed", "memcpy"])
@played(some_orders)
def test_two_optimizers_share_a_ring(run: Run, transport: str) -> Ends:
    """Each on a stream of its own, and nobody waits for the other."""
    lists, streams = [run.params(SIZES), run.params(SIZES)], [run.stream(), run.stream()]
    optimizers = [run.adamw(params, device_budget=0, transport=transport) for params in lists]
    for stream in streams:
        run.wait(stream, None)
    for _ in range(3):
        for params, optimizer, stream in zip(lists, optimizers, streams, strict=True):
            with run.on(stream):
                run.gradients(params)
                optimizer.step()
    for stream in streams:
        run.wait(None, stream)
    return [*ends_of(lists[0], optimizers[0]), *ends_of(lists[1], optimizers[1])]


@pytest.mark.parametrize("placement", ["mapped", "managed"])
@played(some_orders)
def test_pages_move_between_steps(run: Run, placement: str) -> Ends:
    """Steps are on a stream that the one of the moves does not wait for."""
    params, other = run.params(SIZES), run.stream()
    optimizer = run.adamw(params, device_budget="100%", placement=placement)
    run.wait(other, None)
    for budget in (0, "24KiB", "100%", "spill", "unspill"):
        with run.on(other):
            run.gradients(params)
            optimizer.step()
        if run.card is None:
            continue
        if budget in ("spill", "unspill"):
            getattr(optimizer, budget)()
        else:
            optimizer.set_device_budget(budget)
    return ends_of(params, optimizer)


@pytest.mark.parametrize(
    "options", [{"device_budget": "16KiB"}, {"device_budget": "100%", "placement": "mapped"}], ids=str
)
@played(some_orders)
def test_state_is_dropped_in_flight(run: Run, options: dict[str, Any]) -> Ends:
    params = run.params(SIZES)
    other = run.stream()
    run.wait(other, None)
    with run.on(other):
        for _ in range(2):
            optimizer = run.adamw(params, **options)
            for _ in range(2):
                run.gradients(params)
                optimizer.step()
            if "placement" in options:
                optimizer.state.clear()  # in front of tables, whose end waits for the device
            del optimizer
    run.wait(None, other)
    return [p.detach().cpu() for p in params]
