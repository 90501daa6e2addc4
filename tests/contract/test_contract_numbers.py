"""The contract: numbers, over many steps and one, in each placement and in captured steps."""

from __future__ import annotations

import contract_numbers
import pytest
import torch
from contract_world import CAPTURED, OPTIMIZERS, PLACES, Place, is_often
from gpu_support import NEEDED
from often import MARKS

from pagedopt.optim.registry import Entry

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
