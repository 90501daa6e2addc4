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


#: Classes whose torch's step views complex numbers as real ones.
_AS_REAL = ("PagedAdamW",)

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "beyond", "a step that is refused", "all is as it was",
        "A step that refuses one parameter has changed nothing: no parameter, state or step count. torch's loop has "
        "updated those before it, and counted.",
    ),
    Difference(
        "beyond", "complex between steps", "conjugated*",
        "A parameter that is a conjugated view is updated; torch raises RuntimeError, as it cannot view it as real.",
        _AS_REAL,
    ),
    Difference(
        "beyond", "of complex numbers", "conjugated*",
        "A conjugated gradient is taken; torch raises RuntimeError, as it cannot view it as real.",
        _AS_REAL,
    ),
    Difference(
        "beyond", "laid out otherwise", "strides of state",
        "State is laid out as its parameter, as torch's other optimizers lay it out, so that one launch reads both in "
        "order; torch's SGD keeps the layout of the first gradient. The values are the same.",
        ("PagedSGD",),
    ),
    Difference(
        "refused", "sparse without state", "a step",
        "Sparse gradients are refused with RuntimeError by every Paged class, and nothing is updated; torch's SGD "
        "takes them as long as nothing dense is added to them (momentum, weight decay).",
        ("PagedSGD",), error=RuntimeError,
    ),
    Difference(
        "beyond", "of another dtype", "*",
        "A gradient of another dtype is taken, as near to float64 as the dtypes allow; torch raises RuntimeError.",
        ("PagedAdamW",),
    ),
    *(
        Difference(
            "beyond", "of another dtype", f"{pair}: dtypes of state",
            "State is made in the parameter's dtype, as torch's other optimizers make it and as the estimate says, or "
            "in the state_format asked for; torch's SGD keeps that of the first gradient.",
            ("PagedSGD",),
        )
        for pair in ("float32 of bfloat16", "float32 of float16", "float64 of float32")
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
