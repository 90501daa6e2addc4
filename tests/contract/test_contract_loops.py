"""The contract: training loops, in all the ways in which people write them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.contract.scenarios import World, has, scenario
from tests.world import give

CHAPTER = "loops"


def loss_of(params: list[Any]) -> torch.Tensor:
    """A loss whose gradients are those of no element's neighbour."""
    return torch.stack([((p + 0.3) ** 2 * (i + 1) + 0.1 * p).sum() for i, p in enumerate(params)]).sum()


def backward(optimizer: Any, params: list[Any]) -> torch.Tensor:
    """What stands in every loop before a step."""
    optimizer.zero_grad()
    loss = loss_of(params)
    loss.backward()
    return loss


@scenario(CHAPTER)
def test_closures(world: World) -> None:
    """A step with a closure, as for LBFGS: it is called once, with gradients on, and its loss is returned, also where
    gradients are off around it."""
    params, opt = world.begin([(13, 18), (7,), ()])
    seen = []

    def closure() -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return backward(opt, params)

    world.say("by place, by name", [opt.step(closure), opt.step(closure=closure)])
    for off in (torch.no_grad, torch.enable_grad):
        with off():
            loss = opt.step(closure)
            world.say(f"{off.__name__}", [loss, loss.requires_grad, torch.is_grad_enabled()])
    world.say("no closure", [opt.step(), opt.step(None), opt.step(closure=None)])
    for value in (None, 3.5, "loss", (1, 2), torch.tensor(2.0)):
        world.say(f"returns {value}", opt.step(lambda value=value: value))
    world.say("calls", seen)
    world.show("trained", opt, params)


@scenario(CHAPTER)
def test_closures_that_fail_or_do_more(world: World) -> None:
    """A closure that raises, one that is none, one that adds a group, changes the learning rate, or steps itself."""
    params, opt = world.begin([(13, 18), (7,)], 1)

    def fails() -> None:
        give(params, 5)
        raise OSError("no batch")

    def grows() -> float:
        new = world.param((5, 3), 8)
        params.append(new)
        opt.add_param_group({"params": [new], "lr": 0.4})
        opt.param_groups[0]["lr"] *= 0.5
        give(params, 6)
        return 1.0

    def steps() -> Any:
        return opt.step(lambda: 2.5)

    for label, closure in (("one that raises", fails), ("no closure", 3), ("grows", grows), ("steps", steps)):
        with world.tries(label):
            world.say(f"{label}: returned", opt.step(closure))
        world.show(f"{label}: afterwards", opt, params)
    world.attempt("two of them", opt.step, fails, fails)


@scenario(CHAPTER)
def test_what_a_step_leaves(world: World) -> None:
    """A step leaves gradients, leaves and ``requires_grad`` as they were, and what was saved for a backward of before
    is known to have changed."""
    params = world.params([(13, 18), (7,), ()])
    for maximize in (False, True):
        opt = world.make(params, maximize=maximize)
        give(params, 3)
        grads = [p.grad for p in params]
        versions = [p._version for p in params]
        loss = loss_of(params)
        with torch.enable_grad():
            opt.step()
        same = [(p.grad is g, p.is_leaf, p.requires_grad, p.grad_fn) for p, g in zip(params, grads, strict=True)]
        world.say(f"maximize={maximize}", [same, grads])
        world.say(f"maximize={maximize}: versions", [p._version > v for p, v in zip(params, versions, strict=True)])
        world.attempt(f"maximize={maximize}: the backward of before", loss.backward)
        states = [t for entry in opt.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        world.say(f"maximize={maximize}: state", [(t.requires_grad, t.is_leaf) for t in states])


@scenario(CHAPTER)
def test_a_scaled_loss(world: World) -> None:
    """A ``GradScaler`` whose scale doubles and halves, in each of torch's ways that take one: the steps that it skips,
    ``unscale_`` before some, what is left of the gradients, and a closure."""
    ways: list[dict[str, Any]] = [
        {},
        *({"fused": fused} for fused in (False, True) if has(world.entry, world.device, fused=fused)),
    ]
    for way in ways:
        params, opt = world.begin([(13, 18), (7,), ()], **way)
        scaler = torch.amp.GradScaler(world.device, init_scale=64.0, growth_interval=2)
        for step in range(7):
            opt.zero_grad()
            scaler.scale(loss_of(params)).backward()
            if step in (2, 5):
                params[0].grad.view(-1)[3] = float("inf")
            if step in (1, 5):
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(opt)
            scaler.update()
            world.say(f"{way}, step {step}: the scale", scaler.get_scale())
            if step not in (2, 5):
                world.say(f"{way}, step {step}: gradients", [p.grad for p in params])
            world.show(f"{way}, step {step}", opt, params)
        world.attempt(f"{way}: with a closure", scaler.step, opt, lambda: 1.0)


@scenario(CHAPTER)
def test_gradients_off(world: World) -> None:
    """Steps within ``no_grad``, ``set_grad_enabled``, ``inference_mode`` and ``autocast``, the first or later ones."""
    blocks: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(world.device, torch.bfloat16), "anomaly": torch.autograd.detect_anomaly,
    }  # fmt: skip
    for label, block in blocks.items():
        for first in (True, False):
            params, opt = world.begin([(13, 18), (7,), ()])
            with world.tries(f"{label}, first={first}"):
                for step in range(4):
                    give(params, step)
                    with block() if (step % 2 == 0) is first else contextlib.nullcontext():
                        opt.step()
                world.show(f"{label}, first={first}: trained", opt, params)


@scenario(CHAPTER)
def test_made_in_inference_mode(world: World) -> None:
    """Parameters, or parameters and optimizer, made in ``inference_mode``, and steps taken there and outside."""
    for outside in (False, True):
        with torch.inference_mode():
            params = world.params([(13, 18), (7,), ()])
            if not outside:
                opt = world.trained(params, 2)
        if outside:
            opt = world.make(params)
        with torch.inference_mode():
            give(params, 3)
            world.attempt(f"made outside={outside}: a step inside", opt.step)
            world.show(f"made outside={outside}: inside", opt, params)
        world.attempt(f"made outside={outside}: a step outside", opt.step)


@scenario(CHAPTER)
def test_two_optimizers_over_the_same_parameters(world: World) -> None:
    """Two optimizers over the same parameters, one of torch's and one more over some of them, in turn."""
    params = world.params([(200, 101), (13, 18), ()])
    first, second = world.make(params), world.make(params, lr=0.1)
    third = torch.optim.SGD(params[:2], lr=0.01, momentum=0.5)
    for step in range(4):
        give(params, step)
        for opt in (first, second, third)[step % 2 :]:
            opt.step()
    for label, opt in (("first", first), ("second", second), ("third", third)):
        world.show(label, opt, params)


@scenario(CHAPTER)
def test_an_optimizer_for_each_parameter(world: World) -> None:
    """An optimizer per parameter, stepped and zeroed by ``register_post_accumulate_grad_hook`` within the backward."""
    params = world.params([(200, 101), (13, 18), (7,), (3, 3), ()])
    opts = {p: world.make([p]) for p in params}

    def update(p: Any) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in params:
        p.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        loss_of(params).backward()
    for i, p in enumerate(params):
        world.show(f"parameter {i}", opts[p], [p])
        world.say(f"gradient {i}", p.grad)


@scenario(CHAPTER)
def test_frozen_for_a_while(world: World) -> None:
    """Parameters whose ``requires_grad`` is switched off and on, with their gradients left and with them gone."""
    params, opt = world.begin([(13, 18), (7,), ()])
    for step in range(6):
        params[0].requires_grad_(step not in (1, 2))
        params[1].requires_grad_(step not in (2, 3))
        opt.zero_grad(set_to_none=step != 2)
        loss_of(params).backward()
        opt.step()
        world.show(f"step {step}", opt, params)


@scenario(CHAPTER)
def test_threads(world: World) -> None:
    """Two optimizers that step at once in two threads."""
    many = [world.params([(200, 101), (13, 18), ()]) for _ in range(2)]
    opts = [world.make(each, lr=0.02 * (i + 1)) for i, each in enumerate(many)]
    together = threading.Barrier(2)

    def train(number: int) -> None:
        for step in range(6):
            give(many[number], step)
            together.wait(20)
            opts[number].step()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    for number in range(2):
        world.show(f"at once: {number}", opts[number], many[number])
