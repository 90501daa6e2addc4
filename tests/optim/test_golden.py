"""Trajectories that must not change: steps of every optimizer, dtype and format, from each placement, to the bit.

Resident state takes all 50 steps.  Elsewhere, on a CPU, it takes ten, in which every page has travelled ten times.
"""

from __future__ import annotations

import pytest
from golden import CASES, DIGESTS_AFTER, FILE, STEPS, Case, Options, placements, recorded, trajectory
from gpu_support import NEEDED
from often import MARKS

#: On a CPU `make test` takes every case from one place, which has the bits of all (``test_places.py``).
TRAJECTORIES = [
    pytest.param(
        case, device, options, id=f"{case}-{device}-{name}",
        marks=NEEDED if device == "cuda" else MARKS[j == i % len(places)],
    )
    for i, case in enumerate(CASES)
    for device in ("cpu", "cuda")
    for places in [placements(case, device)]
    for j, (name, options) in enumerate(places.items())
]  # fmt: skip


@pytest.mark.parametrize(("case", "device", "options"), TRAJECTORIES)
def test_every_bit_is_what_it_was(case: Case, device: str, options: Options) -> None:
    known = recorded()
    assert str(case) in known, f"{FILE.name} has no digest for {case}; record it (tests/helpers/golden.py)"
    steps = STEPS if device == "cuda" or not options else DIGESTS_AFTER[1]
    found = trajectory(case, device, options, steps).split()
    assert found == known[str(case)].split()[: len(found)]
    assert len(found) == sum(after <= steps for after in DIGESTS_AFTER)


def test_every_digest_has_its_case() -> None:
    assert recorded().keys() == {str(case) for case in CASES}
