"""May the list itself be rewritten or freed before the kernel that was given it has read it?

Answer: see notes/pointer_lifetime.md.

A stream is held, a kernel is launched over a list of one tensor, and then the host writes another tensor's address into
that list, or lets go of it.  The tensors are 1, and a launch takes 1 from the one that it finds in the list.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from experiments.lab import Page, Row, Rows, Run, cycles_per_us, yes_or_no
from experiments.works.held_lists import BARE, OURS, User, addresses, kernel, launch, lists, minus
from experiments.works.mishaps import HOLD_US
from pagedopt import Sweep
from pagedopt.system import driver
from pagedopt.transports.ring import RING_SIZE

NEEDS_GPU = True
MEASURES = ("launch", "tables", "transports")
REWRITTEN, FREED = "rewritten", "freed"
RIGHT, OTHER = "the tensor it was given", "another"
Call = Callable[[], object]


def in_place(allocate: Callable[[int, int], driver.Buffer], mine: User, other: User) -> tuple[Call, Call]:
    """The kernel reads the list where the host writes it."""
    rows = addresses(mine.params)
    buffer = allocate(rows.nbytes, mine.params[0].device.index)
    words = buffer.host.view(np.int64).reshape(rows.shape)
    words[:] = rows
    return lambda: launch("listed", 1, buffer.address), lambda: np.copyto(words, addresses(other.params))


def copied(pinned: bool, mine: User, other: User) -> tuple[Call, Call]:
    """A copy is queued in front of the kernel."""
    words = torch.from_numpy(addresses(mine.params))
    words = words.pin_memory() if pinned else words
    target = torch.empty_like(words, device=mine.params[0].device)

    def queue() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        driver.copy_to_device(target.data_ptr(), words.data_ptr(), words.nbytes, stream)
        launch("listed", 1, target.data_ptr())

    return queue, lambda: words.copy_(torch.from_numpy(addresses(other.params)))


def by_value(mine: User, other: User) -> tuple[Call, Call]:
    """The launch takes the list with it."""
    rows = addresses(mine.params)
    return lambda: launch("by_value", 1, rows.view("V32").ravel()), lambda: np.copyto(rows, addresses(other.params))


def let_go(pinned: bool, mine: User, other: User) -> tuple[Call, Call]:
    """torch's memory for the list goes back to torch, and others ask for as much."""

    def made(user: User) -> torch.Tensor:
        rows = torch.from_numpy(addresses(user.params))
        return rows.pin_memory() if pinned else rows.to(user.params[0].device, non_blocking=True)

    held, taken = [made(mine)], list[torch.Tensor]()

    def free() -> None:
        held.clear()
        taken.extend(made(other) for _ in range(8))

    return lambda: launch("listed", 1, held[0].data_ptr()), free


def ours(transport: Any, act: str, mine: User, other: User) -> tuple[Call, Call]:
    """A sweep, which then takes the other list, or is dropped for another sweep; both have run in the end."""
    held = [Sweep(minus, lists(mine), transport=transport)]
    for _ in range(RING_SIZE):
        held[0].table.host.rows_changed()
        held[0].run({})

    def after() -> None:
        if act == REWRITTEN:
            held[0].refresh(lists(other))
        else:
            held.clear()
            gc.collect()
            held.append(Sweep(minus, lists(other), transport=transport))
        held[0].run({})

    return lambda: held[0].run({}), after


Make = Callable[[User, User], tuple[Call, Call]]
WAYS: dict[tuple[str, str, str], Make] = {
    (BARE, "managed, read in place", REWRITTEN): functools.partial(in_place, driver.allocate_managed),
    (BARE, "mapped, read in place", REWRITTEN): functools.partial(in_place, driver.allocate_mapped),
    (BARE, "copied from pinned memory", REWRITTEN): functools.partial(copied, True),
    (BARE, "copied from pageable memory", REWRITTEN): functools.partial(copied, False),
    (BARE, "struct, by value", REWRITTEN): by_value,
    (BARE, "torch's pinned memory, read in place", FREED): functools.partial(let_go, True),
    (BARE, "torch's device memory, same stream", FREED): functools.partial(let_go, False),
    **{(OURS, name, act): functools.partial(ours, name, act) for act in (REWRITTEN, FREED)
       for name in ("managed", "mapped", "memcpy", "struct")},
}  # fmt: skip


def measure(run: Run) -> Iterator[Row]:
    """A row per way: which tensors were updated, and whether the host waited."""
    spin = int(HOLD_US * cycles_per_us(run.device.index))
    for name in ("listed", "by_value"):
        kernel(name)
    for (who, where, act), make in run.each(WAYS.items()):
        with run.attempt(f"{who}, {where}, {act}"):
            mine, other = (User.of(1, 1024, run.device) for _ in range(2))
            queue, after = make(mine, other)
            for user in (mine, other):
                torch._foreach_add_(lists(user)[1], 1.0)
            torch.cuda.synchronize()
            torch.cuda._sleep(spin)
            queue()
            after()
            waited = torch.cuda.current_stream().query()
            torch.cuda.synchronize()
            left = [float(user.params[0].detach().mean()) for user in (mine, other)]
            right = left == [0.0, 0.0 if who == OURS else 1.0]
            yield {"who": who, "where": where, "act": act, "found": RIGHT if right else OTHER, "waited": waited}


def wrong(rows: Rows) -> float:
    """Lists of ours whose kernel found another tensor."""
    return float(len(rows.where(who=OURS, found=OTHER)))


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("a list that changes before its kernel has run", rows,
        {"list": "where", "held by": "who", "then": "act", "the kernel updates": "found",
        "the host waited": yes_or_no("waited")})  # fmt: skip
    page.bar("lists of pagedopt whose kernel updates another tensor", rows, wrong, at_most=0)
