"""Trajectories that must not change: 50 steps of every optimizer, dtype and format, from each placement, to the bit."""

from __future__ import annotations

import pytest
from golden import CASES, FILE, Case, Options, placements, recorded, trajectory
from gpu_support import NEEDED
from often import MARKS

#: On a CPU `make test` takes every case from every other place.
TRAJECTORIES = [
    pytest.param(
        case, device, options, id=f"{case}-{device}-{name}",
        marks=NEEDED if device == "cuda" else MARKS[(i + j) % 2 == 0],
    )
    for i, case in enumerate(CASES)
    for device in ("cpu", "cuda")
    for j, (name, options) in enumerate(placements(case, device).items())
]  # fmt: skip


@pytest.mark.parametrize(("case", "device", "options"), TRAJECTORIES)
def test_every_bit_is_what_it_was(case: Case, device: str, options: Options) -> None:
    known = recorded()
    assert str(case) in known, f"{FILE.name} has no digest for {case}; record it (tests/helpers/golden.py)"
    assert trajectory(case, device, options) == known[str(case)]


def test_every_digest_has_its_case() -> None:
    assert recorded().keys() == {str(case) for case in CASES}
