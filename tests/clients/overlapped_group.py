"""What the processes of a group do with an optimizer that is attached."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from overlapped import WIDE, SmallPages, linears
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pagedopt import PagedAdamW
from tests.clients.several_setups import HYPER


def trained(device: str, attached: bool, whole: bool, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses, parameters and launches hidden of `steps` steps, every second one over two parts of a batch."""
    torch.manual_seed(3)
    model = DistributedDataParallel(linears(WIDE[device]).to(device), **options)
    place: dict[str, Any] = {"placement": SmallPages} if device == "cpu" else {}
    optimizer = PagedAdamW(model.parameters(), **HYPER, **place, device_budget=0)
    if attached:
        optimizer.attach(model if whole else model.module)
    rank, losses = torch.distributed.get_rank(), []
    with optimizer.watch_reads() if attached else contextlib.nullcontext():
        for step in range(steps):
            for part in range(1 + step % 2):
                x = torch.randn(4, WIDE[device], generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
                with model.no_sync() if part < step % 2 else contextlib.nullcontext():
                    loss = model(x.to(device)).square().mean()
                    loss.backward()
                losses.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    report = optimizer.overlap_report()
    optimizer.wait()
    values = [p.detach().cpu() for p in model.parameters()]
    return {"losses": losses, "values": values, "hidden": report.hidden, "plain": dict(report.plain)}


def refused(device: str) -> list[str]:
    """What is said of models that FSDP has sharded."""
    said = []
    old = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # made in full it needs a GPU
    torch.nn.Module.__init__(old)
    old.net = torch.nn.Linear(8, 8)
    for model in (old, fully_shard(torch.nn.Linear(8, 8).to(device))):
        try:
            PagedAdamW([torch.nn.Parameter(torch.ones(8))], device_budget=0).attach(model)
        except ValueError as error:
            said.append(str(error))
    return said
