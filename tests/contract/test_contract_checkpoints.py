"""The contract: state dicts, from torch and to torch, saved and loaded in mid-training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from contract_world import World, ordinary, reference, scenario, through_a_file

from tests.world import give

CHAPTER = "checkpoints"
SHAPES = ((200, 101), (13, 18), ())

Change = Callable[[dict[str, Any]], None]


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.07}]


def other(world: World, params: list[Any], **hyper: Any) -> Any:
    """An optimizer in whose place a checkpoint comes: its own values are others."""
    return world.make(groups(params), lr=1.0, **hyper)


def torchs(world: World, params: list[Any], **flags: Any) -> Any:
    """torch's optimizer, on both sides; its loop, unless flags say otherwise."""
    return reference(world.entry)(groups(params), **{**ordinary(world.entry), "foreach": False, **flags})


def begun(world: World, dtype: torch.dtype = torch.float32, **flags: Any) -> tuple[list[Any], dict[str, Any]]:
    """Parameters that torch's optimizer has trained, and a copy of its state dict."""
    params = world.params(SHAPES, dtype)
    opt = torchs(world, params, **flags)
    world.train(opt, params)
    return params, copy.deepcopy(opt.state_dict())


def continued(world: World, label: str, params: list[Any], saved: dict[str, Any]) -> Any:
    """Load into a new optimizer over ``params``, and train on."""
    opt = other(world, params)
    opt.load_state_dict(saved)
    world.show(f"{label}: loaded", opt, params)
    world.train(opt, params, range(3, 6), show=f"{label}: went on")
    return opt


# --- there and back -------------------------------------------------------------------------------------------------


@scenario(CHAPTER)
def test_weights_only(world: World) -> None:
    """``torch.save`` of a state dict, and ``torch.load(weights_only=True)`` into a new optimizer, which goes on."""
    params = world.params(SHAPES)
    opt = world.trained(groups(params))
    saved = through_a_file({"model": [p.detach() for p in params], "optimizer": opt.state_dict(), "epoch": 3})
    world.say("names", [list(entry) for entry in saved["optimizer"]["state"].values()])
    world.say("indices", [group["params"] for group in saved["optimizer"]["param_groups"]])
    continued(world, "new", [torch.nn.Parameter(p) for p in saved["model"]], saved["optimizer"])
    world.train(opt, params, range(3, 6), show="what was saved goes on")


def from_torch(world: World, needed: str = "", **flags: Any) -> None:
    """There and back; ``flags`` are torch's, where its class knows the one that is needed."""
    params, saved = begun(world, **(flags if needed in world.known else {}))
    opt = continued(world, "from torch", params, saved)
    world.say("groups", [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups])
    back = torchs(world, params)
    back.load_state_dict(through_a_file(opt.state_dict()))
    world.train(back, params, range(6, 9), show="back in torch")


@scenario(CHAPTER)
def test_from_torch_s_loop_and_back(world: World) -> None:
    """A state dict of torch's ``foreach=False`` is taken in mid-training, gone on with, and given back to torch."""
    from_torch(world)


@scenario(CHAPTER)
def test_from_torch_s_foreach_and_back(world: World) -> None:
    """A state dict of torch's ``foreach=True`` is taken in mid-training, gone on with, and given back to torch."""
    from_torch(world, "fused", foreach=True)


@scenario(CHAPTER)
def test_from_torch_s_fused_and_back(world: World) -> None:
    """A state dict of torch's ``fused=True``, whose step counts lie on the parameter's device, is taken in mid-training
    and given back to torch."""
    from_torch(world, "fused", foreach=None, fused=True)


@scenario(CHAPTER, "cuda")
def test_from_torch_s_capturable_and_back(world: World) -> None:
    """A state dict of torch's ``capturable=True`` is taken in mid-training and given back to torch."""
    from_torch(world, "capturable", capturable=True)


def counts(saved: dict[str, Any], kind: Callable[[float], Any]) -> None:
    for entry in saved["state"].values():
        if "step" in entry:
            entry["step"] = kind(float(entry["step"]))


@scenario(CHAPTER)
def test_counts_that_are_numbers(world: World) -> None:
    """Step counts as plain numbers (torch before 1.12) or as tensors of other dtypes are taken as torch takes them."""
    kinds: dict[str, Callable[[float], Any]] = {
        "int": int, "float": float, "float64": lambda n: torch.tensor(n, dtype=torch.float64),
        "one element": lambda n: torch.tensor([n]), "int64": lambda n: torch.tensor(int(n)),
        "on the parameter's device": lambda n: torch.tensor(n, device=world.device),
    }  # fmt: skip
    for name, kind in kinds.items():
        params, saved = begun(world)
        counts(saved, kind)
        opt = other(world, params)
        with world.tries(f"{name}: loading and a step"):
            opt.load_state_dict(saved)
            world.train(opt, params, range(3, 4))
        world.say(f"{name}: parameters", params)
        world.say(f"{name}: counts", [float(e.get("step", 0)) for e in opt.state_dict()["state"].values()])


@scenario(CHAPTER)
def test_into_one_that_has_begun(world: World) -> None:
    """Loading into an optimizer in mid-training replaces all it had, also for parameters of which the dict has none."""
    params, strangers = world.params(SHAPES), world.params(SHAPES)
    first = torchs(world, params)
    for step in range(3):
        give(params, step, skip=(1,))
        first.step()
    opt = other(world, strangers)
    world.train(opt, strangers, range(10, 14))
    opt.load_state_dict(copy.deepcopy(first.state_dict()))
    world.show("loaded", opt, strangers)
    world.train(opt, strangers, range(3, 6), show="went on")


@scenario(CHAPTER)
def test_before_the_first_step(world: World) -> None:
    """A state dict of an optimizer that has taken no step is saved and loaded, into a new and into a used one."""
    params = world.params(SHAPES)
    saved = through_a_file(world.make(groups(params)).state_dict())
    world.say("state", saved["state"])
    continued(world, "new", params, saved)
    used = other(world, params)
    world.train(used, params, range(6, 8))
    used.load_state_dict(saved)
    world.show("used: loaded", used, params)
    world.train(used, params, range(8, 10), show="used: went on")


@scenario(CHAPTER)
def test_its_own_dict(world: World) -> None:
    """An optimizer loads its own state dict, which is no copy: it shows what later steps make of state."""
    params = world.params(SHAPES)
    opt = world.trained(groups(params))
    saved = opt.state_dict()
    world.train(opt, params, range(3, 4))
    name = next((n for n in saved["state"][0] if n != "step"), None)
    world.say("it shows the later step", name is None or saved["state"][0][name] is opt.state[params[0]][name])
    opt.load_state_dict(saved)
    world.train(opt, params, range(4, 6), show="went on")


@scenario(CHAPTER)
def test_what_was_loaded_is_left_alone(world: World) -> None:
    """Steps after loading do not change the tensors of the dict that was loaded."""
    params, saved = begun(world)
    kept = copy.deepcopy(saved)
    opt = other(world, params)
    opt.load_state_dict(saved)
    world.train(opt, params, range(3, 5), show="went on")
    same = [torch.equal(v, kept["state"][i][n]) for i, e in saved["state"].items() for n, v in e.items()]
    world.say("the dict is as it was", all(same))


# --- dtypes ---------------------------------------------------------------------------------------------------------


def cast(world: World, param: torch.dtype, state: torch.dtype, **ours: Any) -> None:
    """State of one dtype into parameters of another."""
    params, saved = begun(world, state)
    cast_to = [torch.nn.Parameter(p.detach().to(param)) for p in params]
    opt = other(world, cast_to, **(ours if world.ours else {}))
    world.attempt("loading", opt.load_state_dict, saved)
    world.show("state is loaded", opt, cast_to)
    world.attempt("a step", world.train, opt, cast_to, range(3, 5))
    world.show("state goes on", opt, cast_to)


def into_float32(world: World, dtype: torch.dtype) -> None:
    """State of another dtype is loaded for float32, and no step follows."""
    _, saved = begun(world, dtype)
    opt = other(world, world.params(SHAPES))
    world.attempt("loading", opt.load_state_dict, saved)


@scenario(CHAPTER)
def test_float32_state_into_bfloat16_parameters(world: World) -> None:
    """State in float32 is loaded for parameters in bfloat16: it is cast to bfloat16, and training goes on."""
    cast(world, torch.bfloat16, torch.float32)


@scenario(CHAPTER)
def test_float32_state_into_float16_parameters(world: World) -> None:
    """State in float32 is loaded for parameters in float16: it is cast to float16, and training goes on."""
    cast(world, torch.float16, torch.float32)


@scenario(CHAPTER)
def test_float32_state_that_a_state_format_keeps(world: World) -> None:
    """State in float32 is loaded for parameters in bfloat16, where ours has ``state_format="float32"``."""
    cast(world, torch.bfloat16, torch.float32, state_format="float32")


@scenario(CHAPTER)
def test_bfloat16_state_into_float32_parameters(world: World) -> None:
    """State in bfloat16 is loaded for parameters in float32: it is widened, and training goes on."""
    cast(world, torch.float32, torch.bfloat16)


@scenario(CHAPTER)
def test_float32_state_into_float64_parameters(world: World) -> None:
    """State in float32 is loaded for parameters in float64: it is widened, and training goes on."""
    cast(world, torch.float64, torch.float32)


@scenario(CHAPTER)
def test_float64_state_into_float32_parameters(world: World) -> None:
    """State in float64 is loaded for parameters in float32."""
    into_float32(world, torch.float64)


@scenario(CHAPTER)
def test_loading_after_a_cast(world: World) -> None:
    """A model is cast to bfloat16 in mid-training and the checkpoint from before loaded: state is cast, too."""
    net = world.filled(torch.nn.Linear(13, 18))
    opt = world.trained(net.parameters())
    saved = copy.deepcopy(opt.state_dict())
    net.bfloat16()
    opt.load_state_dict(saved)
    world.show("loaded", opt, net.parameters())
    world.train(opt, net.parameters(), range(3, 5), show="went on")


@scenario(CHAPTER)
def test_values_of_one_s_own(world: World) -> None:
    """What users keep in ``state`` is saved and loaded with the rest, cast and moved as torch does with it."""
    params, saved = begun(world)
    mine = {"double": torch.ones(3, dtype=torch.float64), "count": torch.arange(3), "text": "mine", "number": 3}
    saved["state"].setdefault(1, {}).update(mine)
    saved["state"]["everybody's"] = {"ema": torch.ones(2, dtype=torch.float64)}
    opt = other(world, params)
    opt.load_state_dict(saved)
    entry = opt.state[params[1]]
    world.say("loaded", {k: v for k, v in entry.items() if k in ("double", "count", "number")})
    world.say("on the parameter's device", [entry[k].device == params[1].device for k in ("double", "count")])
    world.say("of nobody", opt.state["everybody's"])
    world.train(opt, params, range(3, 5))
    world.show("went on", opt, params[:1])


# --- names, and what does not fit -----------------------------------------------------------------------------------


@scenario(CHAPTER)
def test_named_parameters(world: World) -> None:
    """``named_parameters()`` as parameters: names stand in groups and state dicts, and go from named to unnamed."""
    params = world.params(SHAPES)
    pairs = [(f"layer.{i}", p) for i, p in enumerate(params)]
    opt = world.trained([{"params": pairs[:1]}, {"params": pairs[1:], "lr": 0.07}])
    world.say("names", [group.get("param_names") for group in opt.param_groups])
    saved = through_a_file(opt.state_dict())
    world.say("saved names", [group.get("param_names") for group in saved["param_groups"]])
    again = continued(world, "into unnamed", params, saved)
    world.say("unnamed has names now", [group.get("param_names") for group in again.param_groups])
    back = world.make([{"params": pairs[:1]}, {"params": pairs[1:]}], lr=1.0)
    for group in saved["param_groups"]:
        group.pop("param_names", None)
    back.load_state_dict(saved)
    world.say("named keeps its names", [group.get("param_names") for group in back.param_groups])
    world.say("text", [line for line in repr(back).splitlines() if "names" in line])
    world.attempt("names for some only", world.make, [pairs[0], params[1]])
    world.attempt("a group without names beside one with", opt.add_param_group, {"params": [world.param((3,), 8)]})


@scenario(CHAPTER)
def test_what_does_not_fit(world: World) -> None:
    """A state dict of another model, or half of one, is refused when it is loaded, and what was there goes on."""
    params = world.params(SHAPES)
    opt = world.trained(groups(params))
    saved = copy.deepcopy(opt.state_dict())
    harms: dict[str, Change] = {
        "a group more": lambda d: d["param_groups"].append({**d["param_groups"][0], "params": []}),
        "a group less": lambda d: d["param_groups"].pop(),
        "a parameter more": lambda d: d["param_groups"][0]["params"].append(9),
        "a parameter less": lambda d: d["param_groups"][1]["params"].pop(),
        "no groups": lambda d: d.pop("param_groups"),
        "no state": lambda d: d.pop("state"),
        "no parameters": lambda d: d["param_groups"][0].pop("params"),
    }
    for name, harm in harms.items():
        wrong = copy.deepcopy(saved)
        harm(wrong)
        world.attempt(name, opt.load_state_dict, wrong)
    world.train(opt, params, range(3, 5), show="went on")


@scenario(CHAPTER)
def test_forms_of_a_state_dict(world: World) -> None:
    """Groups and their parameters in tuples, a step count of NumPy's, state of nobody's, and what is no dict at all."""
    _, saved = begun(world)

    def in_tuples(saved: dict[str, Any]) -> None:
        saved["param_groups"] = tuple({**group, "params": tuple(group["params"])} for group in saved["param_groups"])

    changes: dict[str, Change] = {
        "tuples": in_tuples,
        "a count of NumPy's": lambda saved: counts(saved, np.float32),
        "state of nobody's": lambda saved: saved["state"].update({99: {"x": torch.ones(2)}, "name": {"y": 1}}),
    }
    for label, change in changes.items():
        changed = copy.deepcopy(saved)
        change(changed)
        opt = other(world, params := world.params(SHAPES))
        with world.tries(label):
            opt.load_state_dict(changed)
            world.train(opt, params, range(3, 5))
        world.show(f"{label}: trained", opt, params)
        world.say(f"{label}: others", [key for key in opt.state if not isinstance(key, torch.Tensor)])
    for label, given in {"a list": [], "none": None, "a number": 3, "an empty dict": {}}.items():
        world.attempt(label, other(world, world.params(SHAPES)).load_state_dict, given)


@scenario(CHAPTER)
def test_complex_state_into_real_parameters(world: World) -> None:
    """State of complex parameters is loaded for real ones of the same shapes."""
    into_float32(world, torch.complex64)
