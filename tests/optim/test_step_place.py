"""Step counts lie where torch has them, in its dtype, and those on a device cost no waiting."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import DEVICES, NEEDED, no_synchronizing
from support import default_dtype

from pagedopt import PagedAdamW
from tests.acts import absent
from tests.loads import MOVES
from tests.specs import CASES, Case
from tests.world import HALF, RESIDENT, SIDES, SPILLED, Side, World, Worlds, bits, give

ADAMW = CASES["adamw"]
FLAGS = [{}, {"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}]
ON_DEVICE = [pytest.param(flags, marks=NEEDED, id=str(flags)) for flags in FLAGS[1:3]]


def replace(flags: dict[str, bool]) -> Case:
    return dataclasses.replace(ADAMW, options={**ADAMW.options, **flags})


def flagged(flags: dict[str, bool], *sides: Side, device: str) -> Worlds:
    """torch's optimizer and ours with the same flags."""
    return Worlds(replace(flags), *sides, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_counts_lie_where_torch_has_them(flags: dict[str, bool], wide: bool, device: str) -> None:
    """In a new optimizer, too, which a state dict says that it is capturable."""
    with default_dtype(torch.float64 if wide else torch.float32):
        worlds = flagged(flags, RESIDENT, SPILLED, device=device).step(2).do(MOVES["a new one"]).step(2)
    assert worlds.over == (flags == {"capturable": True} and device == "cpu")


def test_a_refusal_of_capturable_waits_for_a_gradient_as_torch_does() -> None:
    for kind in (torch.optim.AdamW, PagedAdamW):
        p = torch.nn.Parameter(torch.ones(3))
        opt = kind([p], capturable=True)  # type: ignore[arg-type]
        opt.step()
        p.grad = torch.ones(3)
        with pytest.raises(AssertionError):
            opt.step()
        assert torch.equal(p, torch.ones(3))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """``torch.distributed`` with a process that is a group of its own."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.mark.parametrize("by", ["a collective", ".data"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_counts_that_others_have_written_are_followed(flags: dict[str, bool], device: str, by: str, alone: Any) -> None:
    """No version counter tells of these writes.  With one process, gloo's scatter writes what a broadcast would."""
    if flags == {"capturable": True} and device == "cpu":
        pytest.skip("refused, as in torch")

    def write(world: World) -> None:
        for p in world.params:
            count = world.state[p]["step"]
            before = count._version
            if by == ".data" or count.is_cuda:
                count.data.fill_(100)
            else:
                alone.scatter(count, [torch.tensor(100.0)])
            assert (count.item(), count._version) == (100, before)

    assert not flagged(flags, *SIDES[:3], device=device).step(4).do(write).step(2).over


def fill(world: World) -> None:
    for p, number in zip(world.params, itertools.cycle((7, 100, 2**24)), strict=False):
        world.state[p]["step"].fill_(number)


@pytest.mark.parametrize("flags", ON_DEVICE)
def test_a_count_on_a_device_is_followed_when_it_is_edited_and_not_waited_for(flags: dict[str, bool]) -> None:
    worlds = flagged(flags, RESIDENT, HALF, device="cuda").step(3)
    for world in worlds.ours:
        give(world.params, 3)
        with no_synchronizing():
            world.optimizer.step()
    assert worlds.theirs is not None
    give(worlds.theirs.params, 3)
    worlds.theirs.optimizer.step()
    worlds.do(fill).step(3, absent(lambda step: (step % 3,)))
    assert not worlds.over
    assert all(t.is_cuda for world in worlds.ours for (_, name), t in world.tensors().items() if name == "step")


@pytest.mark.parametrize("flags", ON_DEVICE)
def test_a_count_that_was_put_on_the_cpu_comes_back_where_flags_ask_for_the_device(flags: dict[str, bool]) -> None:
    """As ``ZeroRedundancyOptimizer.load_state_dict`` puts it there."""
    for side in (RESIDENT, SPILLED):
        usual, moved = (World(replace(flags), side, "cuda") for _ in range(2))
        for world in (usual, moved):
            assert [world.step() for _ in range(2)] == [None] * 2
        for p in moved.params:
            moved.state[p] = {name: t.cpu() if name == "step" else t for name, t in moved.state[p].items()}
        for world in (usual, moved):
            assert [world.step() for _ in range(2)] == [None] * 2
        both = (map(bits, world.snapshot()) for world in (usual, moved))  # versions differ: counts came back as others
        assert all(map(torch.equal, *both))
        assert all(moved.state[p]["step"].is_cuda for p in moved.params)
