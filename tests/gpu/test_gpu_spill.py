"""State that is partly away: the same bits from every placement, budget and way; pages where the budget has them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from optim_support import ADAMW
from spill_support import everything, parameters, same, steps, trained
from staged import call_by_call

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.paging.policy import SLOTS
from pagedopt.system.cuda.copies import Copy
from pagedopt.transports.choose import TRANSPORTS

pytestmark = NEEDED

MiB = 1 << 20
BUDGETS = [0, 5 * MiB, "21MiB", 100 * MiB]
WAYS = [
    *[{"placement": "mapped", "host_access": "staged", "device_budget": b} for b in BUDGETS],
    *[{"placement": "mapped", "host_access": "in_place", "device_budget": b} for b in BUDGETS],
    *[{"placement": "managed", "device_budget": b} for b in (*BUDGETS, None)],
    {"placement": "managed-driver"},
    *[{"placement": "host", "host_access": way} for way in ("staged", "in_place")],
    {"placement": "mapped", "host_access": "staged", "device_budget": 0, "transport": "struct"},  # call by call
    {"placement": "host", "device_budget": 0},
    {"device_budget": "11MiB"},
    pytest.param({"device_budget": "auto"}, marks=pytest.mark.exclusive),
    {"placement": "mapped", "host_access": "in_place", "device_budget": 0, "blocks": 3},
]
MIXED = {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}
FORMATS: list[tuple[torch.dtype, Any]] = [(torch.float32, None), (torch.bfloat16, "float32"), (torch.float32, MIXED)]


@functools.cache
def on_the_device(dtype: torch.dtype, state_format: str | None, amsgrad: bool = False) -> list[torch.Tensor]:
    """What seven steps lead to with all state on the device."""
    return everything(
        *trained(7, dtype, state_format=MIXED if state_format == "mixed" else state_format, amsgrad=amsgrad)
    )


def name(options: dict[str, Any]) -> str:
    """A test's id."""
    return "-".join(str(v) for v in options.values())


@pytest.mark.parametrize("options", WAYS, ids=name)
@pytest.mark.parametrize(("dtype", "state_format"), FORMATS, ids=["float32", "bfloat16", "mixed"])
def test_spilling_changes_no_bit(dtype: torch.dtype, state_format: Any, options: dict[str, Any]) -> None:
    params, opt = trained(7, dtype=dtype, state_format=state_format, **options)
    key = "mixed" if isinstance(state_format, dict) else state_format
    assert same(everything(params, opt), on_the_device(dtype, key))
    if isinstance(budget := options.get("device_budget"), int):
        assert opt.memory_report().by_place.get("device", 0) <= budget


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize("way", ["staged", "in_place"])
def test_every_transport_serves_spilled_state(transport: str, way: str) -> None:
    found = trained(7, device_budget="11MiB", host_access=way, transport=transport, amsgrad=True)
    assert same(everything(*found), on_the_device(torch.float32, None, amsgrad=True))


def test_momentum_of_sgd_spills_too() -> None:
    results = []
    for options in ({}, {"device_budget": 3 * MiB}):
        params = parameters()
        opt = PagedSGD(params, lr=0.1, momentum=0.9, **options)  # type: ignore[arg-type]
        steps(params, opt, 5)
        results.append(everything(params, opt))
        assert options == {} or opt.memory_report().by_place["host"] > 20 * MiB
    assert same(*results)


@pytest.mark.exclusive
@pytest.mark.parametrize("placement", ["mapped", "managed"])
def test_pages_move_between_steps_at_their_addresses(placement: str) -> None:
    params, opt = trained(1, placement=placement, device_budget=0)
    addresses = [opt.state[p]["exp_avg"].data_ptr() for p in params]
    total = sum(opt.memory_report().by_place.values())
    for step, budget in enumerate([None, "30MiB", "7MiB", 0, "19MiB", "auto"], start=1):
        before = everything(params, opt)
        opt.set_device_budget(budget)
        report = opt.memory_report()
        assert same(before, everything(params, opt))
        assert sum(report.by_place.values()) == total
        for place in ("device", "host"):
            assert abs(report.by_place.get(place, 0) - report.measured.get(place, 0)) <= 0.02 * total, str(report)
        assert report.budget is None or report.by_place.get("device", 0) <= report.budget
        steps(params, opt, 1, first=step)
    assert addresses == [opt.state[p]["exp_avg"].data_ptr() for p in params]
    assert same(everything(params, opt), on_the_device(torch.float32, None))


def test_what_crosses_the_link_is_what_is_away() -> None:
    params, opt = trained(1, gaps=False, device_budget="20MiB")
    away = opt.memory_report().by_place["host"]
    (ring,) = opt.store.rings.values()
    ring.copied_bytes[:] = [0, 0]
    steps(params, opt, 3, first=1, gaps=False)
    assert ring.copied_bytes == [3 * away, 3 * away]


def test_a_page_without_gradients_stays_where_it_is() -> None:
    params, opt = trained(1, shapes=((1 << 19,),) * 16, gaps=False, device_budget=0)
    (ring,) = opt.store.rings.values()
    ring.copied_bytes[:] = [0, 0]
    for p in params[1:]:
        p.grad = None
    opt.step()
    (arena,) = opt.store.arenas
    assert ring.copied_bytes == [int(arena.layout.page_bytes()[0])] * 2


@pytest.mark.exclusive
def test_a_step_takes_no_more_than_budget_and_ring() -> None:
    params = parameters(shapes=((4 << 20,),) * 8)  # 256 MiB of state
    for p in params:
        p.grad = torch.ones_like(p)
    torch.cuda.synchronize()
    free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    opt = PagedAdamW(params, device_budget="64MiB", **ADAMW)
    opt.step()
    torch.cuda.synchronize()
    report = opt.memory_report()
    (arena,) = opt.store.arenas
    assert report.ring == SLOTS * int(arena.layout.page_bytes().max())
    taken, torchs = free - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - held
    assert taken <= 64 * MiB + report.ring + 24 * MiB, f"{taken:,} bytes ({torchs:,} torch's)"


def test_steps_follow_the_current_stream() -> None:
    want = on_the_device(torch.float32, None)
    for way in ("staged", "in_place"):
        params = parameters()
        opt = PagedAdamW(params, device_budget="9MiB", host_access=way, **ADAMW)
        side = torch.cuda.Stream()
        for step in range(7):
            stream = side if step % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # gradients come late
                steps(params, opt, 1, first=step)
            torch.cuda.current_stream().wait_stream(stream)
        assert same(everything(params, opt), want)


@pytest.mark.exclusive
def test_a_step_waits_for_nothing() -> None:
    _, opt = trained(2, gaps=False, device_budget="9MiB")
    torch.cuda._sleep(2_000_000_000)  # about a second
    begun = torch.cuda.Event()
    begun.record()
    opt.step()
    assert not begun.query(), "the step waited for the device"
    torch.cuda.synchronize()


def test_state_that_is_partly_away_can_be_used_as_any_tensor(tmp_path: Any) -> None:
    params, opt = trained(3, device_budget="20MiB")
    for p in params:
        value = opt.state[p]["exp_avg_sq"]
        copy = value.clone()
        assert torch.equal(value.cpu(), copy.cpu())
        assert torch.equal((value * 2).cpu(), (copy * 2).cpu())
        value.zero_()
        value.copy_(copy.cpu())
        assert torch.equal(value, copy)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert torch.equal(saved["state"][0]["exp_avg"], opt.state[params[0]]["exp_avg"].cpu())


def test_late_parameters_and_groups_share_the_budget() -> None:
    results = []
    for options in ({}, {"device_budget": "20MiB"}):
        params, more = parameters(), parameters(seed=1)
        opt = PagedAdamW(params, **options, **ADAMW)  # type: ignore[arg-type]
        steps(params, opt, 2)
        opt.add_param_group({"params": more, "lr": 0.01})
        steps(params + more, opt, 3)
        results.append(everything(params + more, opt))
        if options:
            assert len(opt.store.arenas) == 2
            assert opt.memory_report().by_place["device"] <= 20 * MiB
    assert same(*results)


@call_by_call
@pytest.mark.parametrize("nth", [2, 3, 8])
def test_a_copy_that_is_torn_between_sections_brings_nothing_back(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose second section is not in its slot must not be copied home: there is another page's there."""
    params, opt = trained(3, placement="mapped", device_budget=0, state_format=MIXED)  # else all sections are one copy
    before, queue, calls = everything(params, opt), Copy.queue, []

    def torn(copy: Copy, stream: int) -> None:
        calls.append(copy)
        if len(calls) == nth:
            raise KeyboardInterrupt
        queue(copy, stream)

    monkeypatch.setattr(Copy, "queue", torn)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    monkeypatch.undo()
    assert not opt.damaged
    assert same(before, everything(params, opt))
