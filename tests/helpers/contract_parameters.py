"""The contract: parameters, whatever their sizes, layouts and dtypes, and what is done to them between steps."""

from __future__ import annotations

import torch
from contract_world import World, scenario

CHAPTER = "parameters"


@scenario(CHAPTER)
def sizes(world: World) -> None:
    """Parameters of 0 dimensions, 0, 1, 3, 4,097 and more than 65,536 elements in one optimizer."""
    params = world.params([(), (0,), (1,), (3,), (4097,), (70_001,), (0, 5)])
    opt = world.make(params)
    world.train(opt, params)
    world.show("trained", opt, params)


@scenario(CHAPTER)
def a_module_cast_between_steps(world: World) -> None:
    """``module.half()`` between two steps: state stays float32 in ours and torch alike, or both refuse."""
    net = torch.nn.Linear(13, 18).to(world.device)
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(world.values(p.shape, i))
    opt = world.make(net.parameters())
    world.train(opt, net.parameters())
    net.half()
    with world.tries("a step in float16"):
        world.train(opt, net.parameters(), range(3, 4))
    world.show("after", opt, net.parameters())
