"""The contract: the arguments of torch's classes, and the flags by which they choose one of their implementations."""

from __future__ import annotations

import inspect
import itertools

import torch

from tests.contract.scenarios import FLAGS, World, group_of, odd_values, ordinary, reference, scenario, switches, tried
from tests.world import give

CHAPTER = "hyperparameters"


def flags(world: World) -> list[str]:
    """The flags that torch's class has; a stand-in's are its own."""
    return [name for name in FLAGS if name in world.known] if world.entry.torch else []


def choices(world: World) -> list[dict[str, bool | None]]:
    """``foreach`` and, where torch's class has it, ``fused``: each value with each."""
    names = [name for name in ("foreach", "fused") if name in flags(world)]
    values = itertools.product((None, False, True), repeat=len(names))
    return [dict(zip(names, each, strict=True)) for each in values]


def fuses(world: World) -> bool:
    """Whether torch's class has a fused kernel for this device; older versions of Adagrad have one for CPUs alone."""
    p = world.param()
    give([p], 0)
    try:
        reference(world.entry)([p], fused=True).step()
    except (TypeError, RuntimeError):
        return False
    return True


@scenario(CHAPTER)
def test_every_argument(world: World) -> None:
    """What torch's class takes is taken, in torch's order, with torch's defaults."""
    given = inspect.signature(world.kind).parameters.values()
    names = world.known if world.entry.torch else world.known - set(FLAGS)
    world.say("arguments", [(p.name, p.default, str(p.kind)) for p in given if p.name in names])
    hyper = {name: value for name, value in group_of(world.kind([world.param()])).items() if name in names}
    world.say("a group of defaults", hyper)


@scenario(CHAPTER)
def test_arguments_by_place(world: World) -> None:
    """Hyperparameters given by position."""
    p = world.param()
    takes = inspect.signature(world.kind).parameters.values()
    chosen = {**ordinary(world.entry), **({"foreach": False} if world.options is None else world.options)}
    placed = [a for a in takes if a.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
    named = {name: value for name, value in chosen.items() if name not in [a.name for a in placed]}
    opt = world.kind([p], *(chosen.get(a.name, a.default) for a in placed), **named)
    world.train(opt, [p], show="trained")


@scenario(CHAPTER)
def test_every_combination_of_flags(world: World) -> None:
    """``foreach`` and ``fused``, None, False and True, with every value that torch takes or refuses."""
    for choice in choices(world):
        for label, hyper in [("", {}), *odd_values(world)]:
            params = hyper.pop("params", [world.param((3,))])
            world.attempt(f"{choice} {label}", world.make, params, **choice, **hyper)


@scenario(CHAPTER)
def test_steps_with_flags(world: World) -> None:
    """A step with ``foreach`` and ``fused`` in every combination, with each of the switches on and off."""
    for choice in choices(world):
        for name, on in itertools.product(switches(world), (False, True)):
            more = {"dampening": 0} if name == "nesterov" else {}
            tried(world, f"{choice} {name}={on}", **choice, **{name: on}, **more)


@scenario(CHAPTER)
def test_differentiable(world: World) -> None:
    """``differentiable=True``, by itself and with ``foreach`` and ``fused``."""
    if "differentiable" in flags(world):
        for choice in choices(world):
            world.attempt(f"{choice}", world.make, [world.param((3,))], differentiable=True, **choice)
    world.say("asked", sorted(flags(world)))


@scenario(CHAPTER)
def test_flags_set_between_steps(world: World) -> None:
    """``foreach``, ``fused``, ``differentiable``, ``amsgrad``, ``nesterov``, ``maximize`` and ``momentum`` are set in a
    group in mid-training, and taken back."""
    changes = [{name: True} for name in (*flags(world), *switches(world)) if name != "capturable"]
    changes += [{"foreach": True, "fused": True}] if "fused" in flags(world) else []
    changes += [{"momentum": 0.0}, {"momentum": 0.5}] if "momentum" in world.known else []
    for change in changes:
        params, opt = world.begin([(13, 5), (4,)], 1, **{"dampening": 0} if "nesterov" in change else {})
        before = {name: opt.param_groups[0][name] for name in change}
        opt.param_groups[0].update(change)
        world.attempt(f"{change}", world.train, opt, params, range(1, 3), show=f"{change}: trained")
        opt.param_groups[0].update(before)
        world.attempt(f"{change}: taken back", world.train, opt, params, range(3, 5))


@scenario(CHAPTER)
def test_flags_with_tensors_set_between_steps(world: World) -> None:
    """A learning rate becomes a tensor in a group whose ``foreach`` or ``fused`` is True."""
    for choice in choices(world):
        p = world.param((13, 5))
        with world.tries(f"{choice}"):
            opt = world.trained([p], 1, **choice)
            opt.param_groups[0]["lr"] = torch.tensor(0.2)
            world.train(opt, [p], range(1, 3), show=f"{choice}: trained")


@scenario(CHAPTER)
def test_flags_that_are_loaded(world: World) -> None:
    """A state dict brings flags and values: another optimizer's, and with flags left out, as old versions wrote it."""
    params = world.params([(13, 5), (4,)])
    other = world.make(world.params([(13, 5), (4,)]), lr=0.5, **({"fused": True} if fuses(world) else {}))
    opt = world.trained(params, 1)
    saved = opt.state_dict()
    saved["param_groups"] = other.state_dict()["param_groups"]
    opt.load_state_dict(saved)
    world.train(opt, params, range(1, 3), show="flags of another")
    world.say("its group", group_of(opt))
    for name in (*flags(world), *(switches(world) if world.entry.torch else ())):
        saved = opt.state_dict()
        saved["param_groups"] = [{k: v for k, v in group.items() if k != name} for group in saved["param_groups"]]
        with world.tries(f"without {name}"):
            opt.load_state_dict(saved)
            world.train(opt, params, range(3, 4))
        world.say(f"without {name}: group", group_of(opt))
    world.show("in the end", opt, params)


@scenario(CHAPTER)
def test_complex_parameters_and_fused(world: World) -> None:
    """Flags that choose torch's fused kernel, over a complex parameter, with and without a gradient."""
    chosen = [flags for flags in ({"fused": True}, {"fused": True, "capturable": True}) if flags.keys() <= world.known]
    world.say("flags", chosen)
    for flags, skip in itertools.product(chosen, ([0], [])):
        params = [world.param((3,), 0, torch.complex64), world.param((3,), 1)]
        opt = world.make(params, **flags)
        give(params, 0, skip)
        world.attempt(f"{flags}: {'no' if skip else 'a'} gradient", opt.step)
