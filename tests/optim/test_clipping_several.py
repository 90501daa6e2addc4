"""The norm of shards is that of whole tensors, on every process, empty shards too."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from processes import on_devices, together

from pagedopt import PagedAdamW

dist, tensors = torch.distributed, pytest.importorskip("torch.distributed.tensor")


#: Shapes, with a placement for each dimension of the mesh: a shard of dimension 0, or a replica.
PLACED = {
    "1-d": ((2,), [((33, 5), "S"), ((1,), "S"), ((7, 3), "R"), ((64,), "S"), ((9,), "")]),
    "2-d": ((2, 2), [((33, 5), "SR"), ((40, 3), "RS"), ((6, 8), "SS"), ((5,), "RR"), ((9,), ""), ((1,), "SR")]),
    "replicas alone": ((2,), [((7, 3), "R"), ((5,), "R")]),
    "a process without a part": ((2, 2), [((7, 3), "RS"), ((8,), "RS")]),
}
NORM = 1.5


def whole(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clipped(device: str, name: str) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters after three steps, whole, and the norms."""
    sizes, placed = PLACED[name]
    mesh = dist.init_device_mesh(device, sizes)

    def place(tensor: torch.Tensor, how: str) -> torch.Tensor:
        dims = {"S": tensors.Shard(0), "R": tensors.Replicate()}
        here = tensor.to(device)
        return tensors.distribute_tensor(here, mesh, [dims[each] for each in how]) if how else here

    params = [torch.nn.Parameter(place(whole(i, shape), how)) for i, (shape, how) in enumerate(placed)]
    optimizer = PagedAdamW(params, lr=0.03, max_grad_norm=NORM)
    norms = []
    for step in range(3):
        for i, (p, (shape, how)) in enumerate(zip(params, placed, strict=True)):
            p.grad = None if step == 1 and i == 2 else place(whole(100 * step + i, shape), how)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))  # type: ignore[arg-type]
    ends: list[Any] = [p.detach() for p in params]
    return [p.full_tensor() if isinstance(p, tensors.DTensor) else p for p in ends], norms


def oracle(name: str) -> tuple[list[torch.Tensor], list[float]]:
    """The same of whole tensors, with torch's step; norms are exact sums."""
    _, placed = PLACED[name]
    params = [torch.nn.Parameter(whole(i, shape)) for i, (shape, _) in enumerate(placed)]
    optimizer, norms = torch.optim.AdamW(params, lr=0.03), []
    for step in range(3):
        for i, (p, (shape, _)) in enumerate(zip(params, placed, strict=True)):
            p.grad = None if step == 1 and i == 2 else whole(100 * step + i, shape)
        squares = [x * x for p in params if p.grad is not None for x in p.grad.double().flatten().tolist()]
        norms.append(math.sqrt(math.fsum(squares)))
        torch.nn.utils.clip_grad_norm_(params, NORM)
        optimizer.step()
    return [p.detach() for p in params], norms


def sharded(device: str) -> torch.nn.Module:
    """A model of FSDP2."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 1)).to(device)
    fully_shard(model, mesh=dist.init_device_mesh(device, (dist.get_world_size(),)))
    return model


def of_fsdp(device: str) -> tuple[float, float]:
    """The norm of a model that is sharded by FSDP2: ours, and torch's."""
    model = sharded(device)
    optimizer = PagedAdamW(model.parameters(), lr=0.03, max_grad_norm=0.01)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(5, 7, device=device)).square().mean().backward()
    optimizer.step()
    theirs: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return float(optimizer.grad_norm), float(theirs.full_tensor())  # type: ignore[arg-type]


def scaled(device: str, fused: bool | None) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Parameters of a model of FSDP2 after steps of a scaler, whole; its scales, and the step counts.

    Ours if ``fused`` is not None, else torch's.  In the third step a gradient of the last process is infinite.
    """
    model = sharded(device)
    kind: Any = torch.optim.AdamW if fused is None else PagedAdamW
    optimizer = kind(model.parameters(), lr=0.03, fused=fused)
    scaler, scales = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 7, generator=generator).to(device)).square().mean()).backward()
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            grad: Any = next(model.parameters()).grad
            grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    ends: list[Any] = [p.detach() for p in model.parameters()]
    return [p.full_tensor() for p in ends], scales, [float(entry["step"]) for entry in optimizer.state.values()]


# --- what each process does, beside the same of whole tensors ---------------------------------------------------------


def check(name: str, device: str, world: int) -> None:
    found = together("tests.optim.test_clipping_several.clipped", world, device, name)
    want, norms = oracle(name)
    for ends, its_norms in found:
        assert its_norms == pytest.approx(norms, rel=1e-14)
        assert its_norms == found[0][1], "each process has the same bits"
        for ours, theirs in zip(ends, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["1-d", "replicas alone"])
@on_devices(2)
def test_shards_of_two_processes(name: str, device: str) -> None:
    check(name, device, 2)


@pytest.mark.parametrize("name", ["2-d", "a process without a part"])
@on_devices(4)
def test_shards_of_a_mesh_of_two_dimensions(name: str, device: str) -> None:
    check(name, device, 4)


@on_devices(2)
def test_a_model_of_fsdp(device: str) -> None:
    for ours, theirs in together("tests.optim.test_clipping_several.of_fsdp", 2, device):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert ours > 0.01


@functools.cache
def scaled_by_torch(device: str) -> list[Any]:
    return together("tests.optim.test_clipping_several.scaled", 2, device, None)


@pytest.mark.parametrize("fused", [False, True])
@on_devices(2)
def test_all_processes_skip_what_is_infinite_in_one(fused: bool, device: str) -> None:
    """torch adds ``found_inf`` over the mesh before the step."""
    found = together("tests.optim.test_clipping_several.scaled", 2, device, fused)
    for (ends, scales, counts), (others, their_scales, their_counts) in zip(
        found, scaled_by_torch(device), strict=True
    ):
        assert (scales, counts) == (their_scales, their_counts)
        assert set(counts) == {4.0}
        for ours, theirs in zip(ends, others, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
