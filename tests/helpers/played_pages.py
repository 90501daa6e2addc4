"""Pages of a played card for parameters on a CPU: what is mapped, moved and given back, beside CPU steps."""

from __future__ import annotations

import pytest
import torch
from played_card import Card as PlayedCard
from played_driver import GRANULE, Driver, Result

from pagedopt.placements import MappedArena
from pagedopt.system import virtual

__all__ = ["GRANULE", "Card", "Driver", "Result", "install"]


class Card(MappedArena):
    """Mapped pages of a card that is memory of this system, for parameters on a CPU; updated in place."""

    devices = ("cpu",)
    granule = GRANULE
    ways = ("in_place",)

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        return ""


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put the driver of a card, whose memory is all free, in the place of the last one."""
    card = PlayedCard(monkeypatch, early=True)
    monkeypatch.setattr(virtual, "view", lambda address, nbytes, device, owner: card.torch.view(address, nbytes, owner))
    monkeypatch.setattr(virtual, "_properties", lambda where, device: None)  # a CPU has no number
    monkeypatch.setattr(virtual, "_access", lambda device: None)
    return card.driver
