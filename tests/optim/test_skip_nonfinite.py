"""Steps whose norm is not finite are left out: beside torch under a plain ``if``, and where that is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW, PagedLion
from tests.optim.clipped import ends, equal, give, params_of
from tests.specs import CASES
from tests.world import INT8, SIDES, Side, World, Worlds

LOST = {0: math.inf, 3: math.nan, 4: -math.inf}
PAGED = {"device_budget": 0}


def lose(world: World) -> None:
    """A value that is not finite in some steps; the last parameter's gradients come late."""
    world.params[1].grad.view(-1)[3] = LOST.get(world.count, 0.5)  # type: ignore[union-attr]
    if world.count < 2:
        world.params[-1].grad = None


@pytest.mark.parametrize("clip", [1.0, math.inf])
@pytest.mark.parametrize("sides", [(*SIDES, Side("fused", {"fused": True})), INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_it_is_a_step_behind_an_if(name: str, sides: Any, clip: float) -> None:
    worlds = Worlds(CASES[name], *sides, clip=clip, skips=True).step(6, lose)
    assert not worlds.over
    assert [world.optimizer.skipped for world in worlds.ours] == [len(LOST)] * len(sides)
    counts = [t.item() for world in worlds.ours for (i, name), t in world.tensors().items() if name == "step"]
    assert set(counts) <= {2, 3}


def test_a_scaler_and_the_norm_both_leave_steps_out() -> None:
    """An overflow that the scaler does not see is the norm's: its own unscaled gradient is finite."""
    params = params_of()
    optimizer = PagedAdamW(params, fused=True, max_grad_norm=1.0, skip_nonfinite=True)
    for number, found_inf in enumerate([0.0, 0.0, 1.0, 0.0]):
        give(params, number)
        if number in (1, 2):
            params[0].grad[5] = math.inf
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2
    assert optimizer.skipped == 2
    assert torch.isfinite(params[0]).all()


def test_the_forward_hides_no_step_that_is_left_out() -> None:
    models = [torch.nn.Linear(30, 30) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [PagedAdamW(m.parameters(), max_grad_norm=1.0, skip_nonfinite=True, **PAGED) for m in models]
    optimizers[0].attach(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(5):
            optimizer.zero_grad()
            x = torch.full((2, 30), math.inf if number == 2 else float(number))
            model(x).sum().backward()
            optimizer.step()
        optimizer.wait()
        assert optimizer.skipped == 1
    assert equal(*(ends(m.parameters(), o) for m, o in zip(models, optimizers, strict=True)))


def test_what_does_not_go_with_it_is_refused() -> None:
    said = r"max_grad_norm is None, and skip_nonfinite=True leaves out steps by their norm; give max_grad_norm a number"
    with pytest.raises(ValueError, match=said):
        PagedAdamW(params_of(), skip_nonfinite=True)
    with pytest.raises(TypeError, match="skip_nonfinite is 1; it must be True or False"):
        PagedAdamW(params_of(), max_grad_norm=1.0, skip_nonfinite=1)
    optimizer = PagedLion(params_of(), max_grad_norm=1.0, skip_nonfinite=True)
    with pytest.raises(ValueError, match=said):
        optimizer.max_grad_norm = None
    assert optimizer.max_grad_norm == 1.0
    model = torch.nn.Linear(3, 3)
    optimizer = PagedLion(model.parameters(), max_grad_norm=1.0, skip_nonfinite=True)
    with pytest.raises(ValueError, match="the norm of all gradients is known after the backward"):
        optimizer.attach(model, overlap="backward")


def test_a_copy_leaves_out_steps_and_counts_its_own() -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0, skip_nonfinite=True)
    copies = [optimizer, copy.deepcopy(optimizer)]
    for p in copies[1].param_groups[0]["params"]:
        p.grad = torch.full_like(p, math.nan)
    copies[1].step()
    assert [each.skipped for each in copies] == [0, 1]
