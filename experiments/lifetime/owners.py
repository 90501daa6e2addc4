"""Who has what a copied list points at: does a copy update the original's tensors, or its own?

Answer: see notes/pointer_lifetime.md.

Parameters are 1 and gradients 1.  A list over them is copied, copied deeply, or pickled, and the copy is used once:
are the original's parameters 0 then?
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works.fresh import rows_of
from experiments.works.held_lists import BARE, SGD, User, addresses, follow, lists, minus
from pagedopt import DeviceTable, PagedSGD, Sweep

MEASURES = ("launch", "tables")
HOW: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}  # fmt: skip
ORIGINAL, OWN = "the original's", "its own"


def step(optimizer: Any, _: torch.device) -> None:
    """Of an optimizer whose parameters may have come without their gradients."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


#: How a list is made of parameters, and used on their device.
HOLDERS: dict[str, tuple[Callable[[User], Any], Callable[[Any, torch.device], object]]] = {
    BARE: (lambda user: addresses(user.params), lambda rows, device: follow(rows, device)()),
    "DeviceTable": (
        lambda user: DeviceTable(lists(user), writes=[0]), lambda table, device: follow(table.rows, device)()
    ),
    "Sweep": (lambda user: Sweep(minus, lists(user)), lambda sweep, _: sweep.run({})),
    "PagedSGD": (lambda user: PagedSGD(user.params, lr=1.0), step),
    "torch.optim.SGD": (lambda user: SGD(user.params, lr=1.0), step),
}  # fmt: skip


def used(device: str) -> Iterator[Row]:
    """In a process of its own, which a copy that names nobody's memory may end: whose parameters each copy updates."""
    for name, (make, use) in HOLDERS.items():
        for how, copied in HOW.items():
            user = User.of(2, 100, device)
            torch._foreach_add_(lists(user)[1], 1.0)
            held = make(user)  # lives on: what it points at is there
            try:
                use(copied(held), torch.device(device))
                own = all(float(p.detach().sum()) == 100 * (i + 1) for i, p in enumerate(user.params))
                found = OWN if own else ORIGINAL
            except Exception as error:
                found = f"refused: {type(error).__name__}"
            yield {"holder": name, "how": how, "device": torch.device(device).type, "updates": found}


def measure(run: Run) -> Iterator[Row]:
    """A row per holder of a list and way to copy it: whose parameters the copy updates, or how it is refused."""
    return rows_of(run, used, str(run.device), limit=60.0)


def shared(rows: Rows) -> float:
    """Deep and pickled copies of ours that update what belongs to the original."""
    return float(sum(row["updates"] == ORIGINAL and row["how"] != "copy" and row["holder"] != BARE for row in rows))


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.grid("whose parameters a copy updates, on {device}", rows, "holder", "how", "updates", "copy of", str)
    page.bar("deep copies of tables and optimizers that update the original's tensors", rows, shared, at_most=0)
