"""Checkpoints on a GPU: neither saving nor loading moves or takes pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, settled
from optim_support import through_file
from torch.multiprocessing import reductions

from pagedopt import PagedAdamW
from pagedopt.optim.load import STAGING_BYTES
from pagedopt.paging.pages import GRANULE
from tests.world import give, numbers

pytestmark = NEEDED

MIB = 1 << 20
SHAPES = ((1023, 1025), (1500, 1001), (7,), (1 << 19,))
STATE_BYTES = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)
PLACES: dict[str, dict[str, Any]] = {
    "device": {"placement": "device"},
    **{
        f"{placement} {share}": {"placement": placement, "device_budget": int(share * STATE_BYTES)}
        for placement, share in itertools.product(("mapped", "managed"), (0, 0.5, 2))
    },
    "managed-driver": {"placement": "managed-driver"},
    "host": {"placement": "host"},
    "host 0": {"placement": "host", "device_budget": 0},
}


def optimizer(params: list[torch.nn.Parameter], name: str) -> Any:
    """One of two groups whose state is in a place."""
    groups = [{"params": params[1:], "lr": 0.02, "weight_decay": 0.3}, {"params": params[:1], "betas": (0.8, 0.9)}]
    return PagedAdamW(groups, **PLACES[name])


def train(params: list[torch.nn.Parameter], opt: Any, first: int, count: int) -> None:
    """One parameter has no gradient, another one in each step."""
    for step in range(first, first + count):
        give(params, step, skip=(step % 3,))
        opt.step()


def used() -> int:
    """Bytes of the device that are taken, torch's cache emptied."""
    settled()
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that torch has of the first device during ``work``, beyond those before."""
    torch.cuda.reset_peak_memory_stats(0)
    allocated = torch.cuda.memory_allocated(0)
    work()
    return torch.cuda.max_memory_allocated(0) - allocated


def trained(name: str) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(numbers(shape, i, "cuda")) for i, shape in enumerate(SHAPES)]
    opt = optimizer(params, name)
    train(params, opt, 0, 2)
    return params, opt


def saved_as(form: Callable[[torch.Tensor], torch.Tensor], name: str) -> tuple[list[torch.nn.Parameter], Any, Any]:
    """Parameters, their optimizer, and a checkpoint whose state has another form."""
    params, opt = trained(name)
    saved: Any = through_file(opt.state_dict(), map_location="cpu")
    for entry in saved["state"].values():
        entry.update({k: form(v) for k, v in entry.items() if k != "step"})
    return params, opt, saved


@pytest.mark.exclusive
@pytest.mark.parametrize("name", PLACES)
def test_saving_moves_no_page_and_takes_no_device_memory(name: str, tmp_path: Path) -> None:
    _, opt = trained(name)
    before, taken = opt.memory_report(), used()
    assert peak_of(lambda: torch.save(opt.state_dict(), tmp_path / "state.pt")) == 0
    assert used() - taken <= 2 * MIB  # other processes have the device too
    after = opt.memory_report()
    assert (after.by_place, after.measured) == (before.by_place, before.measured)
    # Two arenas, because one parameter had its first gradient later, with two sections of granules each.
    assert (tmp_path / "state.pt").stat().st_size <= STATE_BYTES + 4 * GRANULE + MIB


FORMS = {
    "as saved": lambda t: t,
    "in another layout": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "narrower": lambda t: t.bfloat16(),
    "on the device, narrower": lambda t: t.bfloat16().cuda(),
}


@pytest.mark.exclusive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLACES)
def test_loading_keeps_addresses_and_places_and_takes_at_most_a_chunk(name: str, form: str) -> None:
    params, opt, saved = saved_as(FORMS[form], name)
    train(params, opt, 2, 1)
    before, taken = opt.memory_report(), used()
    addresses = [t.data_ptr() for p in params for k, t in opt.state[p].items() if k != "step"]
    assert peak_of(lambda: opt.load_state_dict(saved)) <= STAGING_BYTES
    assert used() - taken <= 2 * MIB
    assert [t.data_ptr() for p in params for k, t in opt.state[p].items() if k != "step"] == addresses
    after = opt.memory_report()
    assert after.by_place == before.by_place
    for place, nbytes in before.measured.items():
        assert abs(after.measured[place] - nbytes) <= 0.02 * STATE_BYTES, after
    for i, p in enumerate((*params[1:], *params[:1])):
        for k in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][k].cpu(), saved["state"][i][k].float().cpu())


@pytest.mark.exclusive
@pytest.mark.parametrize("form", ["as saved", "narrower"])
@pytest.mark.parametrize("name", PLACES)
def test_a_resumed_run_needs_no_more_than_a_fresh_one(name: str, form: str) -> None:
    """Peak of torch's memory from the optimizer's start to its first step, and what is taken of the device then.

    All that is taken and not what was added, and the best of some runs in turn: the driver keeps room of freed managed
    memory for as long as it likes.
    """
    params, opt, saved = saved_as(FORMS[form], name)
    del opt
    peaks: dict[bool, list[int]] = {False: [], True: []}
    ends: dict[bool, list[int]] = {False: [], True: []}
    for load in (False, True) * 3:
        for p in params:
            p.grad = torch.ones_like(p)
        used()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        opt = optimizer(params, name)
        if load:
            opt.load_state_dict(saved)
        opt.step()
        peaks[load].append(torch.cuda.max_memory_allocated() - allocated)
        ends[load].append(used())
        del opt
    assert max(peaks[True]) <= min(peaks[False]) + STAGING_BYTES, peaks
    if name != "device":  # tensors of torch's own may lie otherwise among gradients, in other segments of its allocator
        assert min(ends[True]) <= max(ends[False]) + 2 * MIB, ends


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["device", "mapped 0.5", "host"])
def test_state_comes_from_another_device_without_room_on_this_one(name: str) -> None:
    params, opt, saved = saved_as(lambda t: t.bfloat16().to("cuda:1"), name)
    assert peak_of(lambda: opt.load_state_dict(saved)) == 0
    for i, p in enumerate((*params[1:], *params[:1])):
        assert torch.equal(opt.state[p]["exp_avg"].cpu(), saved["state"][i]["exp_avg"].float().cpu())


@pytest.mark.parametrize("name", [name for name in PLACES if name != "device"])
def test_what_is_sent_is_memory_that_torch_has_a_handle_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a queue of ``torch.multiprocessing``: seen is what torch's own reduction is given."""
    params, opt = trained(name)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (sent.append(tensor), (int, ()))[1])
    state = [value for p in params for value in opt.state[p].values() if value.is_cuda]
    for value in state:
        ForkingPickler.dumps(value)
    torch_own = {block["address"] for s in torch.cuda.memory_snapshot() for block in s["blocks"]}
    assert all(torch.equal(a, b) for a, b in zip(sent, state, strict=True))
    assert {t.untyped_storage().data_ptr() for t in sent} <= torch_own
    assert not any(a is b for a, b in zip(sent, state, strict=True))
