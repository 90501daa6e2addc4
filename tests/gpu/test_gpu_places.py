"""Wherever state lies on a GPU, and however a step reaches it: torch's numbers, and to the bit those of a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gpu_support import NEEDED
from support import BF16, F16, F32, F64

from pagedopt.transports.choose import TRANSPORTS
from tests.acts import absent, add_group
from tests.specs import BY_STATE
from tests.world import RESIDENT, Act, Side, World, Worlds

pytestmark = NEEDED

ADAMW = BY_STATE["adamw"]
CPU = Side("cpu", device="cpu")
IN_PLACE = {"host_access": "in_place"}
PLACES = (
    *(Side(f"staged {share}", share=share) for share in (0, 0.2, 0.5, 2)),
    *(Side(f"in place {share}", IN_PLACE, share) for share in (0, 0.2, 0.5, 2)),
    *(Side(f"managed {share}", {"placement": "managed"}, share) for share in (None, 0, 0.5)),
    *(Side(f"host {share}", {"placement": "host"}, share) for share in (None, 0)),
    *(Side(name, {"transport": name}) for name in sorted(TRANSPORTS)),
    *(Side(f"staged by {name}", {"transport": name}, 0.5) for name in sorted(TRANSPORTS)),
    *(Side(f"in place by {name}", {"transport": name, **IN_PLACE}, 0.5) for name in sorted(TRANSPORTS)),
    Side("managed by the driver", {"placement": "managed-driver"}),
    Side("host in place", {"placement": "host", **IN_PLACE}),
    Side("8 blocks", {"blocks": 8}),
    Side("in place, 3 blocks", {"blocks": 3, **IN_PLACE}, 0),
)
FORMATS = ("float32", "bfloat16", {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}, "int8")
one_is_absent = absent(lambda step: (step % 6,) if step % 3 == 1 else ())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", BY_STATE)
def test_every_place_has_the_bits_of_a_cpu(name: str, clip: float | None) -> None:
    """A group that comes late shares the budget."""
    worlds = Worlds(BY_STATE[name], RESIDENT, CPU, *PLACES, device="cuda", clip=clip)
    assert not worlds.step(4, one_is_absent).do(add_group).step(3, one_is_absent).over


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("form", [None, *FORMATS], ids=str)
def test_every_dtype_and_format_has_the_bits_of_a_cpu(form: Any, clip: float | None) -> None:
    # torch adds squares of 16-bit gradients in 16 bits.
    case, sides = dataclasses.replace(ADAMW, theirs=None if clip else ADAMW.theirs), (RESIDENT, CPU, *PLACES)
    if form is not None:
        how = {"state_format": form, "seed": 7} if form == "int8" else {"state_format": form}
        sides = tuple(dataclasses.replace(side, options={**(side.options or {}), **how}) for side in sides)
    dtypes = (F32, BF16, F32, F64, F16, F32) if form is None else (F32, BF16, F64)
    assert not Worlds(case, *sides, device="cuda", dtypes=dtypes, clip=clip).step(6, one_is_absent).over


def infinite(*steps: int) -> Act:
    def act(world: World) -> None:
        if world.count in steps:
            world.params[0].grad.view(-1)[3] = float("inf")  # type: ignore[union-attr]

    return act


@pytest.mark.parametrize("skipped", [(), (0, 3)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["adamw", "amsgrad", "momentum"])
def test_scaled_steps_are_torch_s_and_the_same_in_every_place(name: str, clip: float | None, skipped: Any) -> None:
    """Their uniforms are the prologue's, whose ``pow`` may differ from a CPU's in the last bit."""
    worlds = Worlds(BY_STATE[name], RESIDENT, *PLACES, device="cuda", clip=clip, scale=64.0).step(6, infinite(*skipped))
    assert len({world.scaler.get_scale() for world in worlds.each()}) == 1
    assert not worlds.over
