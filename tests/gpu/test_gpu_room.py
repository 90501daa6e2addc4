"""Room on demand, and what happens when there is none: guards, failures half-way, leaks."""

from __future__ import annotations

import gc
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, all_of_the_card_in_the_end, everything, least, parameters, same, settled, steps, trained
from optim_support import ADAMW

from pagedopt import PagedAdamW, run_with_room
from pagedopt.paging import policy
from pagedopt.placements import choose
from pagedopt.system import driver, virtual

pytestmark = [*NEEDED, pytest.mark.exclusive]

MiB = 1 << 20


def available() -> int:
    """MemAvailable in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def known_to_the_driver(address: int) -> bool:
    """Whether an address is in memory that was allocated through the driver, and not freed.

    MemAvailable does not tell: other programs of the machine move it, and pages that one core freed are in no count.
    """
    d = driver.bindings()
    code = d.cuPointerGetAttribute(d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)[0]
    assert code in (d.CUresult.CUDA_SUCCESS, d.CUresult.CUDA_ERROR_INVALID_VALUE)
    return bool(code == d.CUresult.CUDA_SUCCESS)


@pytest.mark.parametrize("placement", ["mapped", "managed", "managed-driver"])
def test_spill_gives_room_and_unspill_takes_it(placement: str) -> None:
    params, opt = trained(3, placement=placement)
    before, total = everything(params, opt), sum(opt.memory_report().by_place.values())
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    given = opt.spill("10MiB")
    assert 10 * MiB <= given <= 10 * MiB + int(opt.store.arenas[0].layout.page_bytes().max())
    if placement == "mapped":  # managed memory keeps room it does not use until somebody asks for it
        assert torch.cuda.mem_get_info()[0] - free >= given - 2 * MiB
    assert opt.memory_report().measured["host"] >= 0.98 * given
    with opt.spilled():
        assert opt.memory_report().by_place == {"host": total}
        assert same(before, everything(params, opt))
    assert opt.memory_report().by_place == {"device": total}
    assert same(before, everything(params, opt))


def test_auto_gives_state_what_the_cap_leaves_and_follows_it() -> None:
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        pytest.skip("this torch does not say how much the process may take")
    params = parameters()
    steps(params, PagedAdamW(params, lr=0.0), 1, gaps=False)  # gradients are there, kernels loaded
    settled()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.mem_get_info()[1]

    def cap(left: int) -> None:
        held = torch.cuda.memory_reserved() + policy.AUTO_MIN
        torch.cuda.set_per_process_memory_fraction((held + left) / total)

    opt = PagedAdamW(params, device_budget="auto", **ADAMW)
    with all_of_the_card_in_the_end():
        cap(24 * MiB)
        opt.step()
        assert 16 * MiB <= opt.memory_report().by_place["device"] <= 24 * MiB
        torch.cuda.set_per_process_memory_fraction(1.0)
        for _ in range(2):
            opt.step()
        assert set(opt.memory_report().by_place) == {"device"}
        torch.cuda.empty_cache()
        cap(8 * MiB + sum(opt.memory_report().by_place.values()) // 2)
        for _ in range(4):
            opt.step()
        assert opt.memory_report().by_place["host"] > 0


@pytest.mark.exclusive("host")
@pytest.mark.parametrize("what", ["device", "host"])
def test_an_allocation_that_fails_half_way_leaves_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    for p in params:
        p.grad = torch.ones_like(p)
    opt = PagedAdamW(params, device_budget="20MiB", **ADAMW)
    before = [p.detach().clone() for p in params]
    gc.collect()
    torch.cuda.synchronize()
    free, room = torch.cuda.mem_get_info()[0], available()
    create, asked = virtual.Range._create, list[str]()

    def failing(self: virtual.Range, nbytes: int, where: driver.Location) -> Any:
        asked.append(where.value)
        if asked[-1] == what and asked.count(what) == 3:
            raise driver.CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        return create(self, nbytes, where)

    monkeypatch.setattr(virtual.Range, "_create", failing)
    with pytest.raises(torch.OutOfMemoryError if what == "device" else MemoryError, match="device_budget"):
        opt.step()
    monkeypatch.undo()
    gc.collect()
    assert abs(torch.cuda.mem_get_info()[0] - free) <= 2 * MiB
    assert available() > room - 24 * MiB
    assert not opt.state
    assert same([p.detach().cpu() for p in params], [b.cpu() for b in before])
    assert float(torch.ones(3, device="cuda").sum()) == 3  # the error state is clean
    opt.step()
    assert opt.memory_report().by_place["host"] > 0


@pytest.mark.exclusive("host")
@pytest.mark.parametrize(
    "options",
    [{}, {"placement": "host"}, {"device_budget": "20MiB"}, {"device_budget": "20MiB", "placement": "managed"}],
    ids=str,
)
def test_a_hundred_optimizers_leave_memory_as_it_was(options: dict[str, Any]) -> None:
    for _ in range(3):
        trained(1, gaps=False, **options)
    settled()
    # Managed memory keeps the room of the last optimizer for the next; a leak would be a hundred times that.
    used = 48 * MiB
    of_the_card = used if options.get("placement") == "managed" else 2 * MiB

    def beyond() -> int:
        """Bytes by which a hundred rounds take more of anything than they may; 0 or less if none does."""
        free, room, managed = torch.cuda.mem_get_info()[0], available(), driver.managed_bytes(0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(100):
            trained(1, gaps=False, **options)
        settled()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < used // 1024
        assert driver.managed_bytes(0) == managed
        return max(free - torch.cuda.mem_get_info()[0] - of_the_card, room - available() - used)

    assert least(beyond, 0) <= 0


@pytest.mark.parametrize("placement", ["mapped", "managed", "host"])
def test_state_outlives_the_optimizer_and_is_freed_with_its_last_tensor(placement: str) -> None:
    free = torch.cuda.mem_get_info()[0]
    params, opt = trained(2, shapes=((16 << 20,),) * 2, gaps=False, placement=placement, device_budget=0)
    state = opt.state[params[0]]["exp_avg"]
    address, expected = state.data_ptr(), state.clone()
    del opt, params
    gc.collect()
    assert torch.equal(state, expected)
    assert known_to_the_driver(address)
    del state, expected
    gc.collect()
    torch.cuda.empty_cache()
    assert not known_to_the_driver(address)
    assert abs(torch.cuda.mem_get_info()[0] - free) <= 4 * MiB


@pytest.mark.exclusive("host")
def test_no_power_of_two_is_asked_for() -> None:
    elements = (33 << 20) // 4 * 3  # 99 MiB a section
    params = parameters(shapes=((elements,),))
    for options in ({"device_budget": 0}, {"placement": "host"}, {"placement": "managed", "device_budget": 0}):
        room = available()
        opt = PagedAdamW(params, **options, **ADAMW)
        steps(params, opt, 1, gaps=False)
        asked = 8 * elements
        assert sum(opt.memory_report().by_place.values()) <= 1.02 * asked
        assert room - available() <= 1.02 * asked + 16 * MiB
        del opt
        gc.collect()


def test_a_batch_that_does_not_fit_beside_the_state_fits_without() -> None:
    if not choose.moves_on_demand(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no pages that move")
    params, opt = trained(1, shapes=((8 << 20,),) * 4, gaps=False)  # 256 MiB of state
    before = everything(params, opt)
    settled()
    share = (torch.cuda.memory_reserved() + 64 * MiB) / torch.cuda.mem_get_info()[1]
    filled = partial(torch.ones, 256 * MiB, dtype=torch.uint8, device="cuda")
    with all_of_the_card_in_the_end():
        torch.cuda.set_per_process_memory_fraction(share)
        with pytest.raises(torch.OutOfMemoryError):
            filled()
        assert run_with_room(opt, filled).all()
    assert same(before, everything(params, opt))
