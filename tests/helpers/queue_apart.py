"""A state dict on a GPU to another process and back; run as a program, prints what became of it as JSON."""

from __future__ import annotations

import contextlib
import copy
import json
import queue
import sys
from typing import Any

import torch
from spill_support import parameters, steps

from pagedopt import PagedAdamW

SHAPES = ((1 << 20,), (333, 7))


def total(state: dict[str, Any]) -> float:
    return sum(float(v.double().sum()) for entry in state["state"].values() for v in entry.values())


def child(inbox: Any, outbox: Any) -> None:
    """Send back a copy of what came, and the sum of it; gone only when both have been read.

    A copy: torch sends no CUDA tensor on to a third party, nor back.
    """
    state = inbox.get()
    copied = copy.deepcopy(state)
    outbox.put((total(state), copied))
    inbox.get()
    del state, copied


def answer(outbox: Any, process: Any) -> Any:
    """What the child puts, unless it ends before it has."""
    for _ in range(60):
        with contextlib.suppress(queue.Empty):
            return outbox.get(timeout=1)
        if not process.is_alive():
            break
    raise RuntimeError(f"the child said nothing; its exit code is {process.exitcode}")


def main(options: dict[str, Any] | None) -> None:
    """``options`` of PagedAdamW, or None for torch's AdamW."""
    context: Any = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(inbox, outbox), daemon=True)
    process.start()
    params, twin = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    rival = torch.optim.AdamW(twin, lr=1e-2, fused=True)
    optimizer: Any = torch.optim.AdamW(params, lr=1e-2, fused=True)
    if options is not None:
        optimizer = PagedAdamW(params, lr=1e-2, **options)
    steps(params, optimizer, 3)
    steps(twin, rival, 3)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    inbox.put(state)
    there, back = answer(outbox, process)
    same = all(torch.equal(v, back["state"][k][n]) for k, entry in before["state"].items() for n, v in entry.items())
    back = copy.deepcopy(back)
    inbox.put(None)
    process.join(60)
    right = []
    for round_ in (1, 2):
        for opt, of in ((optimizer, params), (rival, twin)):
            steps(of, opt, 2, first=3 * round_)
            opt.load_state_dict(copy.deepcopy(back))
        right.append(all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(params, twin, strict=True)))
    print(json.dumps([there == total(before), same, *right, process.exitcode]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
