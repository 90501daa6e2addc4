"""A drop-in for torch.optim in every detail: every optimizer of the registry in every placement, beside torch's class.

What is done is in the files ``tests/helpers/contract_*.py``, one chapter each; what differs and why, in
``contract_differences.py``; ``notes/contract.md`` is made of both.
"""

from __future__ import annotations

import contract_checkpoints
import contract_flags
import contract_gradients
import contract_hyperparameters
import contract_loops
import contract_numbers
import contract_objects
import contract_parameters
import contract_schedules
import contract_surroundings
import pytest
import torch
from contract_differences import DIFFERENCES, Difference, listed
from contract_world import CAPTURED, OPTIMIZERS, PLACES, SCENARIOS, Place, Scenario, differences, run
from gpu_support import NEEDED
from often import MARKS

from pagedopt.optim.registry import Entry

CHAPTERS = (
    contract_parameters, contract_gradients, contract_hyperparameters, contract_flags, contract_loops,
    contract_schedules, contract_surroundings, contract_objects, contract_checkpoints,
)  # fmt: skip


def is_often(*numbers: int) -> bool:
    """Whether a case on a CPU is no long one, given where each of its values stands in its list: every other one is."""
    return sum(numbers) % 2 == 0


#: On a CPU every optimizer goes through every scenario in one of the two places, and every scenario is done in both;
#: `make test-long` does all of them in both.
CASES = [
    pytest.param(
        scene, entry, place, id=f"{scene.chapter}-{scene.name}-{entry.name}-{place.device}-{place.name}",
        marks=NEEDED if place.device == "cuda" else MARKS[is_often(i, j, k)],
    )
    for i, scene in enumerate(SCENARIOS)
    for j, entry in enumerate(OPTIMIZERS)
    for k, place in enumerate(PLACES)
    if place.device in scene.devices
]  # fmt: skip


@pytest.mark.parametrize(("scene", "entry", "place"), CASES)
def test_what_is_done_does_what_it_does_in_torch(scene: Scenario, entry: Entry, place: Place) -> None:
    theirs, ours = run(scene, entry, place)
    found = differences(theirs, ours)
    assert theirs.said, "nothing is compared"

    def entered(label: str) -> Difference | None:
        """What is listed; a difference from older versions counts where the installed torch raises there, or before."""
        each = listed(scene.name, label, entry.name, place.device)
        taken = label in theirs.said and not isinstance(theirs.said[label], Exception)
        return None if each is not None and each.older and taken else each

    unlisted = {at: words for at, words in found.items() if not entered(at)}
    assert not unlisted, f"{scene.sentence} {unlisted}"
    for label in theirs.said:
        known = entered(label)
        assert known is None or label in found, f"{label!r} is listed as a difference, and is none: {known}"
        if known is not None and known.error is not None:
            assert isinstance(ours.said[label], known.error), f"{label!r}: {ours.said[label]!r}"


def test_every_difference_that_is_listed_has_its_scenario() -> None:
    names = {scene.name for scene in SCENARIOS}
    assert not [each for each in DIFFERENCES if each.scenario not in names]


VARIANTS = [
    (entry, at, device)
    for entry in OPTIMIZERS
    for at in range(len(contract_numbers.variants(entry)))
    for device in ("cpu", "cuda")
]
#: On a CPU `make test` takes a thousand steps of the first variant of each class, whose flags single steps show.
THOUSANDS = [
    pytest.param(
        entry, at, device, id=f"{entry.name}-{at}-{device}", marks=NEEDED if device == "cuda" else MARKS[at == 0]
    )
    for entry, at, device in VARIANTS
]
#: On a CPU every variant is often compared in two dtypes, in turn: every class in all of them.
SINGLE = [
    pytest.param(
        entry, at, device, dtype, id=f"{entry.name}-{at}-{device}-{dtype}",
        marks=NEEDED if device == "cuda" else MARKS[is_often(at, i)],
    )
    for entry, at, device in VARIANTS
    for i, dtype in enumerate(contract_numbers.DTYPES)
]  # fmt: skip


def places(device: str) -> list[Place]:
    """Where numbers are compared: in captured steps, too."""
    return [place for place in (*PLACES, *CAPTURED) if place.device == device]


@pytest.mark.parametrize(("entry", "at", "device"), THOUSANDS)
def test_a_thousand_steps_end_nearer_to_float64_than_any_of_torchs_ways(entry: Entry, at: int, device: str) -> None:
    wrong = {place.name: contract_numbers.far_from_exact(entry, at, place) for place in places(device)}
    assert not any(wrong.values()), f"{contract_numbers.variants(entry)[at]}: {wrong}"


@pytest.mark.parametrize(("entry", "at", "device", "dtype"), SINGLE)
def test_a_step_ends_a_few_roundings_from_torchs_default(
    entry: Entry, at: int, device: str, dtype: torch.dtype
) -> None:
    wrong = {place.name: contract_numbers.far_from_default(entry, at, dtype, place) for place in places(device)}
    assert not any(wrong.values()), f"{contract_numbers.variants(entry)[at]}: {wrong}"


def test_the_page_says_what_is_held_here() -> None:
    from contract_page import PAGE, page

    assert PAGE.read_text() == page(), "write it anew: see tests/helpers/contract_page.py"
