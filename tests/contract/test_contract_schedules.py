"""The contract: schedules of the learning rate and of the momentum, and averages of weights."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

from tests.contract.scenarios import World, scenario

CHAPTER = "loops"


STEPS = 7
#: Arguments with which each moves within them.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch}, "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9},
    "StepLR": {"step_size": 2, "gamma": 0.5}, "MultiStepLR": {"milestones": [2, 5], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 4}, "LinearLR": {"start_factor": 0.2, "total_iters": 6},
    "ExponentialLR": {"gamma": 0.8}, "PolynomialLR": {"total_iters": 7, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 1e-3}, "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "ReduceLROnPlateau": {"patience": 1, "factor": 0.5}, "SWALR": {"swa_lr": 0.2, "anneal_epochs": 4},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 12},
}  # fmt: skip


def _others(opt: Any) -> list[Any]:
    return [lr_scheduler.LinearLR(opt, 0.2, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.8)]


#: Those that are made of others, which they drive.
MADE_OF_OTHERS: dict[str, Callable[[Any], Any]] = {
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(opt, _others(opt), [4]),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(_others(opt)),
}


def schedules() -> dict[str, Callable[[Any], Any]]:
    """How to make each scheduler of the installed torch for an optimizer; one that is new fails here, by name."""
    named = {**vars(lr_scheduler), **vars(swa_utils)}.items()
    found: dict[str, Callable[[Any], Any]] = {}
    for name, kind in named:
        if not inspect.isclass(kind) or not issubclass(kind, lr_scheduler.LRScheduler) or name.endswith("LRScheduler"):
            continue
        found[name] = MADE_OF_OTHERS.get(name) or (lambda opt, kind=kind: kind(opt, **ARGUMENTS[kind.__name__]))
    return found


def values_of(optimizer: Any) -> list[Any]:
    """What schedules change."""
    return [[group.get(name) for name in ("lr", "momentum", "betas", "initial_lr")] for group in optimizer.param_groups]


def advance(scheduler: Any, step: int) -> None:
    """One epoch; a plateau is told a loss that has stopped falling."""
    losses = (3.0, 2.0, 2.0, 2.5, 2.0, 2.0)
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*((losses[min(step, 5)],) if is_plateau else ()))


def play_schedules(world: World, lr: Callable[[], Any]) -> None:
    """Train with each scheduler, and write the values and the parameters down."""
    for name, make in schedules().items():
        params = world.params([(13, 18), (7,)])
        opt = world.make([{"params": params[:1]}, {"params": params[1:], "lr": lr()}], lr=lr())
        with world.tries(name):
            scheduler = make(opt)
            values = []
            for step in range(STEPS):
                world.train(opt, params, [step])
                values.append(copy.deepcopy(values_of(opt)))
                advance(scheduler, step)
            world.say(f"{name}: values, and whether they move", [values, len({str(each) for each in values}) > 1])
            world.show(f"{name}: trained", opt, params)


@scenario(CHAPTER)
def test_every_scheduler(world: World) -> None:
    """Each scheduler of the installed torch, over two groups: what it sets in them, and the parameters that come of it;
    the cyclic ones drive momentum or betas, too."""
    play_schedules(world, lambda: 0.05)


@scenario(CHAPTER)
def test_every_scheduler_of_a_tensor(world: World) -> None:
    """Each scheduler of the installed torch, with learning rates in tensors, which it changes in place."""
    play_schedules(world, lambda: torch.tensor(0.05))


@scenario(CHAPTER)
def test_schedulers_that_are_resumed(world: World) -> None:
    """Each scheduler is saved with its optimizer in the middle, and both are loaded into new ones."""
    for name, make in schedules().items():
        params, opt = world.begin([(13, 18), (7,)])
        with world.tries(name):
            scheduler = make(opt)
            for step in range(STEPS):
                world.train(opt, params, [step])
                advance(scheduler, step)
                if step == 3:
                    saved = copy.deepcopy((opt.state_dict(), scheduler.state_dict()))
                    opt = world.make(params)
                    scheduler = make(opt)
                    opt.load_state_dict(saved[0])
                    scheduler.load_state_dict(saved[1])
            world.say(f"{name}: values", values_of(opt))
            world.show(f"{name}: trained", opt, params)


@scenario(CHAPTER)
def test_a_scheduler_that_is_ahead(world: World) -> None:
    """A scheduler that steps before its optimizer warns of it, one behind it does not; and copies of an optimizer that
    has a scheduler step by themselves."""
    params = world.params([(13, 18), (7,)])
    for ahead in (True, False):
        opt = world.make(params)
        scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                if ahead:
                    scheduler.step()
                world.train(opt, params, [step])
                if not ahead:
                    scheduler.step()
        world.say(f"ahead={ahead}", [w.category.__name__ for w in caught if "lr_scheduler" in str(w.message)])
    twin, others = copy.deepcopy((opt, params))
    world.train(twin, others, range(2, 4), show="the copy")
    world.show("the original", opt, params)


@scenario(CHAPTER)
def test_averaged_weights(world: World) -> None:
    """``AveragedModel``, plain and exponential, beside a model that is trained, with ``SWALR``."""
    for label, how in (("swa", {}), ("ema", {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)})):
        net = world.filled(torch.nn.Linear(13, 18))
        opt = world.make(net.parameters())
        average = swa_utils.AveragedModel(net, **how)
        scheduler = swa_utils.SWALR(opt, swa_lr=0.1, anneal_epochs=2)
        for step in range(4):
            world.train(opt, net.parameters(), [step])
            average.update_parameters(net)
            scheduler.step()
        world.say(f"{label}: averages", list(average.parameters()))
        world.show(f"{label}: trained", opt, net.parameters())
