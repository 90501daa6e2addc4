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


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "beyond", "float32 state that a state format keeps", "state *",
        "State stays float32, as state_format says; torch has no such choice and rounds it.",
    ),
    Difference(
        "refused", "float64 state into float32 parameters", "loading",
        "Refused, with the formats that keep or round it: double precision is not given up unasked. torch rounds.",
        error=ValueError,
    ),
    Difference(
        "beyond", "what was loaded is left alone", "the dict is as it was",
        "Values are copied, and the dict stays what it was; torch trains on in its tensors, and changes them.",
    ),
)  # fmt: skip


def listed(scenario: str, label: str, optimizer: str, device: str) -> Difference | None:
    """The entry for one point of a transcript."""
    for each in DIFFERENCES:
        named = each.label == label or (each.label.endswith("*") and label.startswith(each.label[:-1]))
        meant = optimizer in (each.optimizers or (optimizer,)) and device in each.devices
        if each.scenario == scenario and named and meant:
            return each
    return None
