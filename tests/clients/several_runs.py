"""What the processes of ``tests/clients/test_several_processes.py`` do."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlapped import SmallPages
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from pagedopt import PagedAdamW, estimate
from tests.clients.several_setups import SETUPS
from tests.clients.several_training import Training, mean_of_squares, own

#: torch's class, ours, and ours with all state away.
CONTENDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (torch.optim.AdamW, {"fused": True}),
    "ours": (PagedAdamW, {}),
    "away": (PagedAdamW, {"device_budget": 0}),
}
#: Steps until all is saved, and in all.
SAVED, STEPS = 3, 5


def contenders(name: str, device: str) -> Iterator[tuple[str, Training]]:
    """Each begins when the one before it is done."""
    for who, (kind, options) in CONTENDERS.items():
        yield who, Training.begin(SETUPS[name], device, kind, **options)


def trained(device: str, name: str, folder: Path, resumed: bool = False) -> dict[str, Any]:
    """Train, save in the middle; or all of them go on from what ours has saved.  What came of each contender."""
    found = {}
    for who, training in contenders(name, device):
        losses = []
        if resumed:
            training.load(folder / "ours")
        else:
            losses = training.train(0, SAVED)
            training.save(folder / who)
        losses += training.train(SAVED, STEPS)
        found[who] = {"losses": losses, "values": training.values(), **where(training)}
    return found


def resharded(device: str, name: str, folder: Path, first: int, last: int) -> dict[str, Any]:
    """Go on from what any number of processes have saved at step ``first``, and save again at ``last``."""
    found = {}
    for who, training in contenders(name, device):
        if first:
            training.load(folder / f"{who}{first}")
        begun = training.whole()
        losses = training.train(first, last)
        training.save(folder / f"{who}{last}")
        found[who] = {"losses": losses, "begun": begun, "values": training.whole(), **where(training)}
    return found


def where(training: Training) -> dict[str, Any]:
    """Types of state, devices of step counts, and of ours bytes by place."""
    ours = [one for one in training.setup.inner(training.optimizer) if isinstance(one, PagedAdamW)]
    places = [dict(one.memory_report().by_place) for one in ours]
    return {"kinds": training.kinds(), "steps": training.step_places(), "places": places}


def one_of_them_prepares_anew(device: str) -> dict[str, Any]:
    """Tensor parallel, whose gradients are sums to be made by all: one process has new launches, the other has not."""
    found = {}
    for who, training in contenders("tensor parallel", device):
        training.train(0, 2)
        if dist.get_rank() == 1:
            entry = next(iter(training.optimizer.state.values()))
            entry["exp_avg"] = entry["exp_avg"].clone()
        found[who] = {"losses": training.train(2, 4), "values": training.values()}
    return found


def attached(device: str, name: str, whole: bool) -> dict[str, Any]:
    """DDP: what comes of a training whose updates are queued under forwards, and of plain steps; ``whole``: attached to
    all of it, not to its module."""
    found = {}
    for who in ("attached", "plain"):
        training = Training.begin(SETUPS[name], device, PagedAdamW, device_budget=0, placement=SmallPages)
        with contextlib.ExitStack() as watching:
            if who == "attached":
                training.optimizer.attach(training.model if whole else training.model.module)
                watching.enter_context(training.optimizer.watch_reads())
            losses = training.train(0, 6)
        report = training.optimizer.overlap_report()
        training.optimizer.wait()
        found[who] = {"losses": losses, "values": training.values(), "report": (report.hidden, dict(report.plain))}
    return found


def refuse_to_attach(device: str) -> list[str]:
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


def copied(device: str) -> dict[str, Any]:
    """FSDP2: an optimizer's copy and one out of a pickle go on as it does; and what it was estimated to take."""
    training = Training.begin(SETUPS["FSDP2"], device, PagedAdamW, device_budget=0)
    training.train(0, 2)
    report, plan = training.optimizer.memory_report(), estimate(training.model, device_budget=0)
    both = training.optimizer, list(training.model.parameters())
    twins = [copy.deepcopy(both), pickle.loads(pickle.dumps(both))]
    params = both[1]
    mean_of_squares(training.model(training.rows(2)) - 0.5).backward()
    after = []
    for optimizer, theirs in (*twins, both):
        for p, original in zip(theirs, params, strict=True):
            p.grad = original.grad
        optimizer.step()
        after.append([own(t) for p in theirs for t in (p, *optimizer.state[p].values())])
    return {"after": after, "bytes": (sum(report.by_place.values()), plan.state_bytes, len(own(params[0])))}
