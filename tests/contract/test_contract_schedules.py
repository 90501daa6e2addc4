"""The contract: schedules of the learning rate and of the momentum, and averages of weights."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.contract.scenarios import World, scenario
from tests.world import give

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


# --- the contract: what stands around a step: hooks, profilers, notebooks, devices ------------------------------------


@scenario(CHAPTER)
def test_step_hooks(world: World) -> None:
    """Hooks before and behind a step, of one optimizer and of all: their order, what they see, and when they are
    removed."""
    params, opt = world.begin([(13, 18), (7,)])
    seen: list[Any] = []

    def hook(label: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append(
            [label, optimizer is opt, args[:1] == (opt,), sorted(kwargs), params[0].detach().clone()]
        )

    with ExitStack() as stack:
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            stack.callback(register(hook(register.__name__)).remove)
        handles = [opt.register_step_pre_hook(hook("before")), opt.register_step_post_hook(hook("behind"))]
        handles += [opt.register_step_pre_hook(hook("before, too")), opt.register_step_post_hook(hook("behind, too"))]
        world.train(opt, params, range(2))
        opt.step(closure=lambda: 1.0)
        handles[0].remove()
        handles[1].remove()
        world.train(opt, params, range(2, 3))
    world.train(opt, params, range(3, 4))
    world.say("seen", seen)
    world.show("trained", opt, params)


@scenario(CHAPTER)
def test_step_hooks_that_act(world: World) -> None:
    """Hooks that change gradients, values of groups and arguments, that add a group, and that raise or return nonsense:
    nothing has been updated if one before the step raises, everything if one behind it does."""

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else p.grad * 0.5
            group["lr"] = group["lr"] * 0.5

    def grow(optimizer: Any, args: Any, kwargs: Any) -> None:
        new = world.param((5, 3), 9)
        give([new], 4)
        optimizer.add_param_group({"params": [new]})

    def fail(optimizer: Any, args: Any, kwargs: Any) -> None:
        raise OSError("no")

    acts: dict[str, Any] = {
        "halve": halve, "grow": grow, "fail": fail, "nonsense": lambda *a: 3, "more nonsense": lambda *a: (a, 1, 2),
        "another closure": lambda o, args, kwargs: ((o, lambda: 7.5), {}), "zero": lambda o, *a: o.zero_grad(),
    }  # fmt: skip
    for side in ("pre", "post"):
        for label, act in acts.items():
            params, opt = world.begin([(13, 18), (7,)], 1)
            handle = getattr(opt, f"register_step_{side}_hook")(act)
            give(params, 1)
            with world.tries(f"{side}, {label}"):
                world.say(f"{side}, {label}: returned", opt.step())
            handle.remove()
            world.show(f"{side}, {label}: afterwards", opt, params)
            world.train(opt, params, range(2, 3))
            world.say(f"{side}, {label}: in the end", [params, len(opt.param_groups)])


@scenario(CHAPTER)
def test_state_dict_hooks(world: World) -> None:
    """Hooks around ``state_dict`` and ``load_state_dict``, in their order, that see, change and replace the dict."""
    params, opt = world.begin([(13, 18), (7,)], 2)
    seen: list[str] = []

    def note(label: str, result: Callable[..., Any] = lambda *a: None) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            seen.append(f"{label} {len(args)} {args[0] is opt}")
            return result(*args)

        return hook

    def slower(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "param_groups": [{**group, "lr": group["lr"] * 0.5} for group in saved["param_groups"]]}

    opt.register_state_dict_pre_hook(note("saving"))
    opt.register_state_dict_pre_hook(note("saving, first"), prepend=True)
    opt.register_state_dict_post_hook(note("saved", slower))
    opt.register_state_dict_post_hook(note("saved, first", lambda _, saved: saved.update(note="mine")), prepend=True)
    opt.register_load_state_dict_pre_hook(note("loading", slower))
    opt.register_load_state_dict_pre_hook(note("loading, first"), prepend=True)
    opt.register_load_state_dict_post_hook(note("loaded", lambda o: o.param_groups[0].update(weight_decay=0.5)))
    opt.register_load_state_dict_post_hook(note("loaded, first"), prepend=True)
    saved = opt.state_dict()
    world.say("saved", [sorted(saved), saved["param_groups"][0]["lr"]])
    opt.load_state_dict(saved)
    world.say("seen", seen)
    world.say("loaded", [opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]])
    world.train(opt, params, range(2, 4), show="trained")


@scenario(CHAPTER)
def test_ranges_of_a_profiler(world: World) -> None:
    """A profiler sees exactly one range per step, with the name of the class, and one per ``zero_grad``; those of a
    subclass have its name."""

    class Mine(world.kind):  # type: ignore[misc, name-defined]
        """A subclass that people write."""

    flags = {"foreach": False} if world.options is None else world.options
    for label, kind in (("the class", world.kind), ("a subclass", Mine)):
        params = world.params([(13, 18), (7,)])
        opt = kind(params, lr=0.1, **flags)
        torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for step in range(3):
                give(params, step)
                opt.step()
                opt.zero_grad()
        counts = Counter(name.replace(kind.__name__, "CLASS") for name in ranges(profiler) if "Optimizer." in name)
        world.say(label, dict(sorted(counts.items())))


def ranges(profiler: torch.profiler.profile) -> list[str]:
    """The names of all events as they are in the trace: in tables one within another of its name is left out."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_bytes())["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


def holds(world: World) -> dict[str, int]:
    """What this process has open and mapped, its threads, and what it has of the device's memory."""
    with open("/proc/self/maps") as lines:
        files = sum(len(line.split()) > 5 and ".so" not in line for line in lines)
    return {
        "files": len(os.listdir("/proc/self/fd")), "mapped files": files, "threads": len(os.listdir("/proc/self/task")),
        "device memory": torch.cuda.memory_allocated() if world.device == "cuda" else 0,
    }  # fmt: skip


@scenario(CHAPTER)
def test_a_cell_that_is_run_again(world: World) -> None:
    """A notebook's cell that builds model and optimizer and trains is run ten times: each leaves no file, thread,
    mapping or device memory, and an optimizer is gone as soon as its name is."""
    cell: dict[str, Any] = {}

    def run() -> None:
        cell["params"] = world.params([(200, 101), (13, 18), ()])
        cell["opt"] = world.make(cell["params"])
        world.train(cell["opt"], cell["params"], range(2))
        cell["saved"] = cell["opt"].state_dict()

    gc.disable()
    try:
        run()
        run()
        before = holds(world)
        for _ in range(10):
            run()
        after = holds(world)
        world.say("more, for each time", {name: max(0, after[name] - before[name]) // 10 for name in before})
        gone = [weakref.ref(cell["opt"]), *map(weakref.ref, cell["params"])]
        gone += [weakref.ref(t) for entry in cell["opt"].state.values() for t in entry.values()]
        cell.clear()
        world.say("gone at once", [each() is None for each in gone])
    finally:
        gc.enable()


@scenario(CHAPTER)
def test_devices_that_are_not_meant(world: World) -> None:
    """Parameters on ``meta``, at construction and in a group that is added: where that is refused, the groups that were
    there go on."""
    away = torch.nn.Parameter(torch.ones(3, device="meta"))
    p = world.param()
    world.attempt("meta: at construction", world.make, [away])
    world.attempt("meta: beside others", world.make, [p, away])
    opt = world.trained([p], 1)
    world.attempt("meta: a group", opt.add_param_group, {"params": [away]})
    world.train(opt, [p], range(1, 3), show="the others go on")


@scenario(CHAPTER)
def test_tensors_without_memory(world: World) -> None:
    """An optimizer of ``FakeTensorMode``'s tensors; and a first step inside of that mode, then steps outside."""
    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.ones(3, device=world.device))
        world.attempt("fake: at construction", world.make, [fake])
    p = world.param()
    opt = world.make([p])
    give([p])
    with world.tries("fake: a first step"), FakeTensorMode(allow_non_fake_inputs=True):
        opt.step()
    if not world.ours:  # torch's has fake state now: what ours does is compared with one that never was there
        p = world.param()
        opt = world.make([p])
    world.train(opt, [p], show="it goes on")
