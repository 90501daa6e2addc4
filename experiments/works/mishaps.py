"""What a program does to its tensors between building a list and using it, and what becomes of everybody's numbers.

Four parameters of 1, 2, 3, 4 and gradients of 1 that a step subtracts; something happens to the second parameter or to
the gradients, and then memory is asked for, which others get.  In a process of its own: it writes into nobody else's.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from experiments.lab import cycles_per_us
from experiments.works.held_lists import WAYS, User

HARMS, WRONG, CRASH, SILENT = "writes into another tensor", "wrong numbers", "crash", "writes into freed memory"
REFUSED, FOLLOWED, KEPT = "refused", "followed", "kept alive"
BAD = (HARMS, WRONG, CRASH, SILENT)
VICTIM, COUNT = 1, 4
#: Elements: what an allocator gives out again, and what it gives back to the system.
SMALL, LARGE = 1 << 18, 1 << 24
OTHERS, HOLD_US = 7.0, 600_000.0
#: The C library hands out the same memory again: pages of the system's own for each tensor, whatever was freed before.
SAME_AGAIN = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


@dataclass(frozen=True)
class Hazard:
    """Something that a program does to its tensors between two steps.

    Attributes:
        act: does it; returns tensors that may have got the memory.
        late: it is done after the step was queued, on a stream that waits.
        quick: whether toys have it.
    """

    act: Callable[[User], list[torch.Tensor]]
    numel: int = SMALL
    late: bool = False
    quick: bool = False


def others(device: torch.device) -> list[torch.Tensor]:
    """Tensors of somebody else, who asks for memory now."""
    gc.collect()
    return [torch.full((SMALL,), OTHERS, device=device) for _ in range(4 * COUNT)]


def deleted(user: User) -> list[torch.Tensor]:
    """The model is gone, and the name of the optimizer."""
    device = user.params[0].device
    user.params, user.optimizer = [], None
    return others(device)


def given_back(user: User) -> list[torch.Tensor]:
    """The same, and the allocator gives its memory back."""
    user.params, user.optimizer = [], None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return []


def moved(user: User) -> list[torch.Tensor]:
    """As ``model.to(...)`` moves it."""
    p = user.params[VICTIM]
    p.data = p.data.clone()
    return others(p.device)


def swapped(user: User) -> list[torch.Tensor]:
    """The tensor stays, its storage is another."""
    p = user.params[VICTIM]
    with torch.no_grad():
        p.set_(p.detach().clone())  # type: ignore[call-overload]
    return others(p.device)


def shrunk(user: User) -> list[torch.Tensor]:
    """As sharding frees what it will gather again."""
    p = user.params[VICTIM]
    p.untyped_storage().resize_(0)
    return others(p.device)


def anew(user: User) -> list[torch.Tensor]:
    """``zero_grad(set_to_none=True)``, and a backward whose gradients are 3."""
    for p in user.params:
        p.grad = None
    found = others(user.params[0].device)
    for p in user.params:
        p.grad = torch.full_like(p, 3.0)
    return found


HAZARDS = {
    "deleted": Hazard(deleted, quick=True),
    "deleted and given back": Hazard(given_back, LARGE),
    "moved (p.data = …)": Hazard(moved),
    "storage swapped (set_)": Hazard(swapped),
    "shrunk (resize_(0))": Hazard(shrunk),
    "gradients made anew": Hazard(anew),
    "deleted, its step on another stream": Hazard(deleted, late=True),
    "gradients anew, their step on another stream": Hazard(anew, late=True),
}


def played(hazard: str, way: str, device: str) -> Iterator[dict[str, Any]]:
    """In the child: hold the list, let it happen, take the step, and look at everybody's numbers."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    asked, user = HAZARDS[hazard], User.of(COUNT, HAZARDS[hazard].numel, device)
    step = WAYS[way](user)
    for p in user.params:
        assert p.grad is not None
        p.grad.fill_(1.0)
    watched, said, strangers = weakref.ref(user.params[VICTIM]), "", []
    try:
        strangers = behind(asked, user, step) if asked.late else asked.act(user)
        if not asked.late:
            step()
        waited(device)
    except (RuntimeError, ValueError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
    if re.search(r"CUDA error|cudaError|CUDA_ERROR", said):
        yield {"outcome": CRASH, "elements": 0, "said": said[:300]}
        return
    harmed = int((torch.stack(strangers) != OTHERS).sum()) if strangers else 0
    held = [i for i, p in enumerate(user.params) if p.untyped_storage().nbytes()]
    wrong = 0 if said else sum(off(user, i, asked) for i in held)
    kept = KEPT if watched() is not None else SILENT
    right = kept if not user.params else FOLLOWED if len(held) == COUNT else SILENT
    outcome = HARMS if harmed else REFUSED if said else WRONG if wrong else right
    yield {"outcome": outcome, "elements": harmed or wrong, "said": said[:300]}


def off(user: User, i: int, asked: Hazard) -> int:
    """How many elements of a parameter are not what this step had to make of them."""
    due = i + 1.0 - (3.0 if asked.act is anew and not asked.late else 1.0)
    return int((user.params[i] != due).sum())


def behind(asked: Hazard, user: User, step: Callable[[], None]) -> list[torch.Tensor]:
    """The step is queued on a stream that waits; meanwhile it happens, on the main stream.

    Raises:
        AssertionError: the stream did not wait long enough to show anything.
    """
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(HOLD_US * cycles_per_us(torch.cuda.current_device())))
        step()
    strangers = asked.act(user)
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the stream did not wait long enough"
    return strangers


def waited(device: str) -> None:
    """Until the device has done what was queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
