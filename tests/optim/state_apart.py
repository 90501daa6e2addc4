"""What tests of memory run in a process of its own, where nothing else is measured; see ``test_state_memory.py``."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from file_support import MIB, descriptors, disk_bytes, process_bytes

from pagedopt import PagedAdamW
from tests.world import numbers, steps

NUMEL = 3 * MIB  # of a parameter: 12 MiB, and as much for each of its moments
BUDGETS: dict[str, dict[str, Any]] = {"resident": {}, "file": {"device_budget": 0}}


def trained(count: int, numel: int, placement: str, class_: str = "paged") -> tuple[Any, list[torch.nn.Parameter]]:
    """An optimizer after a step, its gradients gone."""
    params = [torch.nn.Parameter(numbers((numel,), i)) for i in range(count)]
    optimizer: Any = PagedAdamW(params, **BUDGETS[placement]) if class_ == "paged" else torch.optim.AdamW(params)
    steps(optimizer, params, 1)
    optimizer.zero_grad()
    return optimizer, params


def replaced(placement: str) -> None:
    """Print the resident size, and as it is each of 21 times after the user put 50 MB of state of his own."""
    optimizer, params = trained(6, 1_050_000, placement)
    warnings.simplefilter("ignore")
    steps(optimizer, params, 1, first=1)
    sizes = [process_bytes("VmRSS")]
    for step in range(2, 23):
        for p in params:
            optimizer.state[p] = {name: value.clone() for name, value in optimizer.state[p].items()}
            assert p.grad is not None
            p.grad = p.grad * step
        optimizer.step()
        sizes.append(process_bytes("VmRSS"))
    print(json.dumps(sizes))


def join(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], one_a_step: bool) -> None:
    """As many steps as there are parameters, of which one more each time, or all, have gradients."""
    for step in range(len(params)):
        grads = numbers((len(params), 10), step).unbind()
        for p, grad in zip(params[: step + 1 if one_a_step else None], grads, strict=False):
            p.grad = grad
        optimizer.step()


def late(one_a_step: bool) -> None:
    """Print descriptors and bytes that 200 small parameters take, and whether one without gradients has state."""
    params = [torch.nn.Parameter(numbers((10,), i)) for i in range(200)]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    never = torch.nn.Parameter(torch.ones(1000))
    first = torch.nn.Parameter(torch.ones(10))
    join(PagedAdamW([first], device_budget=0), [first], True)  # what a compiler takes is not meant
    optimizer = PagedAdamW([*params, never], device_budget=0)
    before = descriptors(), process_bytes("RssAnon")
    join(optimizer, params, one_a_step)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free between other things goes back, too
    opened, anonymous = descriptors() - before[0], process_bytes("RssAnon") - before[1]
    reported = optimizer.memory_report().by_place.get("file", 0)
    in_files = disk_bytes(Path(os.environ["PAGEDOPT_STATE_DIR"]))
    join(torch.optim.AdamW(others, foreach=True), others, one_a_step)
    right = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(params, others, strict=True))
    print(json.dumps([opened, in_files, anonymous, reported, never in optimizer.state, right]))


def watched(acts: list[str], placement: str) -> None:
    """Do one after the other, and say when each begins and ends, so that who started this process can watch it."""
    optimizer, params = trained(3, NUMEL, placement)
    entry = optimizer.state[params[1]]
    with tempfile.TemporaryFile() as file:
        torch.save(torch.ones(1), file)  # what saving needs is imported
        known: dict[str, Callable[[], Any]] = {
            "save a tensor": lambda: torch.save(entry["exp_avg"], file),
            "save an entry": lambda: torch.save(entry, file),
            "save all": lambda: torch.save(optimizer.state_dict(), file),
            "pickle": lambda: pickle.dumps(optimizer),
            "pickle to a file": lambda: pickle.dump(optimizer.state_dict(), file),
            "deepcopy": lambda: copy.deepcopy(optimizer),
            "deepcopy of the dict": lambda: copy.deepcopy(optimizer.state_dict()),
        }
        for act in acts:
            print("begin", flush=True)
            sys.stdin.readline()
            kept = known[act]()
            print("end", flush=True)
            sys.stdin.readline()
            del kept
            gc.collect()


def total(state: dict[str, Any]) -> float:
    return sum(float(v.double().sum()) for entry in state["state"].values() for v in entry.values())


def child_of_queue(inbox: Any, outbox: Any) -> None:
    """Send back what came, and the sum of it."""
    state = inbox.get()
    outbox.put((total(state), state))
    inbox.get()  # the sender has read it: memory of ours may go


def queue(method: str, placement: str) -> list[object]:
    """A state dict to another process and back; then steps, and whether they are what torch's optimizer does."""
    context: Any = torch.multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=child_of_queue, args=(inbox, outbox), daemon=True)
    process.start()
    worlds = trained(3, 40_000, placement), trained(3, 40_000, placement, "torch")
    state = worlds[0][0].state_dict()
    before = copy.deepcopy(state)
    inbox.put(state)
    there, back = outbox.get(timeout=60)
    same = all(torch.equal(v, back["state"][k][n]) for k, entry in before["state"].items() for n, v in entry.items())
    back = copy.deepcopy(back)
    inbox.put(None)
    process.join(60)
    right = []
    for turn in (1, 2):
        for optimizer, params in worlds:
            steps(optimizer, params, 2, first=2 * turn)
            optimizer.load_state_dict(copy.deepcopy(back))
        pairs = zip(worlds[0][1], worlds[1][1], strict=True)
        right.append(all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs))
    return [there == total(before), same, *right, process.exitcode]


def queues(method: str) -> None:
    """Print the same for state in memory and in a file."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    warnings.simplefilter("ignore")
    print(json.dumps({placement: queue(method, placement) for placement in BUDGETS}))


if __name__ == "__main__":
    acts: dict[str, Callable[..., None]] = {"replaced": replaced, "late": late, "watched": watched, "queues": queues}
    acts[sys.argv[1]](*map(json.loads, sys.argv[2:]))
