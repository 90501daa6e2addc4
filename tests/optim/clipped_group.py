"""Clipped steps of DTensors in several processes, beside the same steps of whole tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as tensors
from torch.distributed.device_mesh import init_device_mesh

from pagedopt import PagedAdamW

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
    mesh = init_device_mesh(device, sizes)

    def place(tensor: torch.Tensor, how: str) -> torch.Tensor:
        dims = {"S": tensors.Shard(0), "R": tensors.Replicate()}
        return (
            tensors.distribute_tensor(tensor.to(device), mesh, [dims[each] for each in how])
            if how
            else tensor.to(device)
        )

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


def of_fsdp(device: str) -> tuple[float, float]:
    """The norm of a model that is sharded by FSDP2: ours, and torch's."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 1)).to(device)
    fully_shard(model, mesh=mesh)
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
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 1)).to(device)
    fully_shard(model, mesh=mesh)
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
