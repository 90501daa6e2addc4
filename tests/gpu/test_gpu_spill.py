"""State that is partly away: pages are where the budget has them, and what moves them takes no more than it has to.

That no place changes a bit is in ``tests/optim/test_places.py``.
"""

from __future__ import annotations

import functools
import gc
import io

import pytest
import torch
from gpu_support import NEEDED, everything, no_synchronizing, parameters, same, steps, trained
from optim_support import ADAMW, step_on_ones
from staged import call_by_call

from pagedopt import PagedAdamW
from pagedopt.paging.pages import GRANULE, lay_out
from pagedopt.paging.policy import SLOTS
from pagedopt.placements.arena import Arena
from pagedopt.placements.managed import ManagedArena
from pagedopt.placements.mapped import MappedArena
from pagedopt.placements.plain import PinnedArena
from pagedopt.system import driver
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
    for place in ({}, {"device_budget": "9MiB"}, {"device_budget": "9MiB", "host_access": "in_place"}):
        params = parameters()
        opt = PagedAdamW(params, **place, **ADAMW)
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


# --- each state tensor has a storage of its own -----------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1000, 1000), (), (0, 3), (7,), (1 << 20,), (333, 77))
KINDS = [MappedArena, ManagedArena, PinnedArena]


def arena(kind: type[Arena], resident: int) -> Arena:
    device = torch.device("cuda", torch.cuda.current_device())
    if refusal := kind.refusal(device):
        pytest.skip(f"{kind.name}: {refusal}")
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    layout = lay_out(numels, [dtype.itemsize for dtype in DTYPES], kind.granule, GRANULE)
    return kind(layout, device, resident)


def views(made: Arena) -> list[torch.Tensor]:
    like = [torch.zeros(shape, device="cuda") for shape in SHAPES]
    return [made.view(s, i, t, dtype) for s, dtype in enumerate(DTYPES) for i, t in enumerate(like)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("resident", [0, 1])
def test_a_state_tensor_has_a_storage_of_exactly_its_bytes(kind: type[Arena], resident: int) -> None:
    made = arena(kind, resident)
    found = views(made)
    for number, tensor in enumerate(found):
        assert not tensor.any()
        assert tensor.shape == SHAPES[number % len(SHAPES)]
        assert tensor.dtype == DTYPES[number // len(SHAPES)]
        assert tensor.is_contiguous()
        assert not tensor._is_view()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.device == made.device
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(found))
    begin = made.tensor.data_ptr()
    assert all(begin <= t.data_ptr() < begin + made.tensor.nbytes for t in found if t.numel())
    paged, plain = io.BytesIO(), io.BytesIO()
    torch.save(found[3], paged)
    torch.save(found[3].clone(), plain)
    assert len(paged.getvalue()) == len(plain.getvalue())
    if kind.paged:
        made.move(made.layout.pages - resident)
        assert all((tensor == number + 1).all() for number, tensor in enumerate(found))


@pytest.mark.exclusive
def test_the_range_goes_with_its_last_tensor() -> None:
    torch.zeros(1, device="cuda")
    made = arena(MappedArena, 99)
    found = views(made)
    found[4].fill_(3)
    kept, nbytes = found[4], made.layout.nbytes
    gc.collect()
    torch.cuda.synchronize()
    held = torch.cuda.mem_get_info()[0]
    del made, found
    gc.collect()
    assert torch.cuda.mem_get_info()[0] <= held + (1 << 20)
    assert (kept == 3).all()
    torch.cuda.synchronize()
    held = torch.cuda.mem_get_info()[0]
    del kept
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= held + nbytes - (1 << 20)


# --- on the current stream, without waiting, and in managed memory -------------------------------


def test_managed_state_is_managed_and_survives_the_optimizer() -> None:
    params, opt = trained(2, placement="managed")
    report = opt.memory_report()
    assert (report.placement, set(report.by_place)) == ("managed", {"device"})
    state = opt.state[params[0]]["exp_avg"]
    d = driver.bindings()
    kind = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED
    assert driver.check("cuPointerGetAttribute", d.cuPointerGetAttribute(kind, state.data_ptr()))
    expected = state.clone()
    del opt
    torch.cuda.synchronize()
    assert torch.equal(state, expected)


def test_step_does_not_synchronize_nor_allocate() -> None:
    _, opt = trained(6, gaps=False)  # more steps than the ring of tables has places
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronizing():
        for _ in range(3):
            opt.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_of_another_device_than_the_current_one() -> None:
    params = [torch.nn.Parameter(torch.ones(1000, device=f"cuda:{i}")) for i in (1, 0, 1)]
    opt = PagedAdamW(params, lr=0.5, weight_decay=0.0)
    step_on_ones(opt)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert all(torch.allclose(p, torch.full_like(p, 0.5)) for p in params)
