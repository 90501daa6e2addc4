"""State that is partly away: pages are where the budget has them, and what moves them takes no more than it has to.

That no place changes a bit is in ``tests/optim/test_places.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, no_synchronizing
from optim_support import ADAMW
from spill_support import everything, parameters, same, steps, trained

from pagedopt import PagedAdamW
from pagedopt.paging.pages import GRANULE, lay_out
from pagedopt.paging.policy import SLOTS
from pagedopt.placements.arena import Arena
from pagedopt.placements.managed import ManagedArena
from pagedopt.placements.mapped import MappedArena
from pagedopt.placements.plain import PinnedArena

pytestmark = NEEDED

MiB = 1 << 20


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


def test_what_crosses_the_link_are_pages_that_are_away_and_have_gradients() -> None:
    params, opt = trained(1, shapes=((1 << 19,),) * 16, gaps=False, device_budget="20MiB")
    (ring,), (made,) = opt.store.rings.values(), opt.store.arenas
    for budget, without in (("20MiB", []), (0, params[1:])):
        opt.set_device_budget(budget)
        for p in without:
            p.grad = None
        ring.copied_bytes[:] = [0, 0]
        opt.step()
        away = int(made.layout.page_bytes()[0]) if without else opt.memory_report().by_place["host"]
        assert ring.copied_bytes == [away, away]


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


@pytest.mark.exclusive
@pytest.mark.parametrize("options", [{}, {"device_budget": "9MiB"}], ids=str)
def test_a_step_waits_for_nothing_and_takes_no_memory(options: dict[str, Any]) -> None:
    _, opt = trained(6, gaps=False, **options)  # more steps than the ring of tables has places
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(2_000_000_000)  # about a second
    begun = torch.cuda.Event()
    begun.record()
    with no_synchronizing():
        opt.step()
    assert not begun.query(), "the step waited for the device"
    torch.cuda.synchronize()
    assert options or torch.cuda.memory_stats()["allocation.all.allocated"] == before


DTYPES = (torch.float32, torch.bfloat16)
TENSORS = ((1000, 1000), (), (0, 3), (7,), (1 << 20,), (333, 77))


@pytest.mark.parametrize("kind", [MappedArena, ManagedArena, PinnedArena], ids=lambda kind: kind.name)
@pytest.mark.parametrize("resident", [0, 1])
def test_a_state_tensor_has_a_storage_of_exactly_its_bytes(kind: type[Arena], resident: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if refusal := kind.refusal(device):
        pytest.skip(f"{kind.name}: {refusal}")
    like = [torch.zeros(shape, device=device) for shape in TENSORS]
    made = kind(
        lay_out([t.numel() for t in like], [d.itemsize for d in DTYPES], kind.granule, GRANULE), device, resident
    )
    found = [made.view(s, i, t, dtype) for s, dtype in enumerate(DTYPES) for i, t in enumerate(like)]
    for number, tensor in enumerate(found):
        assert (tensor.shape, tensor.device) == (TENSORS[number % len(TENSORS)], device)
        assert (tensor.dtype, tensor.is_contiguous()) == (DTYPES[number // len(TENSORS)], True)
        assert (tensor.untyped_storage().nbytes(), tensor._is_view(), bool(tensor.any())) == (
            tensor.nbytes,
            False,
            False,
        )
        tensor.fill_(number + 1)
    begin = made.tensor.data_ptr()
    assert all(begin <= t.data_ptr() < begin + made.tensor.nbytes for t in found if t.numel())
    if kind.paged:
        made.move(made.layout.pages - resident)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(found))
