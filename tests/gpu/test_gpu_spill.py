"""State that is partly away: pages are where the budget has them, and what moves them takes no more than it has to.

That no place changes a bit is in ``tests/optim/test_places.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from optim_support import ADAMW
from spill_support import everything, parameters, same, steps, trained
from staged import call_by_call

from pagedopt import PagedAdamW
from pagedopt.paging.policy import SLOTS
from pagedopt.system.copies import Copy

pytestmark = NEEDED

MiB = 1 << 20
MIXED = {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}


@functools.cache
def on_the_device() -> list[torch.Tensor]:
    """What seven steps lead to with all state on the device."""
    return everything(*trained(7))


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
    assert same(everything(params, opt), on_the_device())


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
    want = on_the_device()
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
