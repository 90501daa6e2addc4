"""Steps on a played card, of pages that visit it, lie in it, or move: no wait is missing, and no bit differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from played_runs import Ends, Order, Run, ends_of, every_order, play, some_orders
from staged import both_ways

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


@every_order
def test_all_pages_visit(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    play(monkeypatch, lambda run: steps(run, device_budget=0), order)


@pytest.mark.parametrize(
    "options",
    [{"device_budget": "24KiB"}, {"device_budget": 0, "host_access": "in_place"}, {"placement": "host"},
     {"device_budget": 0, "transport": "memcpy"}, {"device_budget": 0, "transport": "mapped"}],
    ids=str,
)  # fmt: skip
@some_orders
def test_placements(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order) -> None:
    play(monkeypatch, lambda run: steps(run, **options), order)


@pytest.mark.parametrize(
    "options",
    [{"device_budget": 0, "param_format": "bfloat16+8", "state_format": "int8"},
     {"device_budget": "24KiB", "param_format": "bfloat16+16", "fused": True},
     {"device_budget": 0, "param_rounding": "stochastic", "fused": True}],
    ids=str,
)  # fmt: skip
@some_orders
def test_parameters_in_16_bits(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order) -> None:
    """With step counts on the host and on the device, by which they are drawn."""
    play(monkeypatch, lambda run: steps(run, dtype=torch.bfloat16, **options), order)


@pytest.mark.parametrize("transport", ["managed", "memcpy"])
@some_orders
def test_a_second_main_stream(monkeypatch: pytest.MonkeyPatch, transport: str, order: Order) -> None:
    """Steps go to one and the other, each behind the one before; the last optimizer ends in flight."""

    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, order)


@some_orders
def test_parameters_of_one_page_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    """A step updates one or the other, and its stream does not wait for the other's."""

    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, order)


@pytest.mark.parametrize("transport", ["managed", "memcpy"])
@some_orders
def test_two_optimizers_share_a_ring(monkeypatch: pytest.MonkeyPatch, transport: str, order: Order) -> None:
    """Each on a stream of its own, and nobody waits for the other."""

    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, order)


@pytest.mark.parametrize("placement", ["mapped", "managed"])
@some_orders
def test_pages_move_between_steps(monkeypatch: pytest.MonkeyPatch, placement: str, order: Order) -> None:
    """Steps are on a stream that the one of the moves does not wait for."""

    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, order)


@pytest.mark.parametrize(
    "options", [{"device_budget": "16KiB"}, {"device_budget": "100%", "placement": "mapped"}], ids=str
)
@some_orders
def test_state_is_dropped_in_flight(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], order: Order) -> None:
    def act(run: Run) -> Ends:
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

    play(monkeypatch, act, order)
