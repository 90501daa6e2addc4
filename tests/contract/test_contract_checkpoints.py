"""The contract: state dicts, from torch and to torch, saved and loaded in mid-training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from optim_support import through_file

from tests.contract.scenarios import World, ordinary, reference, scenario

CHAPTER = "checkpoints"
SHAPES = ((200, 101), (13, 18), ())


def groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.07}]


def other(world: World, params: list[Any], **hyper: Any) -> Any:
    """An optimizer in whose place a checkpoint comes: its own values are others."""
    return world.make(groups(params), lr=1.0, **hyper)


def begun(world: World, dtype: torch.dtype = torch.float32) -> tuple[list[Any], dict[str, Any]]:
    """Parameters that torch's optimizer has trained, on both sides, and a copy of its state dict."""
    params = world.params(SHAPES, dtype)
    opt = reference(world.entry)(groups(params), **{**ordinary(world.entry), "foreach": False})
    world.train(opt, params)
    return params, copy.deepcopy(opt.state_dict())


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


def into_float32(world: World, dtype: torch.dtype) -> None:
    """State of another dtype is loaded for float32, and no step follows."""
    _, saved = begun(world, dtype)
    opt = other(world, world.params(SHAPES))
    world.attempt("loading", opt.load_state_dict, saved)


@scenario(CHAPTER)
def test_float32_state_that_a_state_format_keeps(world: World) -> None:
    """State in float32 is loaded for parameters in bfloat16, where ours has ``state_format="float32"``."""
    params, saved = begun(world)
    cast = [torch.nn.Parameter(p.detach().bfloat16()) for p in params]
    opt = other(world, cast, **({"state_format": "float32"} if world.ours else {}))
    opt.load_state_dict(saved)
    world.show("state is loaded", opt, cast)
    world.train(opt, cast, range(3, 5), show="state goes on")


@scenario(CHAPTER)
def test_float64_state_into_float32_parameters(world: World) -> None:
    """State in float64 is loaded for parameters in float32."""
    into_float32(world, torch.float64)


# --- names, and what does not fit -------------------------------------------------------------------------------------


@scenario(CHAPTER)
def test_named_parameters(world: World) -> None:
    """``named_parameters()`` as parameters: names stand in groups and state dicts, and go from named to unnamed."""
    params = world.params(SHAPES)
    pairs = [(f"layer.{i}", p) for i, p in enumerate(params)]
    opt = world.trained([{"params": pairs[:1]}, {"params": pairs[1:], "lr": 0.07}])
    world.say("names", [group.get("param_names") for group in opt.param_groups])
    saved = through_file(opt.state_dict())
    world.say("saved names", [group.get("param_names") for group in saved["param_groups"]])
    again = other(world, params)
    again.load_state_dict(saved)
    world.train(again, params, range(3, 6), show="into unnamed: went on")
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
def test_forms_of_a_state_dict(world: World) -> None:
    """Groups and their parameters in tuples, state of nobody's, and what is no dict at all."""
    _, saved = begun(world)
    tuples = tuple({**group, "params": tuple(group["params"])} for group in saved["param_groups"])
    nobodys = {99: {"x": torch.ones(2)}, "name": {"y": 1}}
    for label, change in {
        "tuples": {"param_groups": tuples},
        "nobody's": {"state": {**saved["state"], **nobodys}},
    }.items():
        opt = other(world, params := world.params(SHAPES))
        opt.load_state_dict(copy.deepcopy({**saved, **change}))
        world.train(opt, params, range(3, 5), show=label)
        world.say(f"{label}: others", [key for key in opt.state if not isinstance(key, torch.Tensor)])
    for label, given in {"a list": [], "none": None, "a number": 3, "an empty dict": {}}.items():
        world.attempt(label, other(world, world.params(SHAPES)).load_state_dict, given)


@scenario(CHAPTER)
def test_complex_state_into_real_parameters(world: World) -> None:
    """State of complex parameters is loaded for real ones of the same shapes."""
    into_float32(world, torch.complex64)
