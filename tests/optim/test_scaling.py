"""Steps under a ``GradScaler``: beside torch's fused step, and beside its default way, which unscales first."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from support import F16

from pagedopt import PagedAdamW, PagedSGD
from tests.acts import infinite, norm
from tests.specs import CASES
from tests.world import QUICK, SIDES, Act, Side, Worlds

WAYS = (*SIDES, Side("default", {"fused": None}), Side("not fused", {"fused": False}))


def unscaled(*steps: int) -> Act:
    """``unscale_`` is called in front of some steps."""
    return lambda world: world.count in steps and world.scaler.unscale_(world.optimizer)


@pytest.mark.parametrize(("clip", "before"), [(None, ()), (None, (1, 3)), (0.5, ())], ids=["", "unscaled", "clipped"])
@pytest.mark.parametrize("skipped", [(), (0, 3), (6, 7)], ids=str)
@pytest.mark.parametrize("name", ["adamw", "amsgrad", "momentum"])
def test_a_scaler_does_what_it_does_with_torch(name: str, skipped: Any, clip: float | None, before: Any) -> None:
    """torch's fused SGD leaves its momentum undefined if the first step is skipped; its default way does not."""
    worlds = Worlds(CASES[name], *WAYS, scale=1024.0, clip=clip)
    worlds.step(12, lambda world: (infinite(*skipped)(world), unscaled(*before)(world)))
    assert len({world.scaler.get_scale() for world in worlds.each()}) == 1
    assert not worlds.over
    assert before or worlds.ours[0].quick >= 5 * QUICK


def test_a_first_step_that_is_skipped_leaves_no_momentum() -> None:
    """The first one that is taken is not damped, whatever the optimizer has prepared anew between them."""
    worlds = Worlds(CASES["momentum"], *WAYS, scale=4.0).step(1, infinite(0)).do(norm(lambda _: 1e9))
    assert not worlds.step(2).over


def test_gradients_in_fp16_are_taken_and_stay_scaled() -> None:
    """Beside AdamW: torch's fused SGD for CPUs (2.11) updates only the last elements of a scaled tensor in 16 bits."""
    mine, other = (torch.nn.Parameter(torch.ones(17, dtype=F16)) for _ in range(2))
    for kind, p in ((PagedAdamW, mine), (torch.optim.AdamW, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale((p.float() * torch.linspace(-1, 1, 17)).sum()).backward()
        scaler.step(kind([p], fused=True, lr=0.125))
    assert torch.equal(mine.grad, (other.grad.float() * 64).half()), "torch's fused step has unscaled them"
    torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


def test_a_scale_of_ones_own_is_multiplied() -> None:
    """GradScaler multiplies what ``grad_scale`` holds into its scale."""
    found = []
    for kind in (PagedAdamW, torch.optim.AdamW):
        found += (params := [torch.nn.Parameter(torch.ones(5))])
        optimizer = kind(params, fused=True, lr=0.03)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale((params[0] * torch.arange(5.0) * 4).sum()).backward()
        optimizer.grad_scale = torch.tensor(4.0)
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_without_any_gradient_a_step_does_nothing() -> None:
    """GradScaler then gives the int 0 as ``found_inf``."""
    p = torch.nn.Parameter(torch.ones(5))
    optimizer, scaler = PagedAdamW([p], fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert torch.equal(p, torch.ones(5))
    assert not optimizer.state[p]


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("kind", [PagedAdamW, PagedSGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_groups_that_are_not_fused_refuse_a_scale(kind: Any, name: str) -> None:
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    optimizer = kind([p], lr=0.1)
    setattr(optimizer, name, torch.tensor(0.5))
    said = "" if kind is torch.optim.AdamW else "grad_scale"  # torch 2.6 says nothing
    with pytest.raises(AssertionError, match=said):
        optimizer.step()
    assert torch.equal(p, torch.ones(5))


@pytest.mark.parametrize(
    ("name", "value"), [("grad_scale", 2.0), ("found_inf", 1), ("grad_scale", torch.ones(2)), ("found_inf", "no")]
)
def test_what_is_no_tensor_of_one_number_is_refused(name: str, value: Any) -> None:
    p = torch.nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    optimizer = PagedAdamW([p], fused=True)
    setattr(optimizer, name, value)
    with pytest.raises(TypeError, match=rf"{name} is .*; it must be a tensor of one number, or None"):
        optimizer.step()
    assert torch.equal(p, torch.ones(5))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_unscaled_first_as_torchs(how: Any) -> None:
    for kind in (PagedAdamW, torch.optim.AdamW):
        optimizer = kind([torch.nn.Parameter(torch.ones(3))], fused=True)
        assert optimizer._step_supports_amp_scaling
        assert not getattr(how(optimizer), "_step_supports_amp_scaling", False)


def test_a_scaler_that_is_switched_off_leaves_the_plain_bits() -> None:
    """Behind scaled steps, too."""
    mine, other = [torch.nn.Parameter(torch.ones(50))], [torch.nn.Parameter(torch.ones(50))]
    a, b = PagedAdamW(mine, fused=True, lr=0.1), PagedAdamW(other, lr=0.1)
    for number in range(6):
        mine[0].grad = torch.randn(50, generator=torch.Generator().manual_seed(number))
        other[0].grad = mine[0].grad.clone()
        if number in (2, 3):
            mine[0].grad *= 16
            a.grad_scale, a.found_inf = torch.tensor(16.0), torch.tensor(0.0)
        a.step()
        if number in (2, 3):
            del a.grad_scale, a.found_inf
        b.step()
        assert torch.equal(mine[0], other[0]), "a power of two is divided without rounding"


def test_a_step_before_which_somebody_reads_its_schedule() -> None:
    """As with torch, a skipped step counts for a scheduler; nothing warns but for what torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = torch.nn.Parameter(torch.ones(5))
        optimizer, scaler = PagedAdamW([p], fused=True, lr=0.1), torch.amp.GradScaler("cpu")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for value in (1.0, float("inf"), 2.0):
            p.grad = None
            scaler.scale((p * value).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    assert optimizer.state[p]["step"] == 2
