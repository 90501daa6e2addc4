"""A state dict on a GPU to another process and back; run as a program, prints what became of it as JSON."""

from __future__ import annotations

import contextlib
import copy
import json
import queue
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from gpu_support import parameters, steps

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


Trained = tuple[Any, list[torch.nn.Parameter]]


def there_and_back(
    method: str,
    child: Callable[[Any, Any], None],
    both: Callable[[], tuple[Trained, Trained]],
    step: Callable[[Any, list[torch.nn.Parameter], int], None],
) -> list[object]:
    """A state dict to another process and back; then steps, and whether they are what torch's optimizer does.

    Args:
        method: how the process is started.
        child: what it does with its two queues.
        both: makes an optimizer that has taken steps and torch's, with their parameters.
        step: lets one of them go on; its last argument is the turn, 1 or 2.
    """
    context: Any = torch.multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(inbox, outbox), daemon=True)
    process.start()
    (optimizer, params), (twin, twin_params) = both()
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    inbox.put(state)
    there, back = answer(outbox, process)
    same = all(torch.equal(v, back["state"][k][n]) for k, entry in before["state"].items() for n, v in entry.items())
    back = copy.deepcopy(back)
    inbox.put(None)
    process.join(60)
    right = []
    for turn in (1, 2):
        for opt, of in ((optimizer, params), (twin, twin_params)):
            step(opt, of, turn)
            opt.load_state_dict(copy.deepcopy(back))
        right.append(all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(params, twin_params, strict=True)))
    return [there == total(before), same, *right, process.exitcode]


def trained(options: dict[str, Any] | None) -> Trained:
    """``options`` of PagedAdamW, or None for torch's AdamW."""
    params = parameters(shapes=SHAPES)
    kind, given = (torch.optim.AdamW, {"fused": True}) if options is None else (PagedAdamW, options)
    optimizer: Any = kind(params, lr=1e-2, **given)
    steps(params, optimizer, 3)
    return optimizer, params


def main(options: dict[str, Any] | None) -> None:
    """Print what came of it for an optimizer with ``options``."""

    def step(optimizer: Any, params: list[torch.nn.Parameter], turn: int) -> None:
        steps(params, optimizer, 2, first=3 * turn)

    print(json.dumps(there_and_back("spawn", child, lambda: (trained(options), trained(None)), step)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
