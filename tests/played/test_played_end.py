"""When a card is gone, nothing that was played reaches the driver of a real one."""

from __future__ import annotations

import gc

import pytest
from cuda.bindings import driver as real
from played_card import Card

from pagedopt.system import driver


@pytest.mark.parametrize("kept", [False, True], ids=["given back with the tables", "kept alive by somebody"])
def test_events_are_given_back_to_the_card_alone(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    reached: list[int] = []
    monkeypatch.setattr(real, "cuEventDestroy", reached.append)
    with pytest.MonkeyPatch.context() as patch:
        card = Card(patch)
        events = [driver.Event(0)]
        handle = int(events[0].handle)
        patch.setattr(driver, "kept_in_a_table", events.copy(), raising=False)
        if not kept:
            events.clear()
    gc.collect()
    assert (handle in card.driver._events) is kept
    del events
    gc.collect()
    assert not reached
