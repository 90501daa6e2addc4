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


<<<<<<< HEAD
_NO_GRAPH = (
    "A step of one launch has no graph to differentiate through: refused by name, where torch takes it (in a group it "
    "changes nothing)."
)

#: Hyperparameters.
_HYPERPARAMETERS = (
    *(
        Difference(
            "refused", "differentiable", f"{{'foreach': {foreach}, 'fused': {fused}}}", _NO_GRAPH,
            ("PagedAdamW", "PagedSGD"), error=ValueError,
        )
        for foreach in (None, False, True)
        for fused in (None, False)
    ),
    *(
        Difference(
            "refused", "flags set between steps", f"{{'differentiable': True}}{label}", _NO_GRAPH, ("PagedAdamW",)
        )
        for label in ("", ": trained")
    ),
    *(
        Difference(
            "beyond", "flags with tensors set between steps", f"{{'foreach': True, 'fused': {fused}}}*",
            "A tensor lr put into a group with foreach=True is followed; torch's step raises RuntimeError. Its "
            "constructor raises ValueError, as ours does.",
            ("PagedAdamW",),
        )
        for fused in (None, False)
    ),
    *(
        Difference(
            "beyond", "deleted from a group", f"without {name}",
            f"Groups without {name!r}, as older versions of torch wrote them, are stepped; torch raises KeyError.",
            optimizers,
        )
        for name, optimizers in {
            "foreach": ("PagedAdamW", "PagedSGD"), "fused": ("PagedAdamW", "PagedSGD"),
            "decoupled_weight_decay": ("PagedAdamW",),
        }.items()
    ),
    *(
        Difference(
            "refused", "changed between steps", f"lr=torch.float32 {value}",
            "A tensor lr that has not one element, put into a group, is refused with RuntimeError, as torch's AdamW "
            "does; torch's SGD raises TypeError.",
            ("PagedSGD",), error=RuntimeError,
        )
        for value in ("[0.5, 0.25]", "[]")
    ),
)  # fmt: skip

#: Training loops.
_LOOPS = (
    Difference(
        "beyond", "gradients off", "inference_mode, first=True*",
        "State that is made in torch.inference_mode is followed outside of it, too; torch's raises RuntimeError there.",
    ),
    Difference(
        "refused", "devices that are not meant", "meta*",
        "Parameters on meta are refused at construction and by add_param_group: a kernel has nothing to write to. "
        "torch takes them, and its steps do nothing.",
        error=ValueError,
    ),
)  # fmt: skip

DIFFERENCES: tuple[Difference, ...] = (*_HYPERPARAMETERS, *_LOOPS)
=======
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
>>>>>>> objects


def listed(scenario: str, label: str, optimizer: str, device: str) -> Difference | None:
    """The entry for one point of a transcript."""
    for each in DIFFERENCES:
        named = each.label == label or (each.label.endswith("*") and label.startswith(each.label[:-1]))
        meant = optimizer in (each.optimizers or (optimizer,)) and device in each.devices
        if each.scenario == scenario and named and meant:
            return each
    return None
