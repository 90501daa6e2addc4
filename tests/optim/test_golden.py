"""Trajectories that must not change: 50 steps of every optimizer, dtype and format, from each placement, to the bit."""

from __future__ import annotations

import pytest
from golden import CASES, FILE, Case, placements, recorded, trajectory
from gpu_support import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit_is_what_it_was(case: Case, device: str) -> None:
    known = recorded()
    assert str(case) in known, f"{FILE.name} has no digest for {case}; record it on a commit you trust"
    found = {name: trajectory(case, device, options) for name, options in placements(case, device).items()}
    assert found == dict.fromkeys(found, known[str(case)])


def test_every_digest_has_its_case() -> None:
    assert recorded().keys() == {str(case) for case in CASES}
