"""What a step uses is what ``optimizer.state`` and ``optimizer.param_groups`` hold now, on a GPU."""

from __future__ import annotations

import pytest
import torch
from edits_check import PLACEMENTS, assert_same, edits_for, parametrized, run, worlds
from gpu_support import NEEDED

from tests.optim.specs import BY_STATE as CASES

pytestmark = NEEDED


@parametrized()
def test_an_edit_does_what_it_does_in_torch(case: str, edit: str, placement: str) -> None:
    chosen = CASES[case]
    run(chosen, placement, [(edit, edits_for(chosen)[edit])], "cuda")


@pytest.mark.parametrize("edit", ["clear", "clones", "offload", "prune", "densify"])
def test_an_edit_may_be_made_again(edit: str) -> None:
    for placement in PLACEMENTS:
        run(CASES["adamw"], placement, [(edit, edits_for(CASES["adamw"])[edit])] * 3, "cuda")


@pytest.mark.parametrize("how", ["budget", "load"])
@pytest.mark.parametrize("edit", ["clones", "the large entry of clones", "offload", "offload .data"])
def test_state_of_the_user_is_told_once_and_brought_home(edit: str, how: str) -> None:
    ours, theirs = worlds(CASES["adamw"], "spilled", "cuda")
    for world in (ours, theirs):
        assert world.attempt(2, 0) is None
        edits_for(CASES["adamw"])[edit](world.optimizer, world.params)
        assert world.attempt(3, 2) is None
    assert len(ours.warned) == 1
    assert ours.optimizer.memory_report().by_place.get("device", 0) > 0
    if how == "budget":
        ours.optimizer.set_device_budget(0)
    else:
        ours.optimizer.load_state_dict(ours.optimizer.state_dict())
    assert ours.optimizer.memory_report().by_place.get("device", 0) == 0
    assert ours.attempt(2, 5) is None is theirs.attempt(2, 5)
    assert_same(ours, theirs)
    assert len(ours.warned) == 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_replacing_all_state_leaves_no_device_memory_behind(placement: str) -> None:
    ours, _ = worlds(CASES["adamw"], placement, "cuda")
    assert ours.attempt(2, 0) is None
    clones = edits_for(CASES["adamw"])["clones"]
    used = []
    for step in range(2, 24):
        clones(ours.optimizer, ours.params)
        assert ours.attempt(1, step) is None
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert max(used[1:]) <= 1.05 * used[1]
