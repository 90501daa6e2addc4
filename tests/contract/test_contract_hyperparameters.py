"""The contract: hyperparameters, whatever they are made of and whenever they change."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.contract.odd_values import group_of, odd_values, shown, switches, tried
from tests.contract.scenarios import World, ordinary, scenario
from tests.specs import spec_of
from tests.world import give

CHAPTER = "hyperparameters"


@scenario(CHAPTER)
def test_values_of_zero(world: World) -> None:
    """A learning rate, betas, an epsilon, a weight decay, a momentum or a dampening of zero, each and all together,
    with a gradient that is zero in places."""
    zeros: dict[str, Any] = dict.fromkeys(ordinary(world.entry), 0.0)
    if "betas" in zeros:
        zeros["betas"] = world.betas(spec_of(world.entry).least_beta, 0.0)
    for label, hyper in [*((name, {name: zero}) for name, zero in zeros.items()), ("all", zeros)]:
        p = world.param((13, 5))
        opt = world.make([p], **hyper)
        for step in range(3):
            give([p], step)
            p.grad[3 * step : 3 * step + 4] = 0
            opt.step()
        world.show(label, opt, [p])
    for label, betas in (("only beta1", (0.0, 0.9)), ("only beta2", (0.9, 0.0))):
        if "betas" in zeros:
            tried(world, label, betas=world.betas(*betas))


@scenario(CHAPTER)
def test_odd_values_at_construction(world: World) -> None:
    """Values at the edges of what is taken, and beyond: negative, NaN, infinite, too large, of the wrong type, tensors
    of two elements, one float and one tensor as betas; then two steps, if it was made."""
    for label, hyper in odd_values(world):
        params = hyper.pop("params", [p := world.param((13, 5))])
        with world.tries(label):
            infinite = math.inf in hyper.values()
            opt = (world.make_default if infinite else world.make)(params, **hyper)
            world.say(f"{label}: group", {name: value for name, value in group_of(opt).items() if name in hyper})
            world.train(opt, [p], range(2), show=f"{label}: trained")


@scenario(CHAPTER)
def test_a_tensor_that_is_the_learning_rate(world: World) -> None:
    """A learning rate in a tensor, changed in place between steps, replaced and made a number again."""
    for kind in (torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64),
                 torch.tensor(0.2, device=world.device)):  # fmt: skip
        label = shown(kind)
        params = world.params()
        with world.tries(label):
            opt = world.trained(params, 2, lr=kind)
            world.say(f"{label}: it is the group's", opt.param_groups[0]["lr"] is kind)
            kind.mul_(0.5)
            world.train(opt, params, range(2, 4))
            kind.zero_()
            world.train(opt, params, range(4, 5))
            kind.fill_(0.3)
            world.train(opt, params, range(5, 6))
            opt.param_groups[0]["lr"] = 0.02
            world.train(opt, params, range(6, 7), show=f"{label}: trained")
            world.say(f"{label}: afterwards", kind)


@scenario(CHAPTER)
def test_warnings_of_values(world: World) -> None:
    """What is warned of: a learning rate that asks for gradients, and a parameter that stands twice in a group."""
    p = world.param((3,))
    makes: dict[str, Callable[[], Any]] = {
        "lr": lambda: world.make([p], lr=torch.tensor(0.1, requires_grad=True)), "twice": lambda: world.make([p, p]),
        "nothing": lambda: world.make([p]),
    }  # fmt: skip
    world.train(world.make([p]), [p], range(2))  # ours says once of a process that the budget holds no page
    once = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        for label, make in makes.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                world.train(make(), [p], range(2))
            world.say(label, [w.category.__name__ for w in caught])
    finally:
        torch.set_warn_always(once)


@scenario(CHAPTER)
def test_tensors_in_groups(world: World) -> None:
    """Each group has a tensor of its own for each of its hyperparameters, and all change in place between steps."""
    params = world.params()
    groups: list[dict[str, Any]] = []
    for i, p in enumerate(params):
        own: dict[str, Any] = {"lr": torch.tensor(0.01 * (i + 1), device=world.device if i % 2 else "cpu")}
        if "betas" in world.known:
            own["betas"] = world.betas(torch.tensor(0.7 + 0.05 * i), torch.tensor(0.9 - 0.1 * i))
        groups.append({"params": [p], **own})
    opt = world.make(groups)
    for step in range(4):
        world.train(opt, params, [step])
        for group in opt.param_groups:
            group["lr"].mul_(0.7)
            for beta in group.get("betas", ()):
                beta.sub_(0.05)
        world.show(f"step {step}", opt, params)


@scenario(CHAPTER)
def test_betas_that_are_tensors(world: World) -> None:
    """Betas as tensors of no and of one dimension, on the CPU and on the device, changed in place where the group holds
    the user's own."""
    if "betas" not in world.known:
        world.say("betas", None)
        return
    for label, make in (("0-dim", torch.tensor), ("1-dim", lambda b, **kw: torch.tensor([b], **kw))):
        for device in {"cpu", world.device}:
            betas = world.betas(make(0.8, device=device), make(0.95, device=device))
            params = world.params()
            with world.tries(f"{label} on {device}"):
                opt = world.trained(params, 2, betas=betas)
                betas[0].fill_(0.6)
                betas[1].fill_(0.7)
                world.train(opt, params, range(2, 4), show=f"{label} on {device}: trained")
                world.say(f"{label} on {device}: group", opt.param_groups[0]["betas"])


@scenario(CHAPTER)
def test_values_of_each_group(world: World) -> None:
    """Groups that differ in every hyperparameter and switch, all of which change between steps."""
    params = world.params([(200, 101), (13, 18), (7,), (3, 3), (1,), ()])
    values = ordinary(world.entry)
    groups: list[dict[str, Any]] = []
    for i, p in enumerate(params):
        own = {n: tuple(b - 0.1 * i for b in v) if n == "betas" else v * (1 + 0.3 * i) for n, v in values.items()}
        own |= {name: bool(i >> bit & 1) for bit, name in enumerate(switches(world))}
        groups.append({"params": [p], **own})
    opt = world.make(groups)
    for step in range(4):
        world.train(opt, params, [step], show=f"step {step}")
        for group in opt.param_groups:
            for name in values:
                group[name] = tuple(b * 0.9 for b in group[name]) if name == "betas" else group[name] * 0.8
            group["maximize"] = not group["maximize"]


@scenario(CHAPTER)
def test_values_changed_between_steps(world: World) -> None:
    """Each value of a group is replaced between two steps by one at the edges of what torch takes, and beyond."""
    for label, hyper in odd_values(world):
        ((name, value), *others) = hyper.items()
        if others or name in ("params", "unknown"):
            continue
        p = world.param((13, 5))
        opt = world.trained([p], 1)
        opt.param_groups[0][name] = value
        world.attempt(label, world.train, opt, [p], range(1, 2), show=f"{label}: trained")


@scenario(CHAPTER)
def test_deleted_from_a_group(world: World) -> None:
    """Each value is deleted from a group, where torch's step raises; when it is back a step goes on."""
    params, opt = world.begin([(13, 5), (4,)], 1)
    for name in [name for name in opt.param_groups[0] if name != "params"]:
        value = opt.param_groups[0].pop(name)
        world.attempt(f"without {name}", world.train, opt, params, range(1, 2))
        opt.param_groups[0][name] = value
    world.train(opt, params, range(2, 3))
    world.say("in the end", group_of(opt))


@scenario(CHAPTER)
def test_parameters_that_are_never_trained(world: World) -> None:
    """Parameters of integers and bytes among the others, as quantized layers have them: no gradient, no state."""
    params = [world.param((13, 18)), torch.nn.Parameter(torch.arange(7, device=world.device), requires_grad=False)]
    opt = world.make(params)
    opt.add_param_group({"params": torch.nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)})
    world.train(opt, params[:1], range(2))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt, params = copy.deepcopy((opt, params))
    world.train(opt, params[:1], range(2, 4))
    world.show("trained", opt, params)


@scenario(CHAPTER)
def test_groups_that_are_refused(world: World) -> None:
    """``add_param_group`` with parameters of another group, twice the same, of no leaf, of no tensors, of a set, of
    none, or with no dict: what torch refuses is refused, no group has been added, and a step goes on."""
    p = world.param()
    opt = world.trained([p], 1)
    twice = world.param((3,), 4)
    bad: dict[str, Any] = {
        "one of another group": {"params": [world.param((3,), 3), p]}, "not a leaf": {"params": [p * 2]},
        "no tensor": {"params": [3]}, "a set": {"params": {world.param()}}, "no parameters": {"params": []},
        "without params": {"lr": 0.1}, "no dict": [p], "twice": {"params": [twice, twice]},
        "integers": {"params": [torch.arange(3, device=world.device)]}, "None": {"params": None},
        "names for some": {"params": [("a", world.param((3,), 8)), world.param((3,), 9)]},
        "names where there were none": {"params": [("a", world.param((3,), 8))]},
        "a negative lr": {"params": [world.param((3,), 5)], "lr": -1.0},
        "another word": {"params": [world.param((3,), 6)], "warmth": 3},
        "an option of all": {"params": [world.param((3,), 7)], "device_budget": 0},
    }  # fmt: skip
    for label, group in bad.items():
        world.attempt(label, opt.add_param_group, group)
        world.say(f"{label}: groups", [len(g["params"]) for g in opt.param_groups])
        world.attempt(f"{label}: a step", world.train, opt, [p], range(1, 2))
        del opt.param_groups[1:]
    world.show("in the end", opt, [p])
