"""``notes/contract.md`` says what the contract holds, and every listed difference is one of its scenarios."""

from __future__ import annotations

from tests.contract.differences import DIFFERENCES
from tests.contract.page import PAGE, SCENARIOS, page


def test_every_difference_that_is_listed_has_its_scenario() -> None:
    names = {scene.name for scene in SCENARIOS}
    assert not [each for each in DIFFERENCES if each.scenario not in names]


def test_the_page_says_what_is_held_here() -> None:
    assert PAGE.read_text() == page(), "write it anew: see tests/contract/page.py"
