"""Clipping inside of the step: beside ``clip_grad_norm_`` and a step, and beside float64.

Clipped steps between which users do what they like are in ``test_acts.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from support import BF16, F16, F32, F64, threads

from pagedopt import PagedAdamW, PagedLion, PagedSGD
from pagedopt.optim import clip as meshes
from pagedopt.optim.plan import Step
from tests.acts import absent, infinite, norm
from tests.loads import load
from tests.optim.clipped import give, params_of
from tests.specs import CASES
from tests.world import INT8, QUICK, RESIDENT, SIDES, SPILLED, Side, World, Worlds, assert_same_bits, one_group


@pytest.mark.parametrize("clip", [0.5, 1e4, math.inf], ids=["below the norm", "above it", "infinite"])
@pytest.mark.parametrize("name", CASES)
def test_clipped_steps_are_torch_s(name: str, clip: float) -> None:
    assert not Worlds(CASES[name], *SIDES, clip=clip).step(4).over


@pytest.mark.parametrize("sides", [INT8, (RESIDENT, SPILLED)], ids=["int8", "plain"])
def test_flushing_denormals_loses_no_address(sides: Any) -> None:
    """A table holds the address of the factor as a float64, which is a denormal number."""
    usual = Worlds(CASES["adamw"], *sides, clip=0.5).step(3)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        flushed = Worlds(CASES["adamw"], *sides, clip=0.5).step(3)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(usual.ours[0], flushed.ours[0])


def test_the_norm_is_set_between_steps_and_taken_away() -> None:
    worlds = Worlds(CASES["adamw"], *SIDES).step(3)
    for clip in (1.0, 0.5, None, 2.0):
        assert not worlds.do(norm(lambda _, clip=clip: clip)).step(2).over  # type: ignore[misc]
        assert [world.optimizer.max_grad_norm for world in worlds.ours] == [clip] * len(SIDES)


@pytest.mark.parametrize("threads_of_torch", [1, 2])
def test_no_number_of_threads_changes_a_bit(threads_of_torch: int) -> None:
    large = lambda device: params_of((300_000, 70_000))  # noqa: E731
    worlds = []
    for count in (1, threads_of_torch):
        with threads(count):
            worlds.append(Worlds(CASES["adamw"], RESIDENT, make=large, groups=one_group, clip=1.0).step(1).ours[0])
    assert_same_bits(*worlds)
    assert worlds[0].norm.item() == pytest.approx(norm_of(p.grad for p in worlds[0].params), rel=1e-14)


def norm_of(grads: Iterable[torch.Tensor]) -> float:
    """The oracle: exact sums of squares."""
    flat = torch.cat([torch.view_as_real(g).flatten() if g.is_complex() else g.flatten().double() for g in grads])
    return math.sqrt(math.fsum((flat.double() * flat.double()).tolist()))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_in_16_bits_it_is_nearer_to_float64_than_torch(dtype: torch.dtype) -> None:
    """The first step of SGD with momentum stores the clipped gradient."""
    mine, other = params_of(dtype=dtype), params_of(dtype=dtype)
    a, b = PagedSGD(mine, lr=0.5, momentum=0.9, max_grad_norm=3.0), torch.optim.SGD(other, lr=0.5, momentum=0.9)
    give(mine, 0)
    give(other, 0)
    norm = norm_of(p.grad for p in mine)
    exact = [p.grad.double() * (3.0 / (norm + 1e-6)) for p in mine]
    a.step()
    torch.nn.utils.clip_grad_norm_(other, 3.0)
    b.step()
    assert a.grad_norm.item() == pytest.approx(norm, rel=1e-14)
    off = [
        sum((o.state[p]["momentum_buffer"].double() - e).abs().sum() for p, e in zip(params, exact, strict=True))
        for o, params in ((a, mine), (b, other))
    ]
    assert off[0] < off[1]


def test_squares_beyond_float32_are_added() -> None:
    params = params_of((5, 9))
    for p in params:
        p.grad = torch.full_like(p, 1e25)
    optimizer = PagedSGD(params, lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(1e25 * math.sqrt(14))


def test_gradients_are_not_written() -> None:
    params = params_of()
    give(params, 1, 50.0)
    before = [p.grad.clone() for p in params]
    PagedAdamW(params, max_grad_norm=0.1).step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))


def test_norms_of_steps_are_tensors_of_their_own() -> None:
    params = params_of()
    optimizer = PagedAdamW(params, max_grad_norm=1.0)
    norms = []
    for seed in range(3):
        give(params, seed, seed + 1.0)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert norms[0] < norms[1] < norms[2]


def of_rules(params: Any) -> Any:
    """Groups of two rules."""
    return [{"params": params[:1]}, {"params": params[1:3], "amsgrad": True}, {"params": params[3:], "lr": 0.5}]


def twice(params: Any) -> Any:
    return [{"params": [*params[:2], params[0]]}, {"params": params[2:], "lr": 0.5}]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("dtypes", [[F32], [F32, BF16, F64, torch.complex64]], ids=["one", "several"])
@pytest.mark.parametrize("groups", [of_rules, twice])
def test_all_groups_have_one_norm_of_float64_in_which_a_parameter_counts_once(groups: Any, dtypes: Any) -> None:
    case = dataclasses.replace(CASES["adamw"], theirs=CASES["adamw"].theirs if len(dtypes) == 1 else None)
    for world in Worlds(case, *SIDES[:3], groups=groups, dtypes=dtypes, clip=1.0).step(3).ours:
        assert world.norm.item() == pytest.approx(norm_of(p.grad for p in world.params), rel=1e-14)


def test_without_any_gradient_nothing_happens() -> None:
    """In a first step, later, and over loaded state."""
    worlds, none = Worlds(CASES["adamw"], *SIDES, clip=1.0), absent(lambda _: range(6))
    worlds.step(1, none)
    assert [(len(world.state), world.norm) for world in worlds.ours] == [(0, 0)] * len(SIDES)
    worlds.step(1).step(1, none).do(load(copy.deepcopy)).step(1, none).step(1, absent(lambda _: range(1, 6)))
    assert not worlds.over


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite(value: float, device: str) -> None:
    worlds = Worlds(CASES["momentum"], *SIDES, clip=1.0, device=device).step(9, infinite(6, value=value))
    assert worlds.ours[0].quick >= 4 * QUICK
    assert not worlds.over


def test_an_optimizer_of_no_parameters_steps() -> None:
    optimizer = PagedAdamW([{"params": []}], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == 0


# --- norms and steps that are refused: nothing has changed then -------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, math.nan, -math.inf])
def test_numbers_that_are_no_norm_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"max_grad_norm is {value}; it must be above 0; None: gradients are not"):
        PagedAdamW(params_of(), max_grad_norm=value)
    optimizer = PagedAdamW(params_of(), max_grad_norm=3)
    with pytest.raises(ValueError, match="must be above 0"):
        optimizer.max_grad_norm = value
    assert optimizer.max_grad_norm == 3.0


@pytest.mark.parametrize("value", ["1.0", True, torch.tensor(1.0), [1.0]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"max_grad_norm is .*; it must be a number above 0, or None"):
        PagedAdamW(params_of(), max_grad_norm=value)


@pytest.mark.parametrize("taken", [0, 9], ids=["the first", "a quick one"])
def test_a_step_within_a_backward_pass_is_refused(taken: int) -> None:
    """An optimizer for each parameter steps there: it would clip by a norm of its own."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = PagedSGD([p], lr=0.1, max_grad_norm=1.0)
    for _ in range(taken):
        p.grad = torch.zeros(3)
        optimizer.step()
    p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"max_grad_norm is 1.0, and step\(\) was called within a backward pass"):
        (p * 2).sum().backward()
    assert torch.equal(p, torch.ones(3))
    optimizer.max_grad_norm = None
    (p * 2).sum().backward()
    assert not torch.equal(p, torch.ones(3))


# --- what an adversary found in clipping: norms set at an odd moment, and shards that were taken for replicas ---------


def test_a_norm_that_is_set_while_a_step_runs_holds_from_the_next_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running step ends behind it, and leaves its record: that of a step which does not clip."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    params[0].grad = torch.full((4,), 10.0)
    optimizer = PagedSGD(params, lr=1.0)
    run = Step.run

    def run_and_set(step: Step) -> Any:
        optimizer.max_grad_norm = 1e-3
        return run(step)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", run_and_set)
        optimizer.step()
    before = params[0].detach().clone()
    for _ in range(3):
        optimizer.step()
    assert (params[0].detach() - before).norm() <= 3.1e-3
    assert optimizer.grad_norm is not None


def test_the_last_norm_outlives_another_one_to_clip_to() -> None:
    params = [torch.nn.Parameter(torch.zeros(4))]
    params[0].grad = torch.ones(4)
    optimizer = PagedAdamW(params, fused=True, max_grad_norm=1.0)
    optimizer.step()
    optimizer.max_grad_norm = None
    optimizer.grad_scale = torch.ones(())
    optimizer.step()
    assert optimizer.grad_norm == 2.0


def test_a_tensor_sharded_twice_counts_in_each_process() -> None:
    """torch's ``_StridedShard``, of FSDP2 over tensor parallel, says that it is no shard."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    class Coordinates:
        def get_coordinate(self) -> list[int]:
            return [1, 0]

    class Sharded:
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        device_mesh = Coordinates()

    class Replicated(Sharded):
        placements = (Replicate(), Shard(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "is_sharded", lambda _: True)
        mesh = next(iter(meshes.meshes_of([Sharded()]).values()))  # type: ignore[list-item]
    assert mesh.dims == (0, 1)
    assert mesh.counts(Sharded())  # type: ignore[arg-type]
    assert not mesh.counts(Replicated())  # type: ignore[arg-type]


# --- steps whose norm is not finite are left out: as under an `if` in front of torch's --------------------------------


LOST = {0: math.inf, 3: math.nan, 4: -math.inf}


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


def test_what_does_not_go_with_leaving_steps_out_is_refused() -> None:
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
