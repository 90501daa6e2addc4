"""Wherever state lies, and however a step reaches it, on a GPU as on a CPU: torch's numbers, and the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from often import MARKS
from optim_support import through_file
from support import BF16, F16, F32, F64

from pagedopt.transports.choose import TRANSPORTS
from tests.acts import absent, add_group, infinite
from tests.loads import MOVES, renew
from tests.specs import BY_STATE
from tests.world import RESIDENT, Side, World, Worlds

IN_PLACE = {"host_access": "in_place"}
EVERYWHERE = (
    *(Side(f"part {share}", share=share) for share in (0, 0.2, 0.5, 2)),
    *(Side(f"host {share}", {"placement": "host"}, share) for share in (None, 0)),
    Side("preallocated", {"preallocate": True}),
    Side("8 blocks", {"blocks": 8}),
)
PLACES = {
    "cpu": (*EVERYWHERE, Side("file", {"placement": "file"}), Side("in Python", share=0.5, python=True)),
    "cuda": (
        Side("cpu", device="cpu"),
        *EVERYWHERE,
        *(Side(f"in place {share}", IN_PLACE, share) for share in (0, 0.2, 0.5, 2)),
        *(Side(f"managed {share}", {"placement": "managed"}, share) for share in (None, 0, 0.5)),
        *(Side(name, {"transport": name}) for name in sorted(TRANSPORTS)),
        *(Side(f"staged by {name}", {"transport": name}, 0.5) for name in sorted(TRANSPORTS)),
        *(Side(f"in place by {name}", {"transport": name, **IN_PLACE}, 0.5) for name in sorted(TRANSPORTS)),
        Side("managed by the driver", {"placement": "managed-driver"}),
        Side("host in place", {"placement": "host", **IN_PLACE}),
        Side("in place, 3 blocks", {"blocks": 3, **IN_PLACE}, 0),
    ),
}
#: How parameters and state are stored.
FORMATS: tuple[dict[str, Any], ...] = (
    {}, {"state_format": "float32"}, {"state_format": "bfloat16"},
    {"state_format": {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}}, {"state_format": "int8", "seed": 7},
    {"param_rounding": "stochastic"}, {"param_format": "bfloat16+16"},
    {"param_format": "bfloat16+8", "state_format": "int8"},
)  # fmt: skip
one_is_absent = absent(lambda step: (step % 6,) if step % 3 == 1 else ())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", BY_STATE)
def test_no_place_changes_a_bit(name: str, clip: float | None, device: str) -> None:
    """A group that comes late shares the budget."""
    worlds = Worlds(BY_STATE[name], RESIDENT, *PLACES[device], device=device, clip=clip)
    worlds.step(4, one_is_absent).do(add_group).step(3, one_is_absent)
    for act in ("deepcopy", "pickle"):
        before = [world.optimizer.memory_report().by_place.keys() for world in worlds.ours]
        assert [w.optimizer.memory_report().by_place.keys() for w in worlds.do(MOVES[act]).ours] == before
        worlds.step(2)
    assert not worlds.over


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype", "form"), [("adamw", F32, None), ("momentum", F32, None), ("adamw", BF16, "float32")]
)
def test_every_place_goes_on_from_what_another_has_saved(
    name: str, dtype: Any, form: Any, device: str, tmp_path: Path
) -> None:
    """To the bits of the first side, which loads nothing; a file is read as it was written, to the CPU, or mapped."""
    sides = (RESIDENT, *PLACES[device])
    if form is not None:
        sides = tuple(
            dataclasses.replace(side, options={**(side.options or {}), "state_format": form}) for side in sides
        )
    worlds = Worlds(BY_STATE[name], *sides, device=device, dtypes=(dtype,)).step(3, one_is_absent)
    for turn, how in enumerate(({}, {"map_location": "cpu"}, {"mmap": True}), 1):
        for i, world in enumerate(worlds.ours):
            torch.save(world.optimizer.state_dict(), tmp_path / f"{i}.pt")
        files = {world: tmp_path / f"{(i + turn) % len(sides)}.pt" for i, world in enumerate(worlds.each()) if i}

        def act(world: World, files: Any = files, how: Any = how) -> None:
            if world in files:
                renew(lambda *_: torch.load(files[world], weights_only=True, **how))(world)

        worlds.do(act)
        assert not worlds.step(3, one_is_absent).over


def resume(world: World) -> None:
    """From a file, in an optimizer of another seed; the first side goes on."""
    if world.side.name != RESIDENT.name:
        world.options = {**world.options, "seed": 9}
        renew(lambda saved, _: through_file(saved))(world)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("how", "clip"),
    [
        pytest.param(how, clip, id=f"{how}-{clip}", marks=MARKS[clip is None or how in (FORMATS[0], FORMATS[4])])
        for how in FORMATS
        for clip in (None, 0.5)
    ],
)
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_no_place_changes_a_bit_of_any_dtype_and_format(
    name: str, how: dict[str, Any], clip: float | None, device: str
) -> None:
    """Nor do a copy, and a file that another one loads."""
    case, sides = BY_STATE[name], (RESIDENT, *PLACES[device])
    if isinstance(how.get("state_format"), dict) and name == "lion":
        how = {"state_format": {"exp_avg": "bfloat16"}}
    if clip or {"param_rounding", "param_format"} & how.keys():  # torch adds squares of 16-bit gradients in 16 bits
        case = dataclasses.replace(case, theirs=None)
    sides = tuple(dataclasses.replace(side, options={**(side.options or {}), **how}) for side in sides)
    dtypes = (F32, BF16, F64) if how else (F32, BF16, F32, F64, F16, F32)
    worlds = Worlds(case, *sides, device=device, dtypes=dtypes, clip=clip).step(4, one_is_absent)
    for act in (MOVES["deepcopy"], resume):
        assert not worlds.do(act).step(2).over


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skipped", [(), (0, 3)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_scaled_steps_are_the_same_in_every_place(name: str, clip: float | None, skipped: Any, device: str) -> None:
    """On a GPU their uniforms are the prologue's, whose ``pow`` may differ from a CPU's in the last bit."""
    sides = [RESIDENT, *(side for side in PLACES[device] if side.device is None)]
    worlds = Worlds(BY_STATE[name], *sides, device=device, clip=clip, scale=64.0).step(6, infinite(*skipped))
    assert len({world.scaler.get_scale() for world in worlds.each()}) == 1
    assert not worlds.over
