"""An optimizer from outside: the numbers of a reference, in every place, saved, loaded and copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support import DEVICES

from tests.acts import absent
from tests.loads import MOVES
from tests.references import written
from tests.specs import BF16, F32, F64, Case
from tests.world import HALF, RESIDENT, SPILLED, Side, Worlds, one_group

from .placement import Ordinary, SmallCard, SmallRam
from .rule import Tempered


def lines(g, x, scale, *, t, lr, decay, eps, start):  # type: ignore[no-untyped-def]
    """The rule in plain torch."""
    rate = decay * (1 - 0.5**t)
    start *= rate
    scale = rate * (torch.ones_like(scale) if t == 1 else scale) + (1 - rate) * g.square()
    return {"x": x - lr * (1 - start) * g / (scale.sqrt() + eps), "scale": scale, "start": start}


TEMPERED = Case(
    name="tempered", rule="tempered", ours=Tempered, theirs=written(Tempered, lines, start=1.0),
    options={"lr": 0.03, "decay": 0.8, "eps": 1e-3}, other={},
)  # fmt: skip
#: Where state may be, placements of one's own among them.
PLACES = {
    "cpu": (SPILLED, HALF, Side("small", {"placement": SmallRam}, 0.5), Side("ordinary", {"placement": Ordinary})),
    "cuda": (
        SPILLED, Side("in place", {"host_access": "in_place"}, 0.5), Side("SmallCard", {"placement": SmallCard}, 0.6),
    ),
}  # fmt: skip


def last_apart(params: Any) -> Any:
    return [{"params": params[1:]}, {"params": params[:1], "lr": 0.01}]


one_is_absent = absent(lambda step: (step % 6,) if step % 4 == 1 else ())


@pytest.mark.parametrize("device", DEVICES)
def test_its_numbers_are_those_of_the_reference_whatever_is_done_wherever_state_is(device: str) -> None:
    worlds = Worlds(TEMPERED, RESIDENT, *PLACES[device], device=device, groups=last_apart).step(4, one_is_absent)
    for name, act in MOVES.items():
        assert not worlds.do(act, name).step(2, one_is_absent).over
        for world in worlds.ours:
            if "placement" in world.options:
                assert world.optimizer.memory_report().placement == world.side.name
    starts = {float(entry["start"]) for entry in worlds.ours[0].state.values()}
    assert len(starts) > 1, "all parameters have one number"


@pytest.mark.parametrize("device", DEVICES)
def test_other_dtypes_begin_at_one_too(device: str) -> None:
    assert (
        not Worlds(TEMPERED, RESIDENT, *PLACES[device], device=device, dtypes=(F32, F64, BF16), groups=one_group)
        .step(3)
        .over
    )
