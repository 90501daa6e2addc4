"""Where ours is not as torch's, with the reason: all that differs is listed, and all that is listed differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A difference from torch.

    Attributes:
        kind: ``"beyond"`` (ours does what torch refuses, or does better) or ``"refused"`` (ours refuses what torch
            does).
        scenario, label: where it shows; labels may end in ``*``.
        words: what ours does, what torch does, and why.
        optimizers: names of the classes it holds for; empty: all.
        devices: those it holds on.
        error: what ours raises, if it is refused.
    """

    kind: str
    scenario: str
    label: str
    words: str
    optimizers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    error: type[Exception] | None = None


DIFFERENCES: tuple[Difference, ...] = ()


def listed(scenario: str, label: str, optimizer: str, device: str) -> Difference | None:
    """The entry for one point of a transcript."""
    for each in DIFFERENCES:
        named = each.label == label or (each.label.endswith("*") and label.startswith(each.label[:-1]))
        meant = optimizer in (each.optimizers or (optimizer,)) and device in each.devices
        if each.scenario == scenario and named and meant:
            return each
    return None
