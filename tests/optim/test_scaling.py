"""Steps under a ``GradScaler``: beside torch's fused step, and beside its default way, which unscales first."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Collection
from typing import Any

import pytest
import torch
from overlapped import SmallPages
from support import F16, F32

from pagedopt import PagedAdamW, PagedLion, PagedSGD
from tests.acts import infinite, norm
from tests.specs import CASES
from tests.world import QUICK, SIDES, Act, Side, Worlds

SIZES = (3000, 17, 1)


def train(
    kind: Any, *, infinite: Collection[int] = (), steps: int = 6, dtype: torch.dtype = F32, scale: float = 1024.0,
    **options: Any,
) -> tuple[list[Any], Any]:  # fmt: skip
    """Steps of a scaler; ``infinite``: those with a gradient that is."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]
    optimizer = kind(params, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    for number in range(steps):
        optimizer.zero_grad()
        loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
        scaler.scale(loss).backward()
        if number in infinite:
            params[0].grad[5] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    return params, optimizer


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


@pytest.mark.parametrize("options", [{}, {"device_budget": 0}, {"state_format": "int8"}, {"amsgrad": True}], ids=str)
def test_a_skipped_step_changes_no_bit(options: dict[str, Any]) -> None:
    params, optimizer = train(PagedAdamW, fused=True, steps=3, lr=0.1, **options)
    before = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(params, before[0], strict=True))
    now = optimizer.state_dict()["state"]
    for index, entry in before[1].items():
        assert all(torch.equal(now[index][name], value) for name, value in entry.items())


def test_gradients_stay_scaled_and_fp16_is_taken() -> None:
    """Beside AdamW: torch's fused SGD for CPUs (2.11) updates only the last elements of a scaled tensor in 16 bits."""
    mine, _ = train(PagedAdamW, fused=True, dtype=F16, steps=1, scale=64.0, lr=0.125)
    other, _ = train(torch.optim.AdamW, fused=True, dtype=F16, steps=1, scale=64.0, lr=0.125)
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p.grad, (q.grad.float() * 64).half()), "torch's fused step has unscaled them"
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def test_in_the_default_way_fp16_gradients_are_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        train(PagedSGD, dtype=F16, steps=1)


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


def test_lion_goes_the_default_way() -> None:
    params, optimizer = train(PagedLion, lr=0.1, infinite=(1,), steps=3)
    assert optimizer.state[params[0]]["exp_avg"].isfinite().all()


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


@pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")
@pytest.mark.parametrize("scaled", [False, True], ids=["clipped", "clipped and scaled"])
def test_under_the_forward_it_has_the_same_bits(scaled: bool) -> None:
    """On a CPU, where a queued launch is carried out by whoever waits; the fourth step is skipped."""

    def run(attached: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(3)
        layers = [each for _ in range(6) for each in (torch.nn.Linear(90, 90), torch.nn.Tanh())]
        model = torch.nn.Sequential(*layers)
        optimizer = PagedAdamW(
            model.parameters(), lr=0.03, fused=scaled or None, max_grad_norm=0.01, placement=SmallPages, device_budget=0
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
        found = []
        if attached:
            optimizer.attach(model)
        for step in range(7):
            loss = model(torch.randn(4, 90)).square().mean()
            scaler.scale(loss).backward()
            if scaled and step == 3:
                next(model.parameters()).grad[0, 0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(loss.detach())
            if not (scaled and step == 3):
                found.append(optimizer.grad_norm)
        optimizer.wait()
        state = [t for entry in optimizer.state.values() for t in entry.values()]
        return [*found, *(p.detach() for p in model.parameters()), *state], optimizer

    (plain, _), (hidden, optimizer) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, hidden, strict=True))
    assert optimizer.overlap_report().hidden > 10
