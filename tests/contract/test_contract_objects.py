"""The contract: optimizers as objects, copied, pickled, printed, and their state dicts."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from optim_support import through_file

from tests.contract.scenarios import World, ordinary, scenario
from tests.world import give

CHAPTER = "objects"
SHAPES = ((200, 101), (13, 18), ())


def unflagged(world: World, params: Any, **hyper: Any) -> Any:
    """An optimizer for which nobody chooses one of torch's implementations."""
    return world.make(params, **({"foreach": None} if world.entry.torch and not world.ours else {}), **hyper)


#: Ways of model and optimizer to a twin of both: ``pickle`` by every protocol, from the oldest to the newest.
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "file": lambda both: through_file(both, weights_only=False),
    **{
        f"protocol {n}": lambda both, n=n: pickle.loads(pickle.dumps(both, n))
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@scenario(CHAPTER)
def test_copies(world: World) -> None:
    """``copy.deepcopy``, a file and ``pickle`` of model and optimizer together, before the first step and later; both
    go on, each for itself."""
    for (label, how), before in itertools.product(COPIES.items(), (0, 2)):
        params = world.params(SHAPES)
        opt = world.trained([{"params": params[:1]}, {"params": params[1:], "lr": 0.07}], before)
        twins, twin = how((params, opt))
        world.say(f"{before} steps, class: {label}", type(twin) is type(opt))
        world.say(f"{before} steps, parameters: {label}", twin.param_groups[0]["params"][0] is twins[0])
        world.train(twin, twins, range(before, before + 2), show=f"{before} steps, the copy went on: {label}")
        world.show(f"{before} steps, the original waited: {label}", opt, params)
        world.train(opt, params, range(before, before + 2), show=f"{before} steps, the original went on: {label}")


@scenario(CHAPTER)
def test_a_deep_copy_of_the_optimizer_alone(world: World) -> None:
    """``copy.deepcopy`` of an optimizer copies its parameters, too; gradients go with them as torch has it."""
    params, opt = world.begin(SHAPES, 3)
    twin = copy.deepcopy(opt)
    twins = twin.param_groups[0]["params"]
    world.say("no gradients, other tensors", [(p.grad is None, p is q) for p, q in zip(twins, params, strict=True)])
    world.train(twin, twins, range(3, 5), show="the copy")
    world.show("the original", opt, params)


@scenario(CHAPTER)
def test_what_a_copy_leaves_behind(world: World) -> None:
    """Attributes that users set, and hooks, do not go with a copy, nor a pickle, where torch leaves them behind."""
    opt = world.make(world.params(SHAPES))
    opt.mine = 3
    opt.register_step_post_hook(lambda *_: None)
    for name, twin in (("deepcopy", copy.deepcopy(opt)), ("pickle", pickle.loads(pickle.dumps(copy.deepcopy(opt))))):
        world.say(f"{name}: attribute and hooks", [hasattr(twin, "mine"), len(twin._optimizer_step_post_hooks)])


@scenario(CHAPTER)
def test_a_shallow_copy(world: World) -> None:
    """``copy.copy``: two optimizers over the same groups and state; each goes on from where the other stopped."""
    params, opt = world.begin(SHAPES, 3)
    twin = copy.copy(opt)
    world.say("they share", (twin.param_groups is opt.param_groups, twin.state is opt.state))
    world.train(twin, params, range(3, 5), show="the copy went on")
    world.train(opt, params, range(5, 7), show="the original went on")


# --- what it says of itself -------------------------------------------------------------------------------------------


@scenario(CHAPTER)
def test_its_text(world: World) -> None:
    """``repr`` before and after a step, with several groups, and with a value changed: as torch's but for the name."""
    params = world.params(SHAPES)
    opt = unflagged(world, [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])
    world.say("new", repr(opt).replace(world.kind.__name__, "Optimizer"))
    world.train(opt, params)
    opt.param_groups[1]["lr"] = 0.25
    world.say("changed", repr(opt).replace(world.kind.__name__, "Optimizer"))


@scenario(CHAPTER)
def test_its_defaults(world: World) -> None:
    """``defaults``, the values and order of names in a group, and a default that is changed before a group is added."""
    params = world.params(SHAPES)
    opt = unflagged(world, params[:1])
    world.say("defaults, names of a group", [dict(opt.defaults), list(opt.param_groups[0])])
    world.say("values of a group", {k: v for k, v in opt.param_groups[0].items() if k != "params"})
    opt.defaults["lr"] = 0.25
    opt.add_param_group({"params": iter(params[1:])})
    world.say("of a group that is added", opt.param_groups[1]["lr"])
    world.train(opt, params, show="trained")


@scenario(CHAPTER)
def test_its_class(world: World) -> None:
    """``isinstance`` of torch's class, and a class of one's own derived from it: values, steps and copies."""
    kind: Any = world.kind

    class Mine(kind):
        """Halves gradients, and has a name for its groups."""

        def __init__(self, params: Any, name: str, **hyper: Any) -> None:
            self.called = 0
            super().__init__(params, **hyper)
            self.param_groups[0]["name"] = name

        def step(self, closure: Any = None) -> Any:
            self.called += 1
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return super().step(closure)

    params = world.params(SHAPES)
    hyper = {"foreach": False} if not world.ours else world.options or {}
    opt = Mine(params, "mine", **ordinary(world.entry), **hyper)
    world.say("its classes", [isinstance(opt, torch.optim.Optimizer), isinstance(opt, world.entry.torch or Mine)])
    world.train(opt, params)
    world.say("calls and text", [opt.called, repr(opt).splitlines()[0]])
    world.show("trained", opt, params)
    twin = copy.deepcopy(opt)
    world.say("the copy's attribute and group", [hasattr(twin, "called"), twin.param_groups[0]["name"]])
    again = Mine(params, "again", **ordinary(world.entry), **hyper)
    again.load_state_dict(opt.state_dict())
    world.say("the loaded name", again.param_groups[0]["name"])
    world.train(again, params, range(3, 5), show="went on")


@scenario(CHAPTER)
def test_state_as_a_mapping(world: World) -> None:
    """``state`` is empty before the first step, has one entry per parameter then, in torch's order of names; keys of
    one's own stay beside them, whatever they are of."""
    params, opt = world.begin(SHAPES)
    world.say("before", [len(opt.state), type(opt.state).__name__, dict(opt.state[params[0]])])
    world.train(opt, params)
    world.say("names", [list(opt.state[p]) for p in params])
    opt.state[params[1]]["mine"] = torch.arange(3, device=world.device)
    opt.state["everybody's"] = {"count": 3}
    opt.state["a number"], opt.state["a tensor"], opt.state["a text"] = 3, torch.ones(2), "mine"
    world.train(opt, params, range(3, 5))
    opt.state["a number"] = 4
    world.train(opt, params, range(5, 7), show="trained")
    world.say("keys", [key if isinstance(key, str) else "a parameter" for key in opt.state_dict()["state"]])


# --- gradients --------------------------------------------------------------------------------------------------------


@scenario(CHAPTER)
def test_zero_grad(world: World) -> None:
    """``zero_grad`` both ways: gradients become None, or zeros in the tensors they are, cut off from their graph."""
    for label, how in (("by default", {}), ("to None", {"set_to_none": True}), ("to zeros", {"set_to_none": False})):
        params = [*world.params(SHAPES), world.param((7,), 9)]
        opt = world.make(params)
        give(params, skip=(3,))
        params[1].grad = (params[1] * 2).sum().mul(params[1])  # with a graph behind it
        grads = [p.grad for p in params]
        world.attempt(f"{label}: zeroed", opt.zero_grad, **how)
        world.say(f"{label}: gradients", [p.grad for p in params])
        world.say(f"{label}: the same tensors", [p.grad is g for p, g in zip(params, grads, strict=True)])
        world.say(f"{label}: no graph", [p.grad is None or p.grad.grad_fn is None for p in params])
        world.attempt(f"{label}: a step behind it", opt.step)
        world.show(f"{label}: after it", opt, params)
        world.train(opt, params, range(1, 3), show=f"{label}: two steps later")


@scenario(CHAPTER)
def test_state_that_autograd_has_saved(world: World) -> None:
    """State is a factor of a loss; before its backward, that of another parameter is written, or takes a step."""

    def written(opt: Any, q: Any) -> None:
        for value in opt.state[q].values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)

    def stepped(opt: Any, q: Any) -> None:
        give([q], 9)
        opt.step()

    for label, change in {"nothing": lambda *_: None, "written": written, "stepped": stepped}.items():
        p, q = world.params(((13, 18), (13, 18)))
        opt = world.trained([p, q])
        p.grad = None
        factor = next(v for v in opt.state[p].values() if isinstance(v, torch.Tensor) and v.dim())
        x = world.param((13, 18), 5)
        loss = (x * factor).sum()
        change(opt, q)
        world.attempt(label, loss.backward)
