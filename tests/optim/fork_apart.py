"""A training whose process forks, in a process of its own; see ``test_fork_and_threads.py``."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from stand_ins import refusal

from tests.optim.faults import Scene, Stage, Values, is_same, other_training


def trained(placement: str) -> Stage:
    """After two steps, with gradients for the next."""
    stage = Stage(Scene("state_dict", placement))
    stage.ready()
    return stage


def writes(stage: Stage) -> dict[str, Callable[[], Any]]:
    """What would write to state or move it."""
    opt = stage.optimizer
    saved = other_training(stage.scene)
    return {
        "step": opt.step,
        "load": lambda: opt.load_state_dict(saved),
        "budget": lambda: opt.set_device_budget(None),
        "spill": opt.spill,
    }


def reads(stage: Stage, before: Values) -> dict[str, bool]:
    """What must go well in a child: all that changes nothing of the parent's, and a copy's own steps."""
    opt, params = stage.optimizer, stage.params
    torch.save(opt.state_dict(), io.BytesIO())
    own, copies = copy.deepcopy((opt, params))
    for p, original in zip(copies, params, strict=True):  # a copied parameter has no gradient
        p.grad = original.grad
    own.step()
    done = trained("resident")
    done.optimizer.step()
    got = all(torch.equal(a, b) for a, b in zip(copies, done.params, strict=True))
    return {"values": is_same(stage.values(), before, False), "copy": got, "report": bool(str(opt.memory_report()))}


def fork(placement: str) -> Any:
    """What the child was refused and could do, how it ended, and whether the parent saw anything of it."""
    stage, twin = trained(placement), trained("resident")
    before = stage.values()
    reading, writing = os.pipe()
    sys.stdout.flush()
    if not (child := os.fork()):
        found = {name: refusal(act) for name, act in writes(stage).items()}
        with os.fdopen(writing, "w") as pipe:
            json.dump([found, reads(stage, before) if placement != "resident" else {}], pipe)
        sys.exit(7)  # as any program ends, with all that runs then
    os.close(writing)
    with os.fdopen(reading) as pipe:
        refused, done = json.load(pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    unchanged = is_same(stage.values(), before, False)
    for each in (stage, twin):
        each.optimizer.step()
        each.train(2, 5)
    return refused, done, code, unchanged, is_same(stage.values(), twin.values(), False)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Ones."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


def loader(placement: str) -> bool:
    """Whether steps are right between batches of workers that were forked."""
    warnings.simplefilter("ignore")
    stage, twin = trained(placement), trained("resident")
    batches = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for epoch in range(2):
        for number, _ in enumerate(batches):
            for each in (stage, twin):
                each.train(1, 10 * epoch + number)
    return is_same(stage.values(), twin.values(), False)


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and torch's own operations wait for them then
    act: Callable[[str], Any] = {"fork": fork, "loader": loader}[sys.argv[1]]
    print(json.dumps({placement: act(placement) for placement in ("resident", "spilled", "half")}))
