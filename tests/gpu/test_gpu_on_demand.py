"""State that nobody placed, on a GPU: torch's own, until it has to move; and what the user is told when memory ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, settled
from optim_support import ADAMW, step_on_ones
from spill_support import everything, same, steps, trained

from pagedopt import PagedAdamW, estimate, run_with_room
from pagedopt.placements import choose

pytestmark = [*NEEDED, pytest.mark.exclusive]

MiB = 1 << 20


@pytest.fixture(autouse=True)
def pages() -> None:
    if not choose.moves_on_demand(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no pages that move")


# ---- it moves ----


def spilled(opt: PagedAdamW) -> None:
    total = opt.memory_report().by_place["device"]
    settled()
    allocated = torch.cuda.memory_allocated()
    assert opt.spill() == total
    assert allocated - torch.cuda.memory_allocated() >= total
    assert set(opt.memory_report().by_place) == {"host"}
    assert opt.memory_report().measured["host"] >= 0.98 * total


def spilled_in_part(opt: PagedAdamW) -> None:
    total = opt.memory_report().by_place["device"]
    assert 10 * MiB <= opt.spill("10MiB") <= 10 * MiB + 17_000_000, "a parameter's more at most"
    by_place = opt.memory_report().by_place
    assert by_place["device"] >= total - 10 * MiB - 17_000_000


def budgeted(opt: PagedAdamW) -> None:
    opt.set_device_budget("50%")
    by_place = opt.memory_report().by_place
    assert 0.5 <= by_place["host"] / sum(by_place.values()) <= 0.8


def given_room(opt: PagedAdamW) -> None:
    tried = []

    def crowded() -> None:
        tried.append(1)
        if opt.memory_report().by_place.get("device"):
            raise torch.OutOfMemoryError("no room yet")

    run_with_room(opt, crowded)
    assert len(tried) == 2
    assert set(opt.memory_report().by_place) == {"device"}


@pytest.mark.parametrize("access", [None, "in_place"])
@pytest.mark.parametrize("act", [spilled, spilled_in_part, budgeted, given_room])
def test_it_moves_when_it_has_to(act: Callable[[PagedAdamW], None], access: Any) -> None:
    params, opt = trained(3, host_access=access)
    assert opt.memory_report().placement == estimate(params).placement == "device"
    act(opt)
    steps(params, opt, 4, first=3)
    opt.spill()
    assert opt.memory_report().placement == "mapped"
    addresses = [t.data_ptr() for p in params for t in opt.state[p].values() if t.is_cuda]
    opt.set_device_budget("all")
    assert [t.data_ptr() for p in params for t in opt.state[p].values() if t.is_cuda] == addresses
    assert same(everything(params, opt), everything(*trained(7)))


def test_a_thousand_of_one_parameter_move() -> None:
    """As with an optimizer per parameter in the backward pass."""
    params = [torch.nn.Parameter(torch.full((700,), float(i), device="cuda")) for i in range(1000)]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizers = [PagedAdamW([p], **ADAMW) for p in params]
    for opt in optimizers:
        step_on_ones(opt)
    assert all(opt.spill() == 8 * 700 for opt in optimizers)
    assert sum(opt.memory_report().by_place.get("device", 0) for opt in optimizers) == 0
    for opt in optimizers:
        opt.step()
    whole = PagedAdamW(twins, **ADAMW)
    for _ in range(2):
        step_on_ones(whole)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


# ---- memory that ends ----


@pytest.fixture
def shortage() -> Iterator[Callable[[int], None]]:
    """Torch may have what it has now and so many bytes more."""

    def cap(more: int) -> None:
        settled()
        share = (torch.cuda.memory_reserved() + more) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)


def large(count: int = 1, **options: Any) -> tuple[list[torch.nn.Parameter], PagedAdamW]:
    """256 MiB of state."""
    return trained(count, shapes=((8 << 20,),) * 4, gaps=False, **options)


def filled(nbytes: int) -> int:
    """Ask for so much of the device for a moment."""
    return torch.ones(nbytes, dtype=torch.uint8, device="cuda").nbytes


def test_a_batch_that_does_not_fit_beside_the_state_fits_without(shortage: Callable[[int], None]) -> None:
    params, opt = large()
    before = everything(params, opt)
    shortage(64 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        filled(256 * MiB)
    assert run_with_room(opt, partial(filled, 256 * MiB)) == 256 * MiB
    assert same(before, everything(params, opt))


def test_the_note_beside_a_real_error_says_what_helps(shortage: Callable[[int], None]) -> None:
    _, opt = large()
    shortage(64 * MiB)

    def batch() -> int:
        with opt.guard():
            return filled(160 * MiB)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        batch()
    (note,) = caught.value.__notes__
    assert note.startswith("state holds 256 MiB here; device_budget='128MiB' frees 128 MiB and costs about ")
    assert note.endswith("set_device_budget('128MiB')")
    del caught
    opt.set_device_budget("128MiB")
    assert batch() == 160 * MiB
