"""The contract once more, of optimizers that clip to a norm that no gradient has: nothing may change by it."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support import NEEDED
from often import MARKS

from pagedopt.optim.registry import OPTIMIZERS
from tests.contract import page, scenarios
from tests.contract.differences import DIFFERENCES
from tests.contract.page import PAGE
from tests.contract.page import page as contract
from tests.contract.scenarios import PLACES, SCENARIOS, Place, Scenario, is_often

#: What clipping does change, as it does in torch: a norm that is infinite or NaN makes NaN of all gradients; and an
#: optimizer for each parameter has no norm of all.
CHANGED = ("extreme values", "an optimizer for each parameter")
assert page.FILES, "it has loaded all scenarios"


def cases() -> list[Any]:
    """Each optimizer in a scenario of its own often; all with all in `make test-long`."""
    found = []
    scenes = [scene for scene in SCENARIOS if scene.name not in CHANGED]
    apart = len(scenes) // len(OPTIMIZERS)
    for i, scene in enumerate(scenes):
        for j, entry in enumerate(OPTIMIZERS):
            for k, place in enumerate(place for place in PLACES if place.device in scene.devices):
                often = i == j * apart and is_often(j, k)
                marks = NEEDED if place.device == "cuda" else MARKS[often]
                found.append(
                    pytest.param(scene, entry, place, id=f"{scene.name}-{entry.name}-{place.name}", marks=marks)
                )
    return found


@pytest.mark.parametrize(("scene", "entry", "place"), cases())
def test_with_a_norm_beyond_all_gradients(scene: Scenario, entry: Any, place: Place) -> None:
    clipping = Place(place.name, place.device, {**place.options, "max_grad_norm": float("inf")})
    scenarios.hold(scene, entry, clipping)


def test_what_is_left_out_is_there() -> None:
    assert set(CHANGED) <= {scene.name for scene in SCENARIOS}


# --- ``notes/contract.md`` says what the contract holds, and every listed difference is one of its scenarios ----------


def test_every_difference_that_is_listed_has_its_scenario() -> None:
    names = {scene.name for scene in scenarios.SCENARIOS}
    assert not [each for each in DIFFERENCES if each.scenario not in names]


def test_the_page_says_what_is_held_here() -> None:
    assert PAGE.read_text() == contract(), "write it anew: see tests/contract/page.py"
