"""Several threads at one optimizer: each step is taken, and nobody is told of a step of another's that is under way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from held import forked, held_by_another, together

from pagedopt import PagedAdamW
from pagedopt.optim.rule_optimizer import OptimizerLock

STEPS = 20


pytestmark = pytest.mark.usefixtures("folder")


def begun(**options: Any) -> tuple[PagedAdamW, torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 100_000))
    p.grad = torch.linspace(1, 2, 100_000)
    return PagedAdamW([p], **options), p


LOOKS: dict[str, Callable[[PagedAdamW], Any]] = {
    "state_dict": lambda opt: opt.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "set_device_budget": lambda opt: opt.set_device_budget(opt.store.budget.said),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("options", [{}, {"device_budget": 0}, {"device_budget": "50%"}], ids=str)
def test_steps_and_looks_take_turns(options: dict[str, Any], look: str) -> None:
    opt, p = begun(**options)

    def steps() -> None:
        for _ in range(STEPS):
            opt.step()

    def looks() -> None:
        for _ in range(10):
            LOOKS[look](opt)

    assert together(steps, steps, looks) == []
    assert opt.state[p]["step"] == 2 * STEPS
    alone, q = begun(**options)
    for _ in range(2 * STEPS):
        alone.step()
    assert torch.equal(p, q)


def test_a_forked_child_finds_the_turn_open() -> None:
    """Whoever held it is in the parent."""
    opt, _ = begun()
    opt.step()
    with held_by_another(opt._lock()):
        assert forked(opt.state_dict)


def test_a_turn_is_one_lock_that_its_thread_takes_again() -> None:
    turn = OptimizerLock()
    with turn(), turn():
        assert turn() is turn()
