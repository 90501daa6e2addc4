"""Checks of a whole checkpoint, before anything is allocated or changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...common.kind_of import kind_of
from ...optim.loading.check import is_whole
from ...optim.state.group_options import OLD_ROUNDING
from ...optim.state.rule_optimizer import RuleOptimizer
from ...optim.state.state_columns import state_columns
from .contender import Curve, build_optimizer
from .gpt import GPT
from .schedule import learning_rate
from .train_options import EVERYTHING, OPTIMIZERS, TrainOptions

MOMENTS = ("exp_avg", "exp_avg_sq")
#: A key of groups that older checkpoints do not have, or under another name; and a column that they have instead.
NEWER, OLD_COLUMN = "rounding", ("root3", "root2")


class WrongContents(ValueError):
    """Contents that a run with the checkpoint's options would not have saved. The message says where and what."""


def check_contents(saved: Mapping[str, Any], options: TrainOptions) -> None:
    """Check that a checkpoint holds what a run with its ``options`` saves, with the right types and shapes.

    Raises:
        WrongContents: something is missing, unexpected or wrong.
    """
    step = saved["step"]
    if type(step) is not int or not 0 <= step <= options.steps:
        raise WrongContents(f"step is {_shown(step)}; it must be a number from 0 to {options.steps}")
    _same_keys("contenders", saved["contenders"], OPTIMIZERS[options.optimizer])
    with torch.device("meta"):
        model = GPT(options.shape, options.block)
    for which, contender in saved["contenders"].items():
        _same_keys(which, contender, ("model", "optimizer", "curve"))
        wanted = model.state_dict()
        _same_keys(f"{which}, model", contender["model"], wanted)
        for name, value in contender["model"].items():
            _check_tensor(f"{which}, model, {name}", value, wanted[name])
        _check_optimizer(f"{which}, optimizer", contender["optimizer"], which, model, options, step)
        _check_curve(f"{which}, curve", contender["curve"], step)


def _check_optimizer(what: str, found: Any, which: str, model: nn.Module, options: TrainOptions, step: int) -> None:
    """Compare with the groups of a new optimizer, except that ``lr`` is that of the last step."""
    _same_keys(what, found, ("state", "param_groups"))
    unpaged = dataclasses.replace(options, placement=None, device_budget=EVERYTHING)
    optimizer = build_optimizer(which, nn.Linear(1, 1, device="cpu"), unpaged)
    fresh = optimizer.param_groups
    parameters = list(model.parameters())
    split = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    if not isinstance(found["param_groups"], list) or len(found["param_groups"]) != len(fresh):
        raise WrongContents(f"{what}: there must be {len(fresh)} parameter groups")
    rate = learning_rate(step - 1, options.steps, options.lr) if step else options.lr
    first = 0
    for number, (group, new, members) in enumerate(zip(found["param_groups"], fresh, split, strict=True)):
        where = f"{what}, group {number}"
        if isinstance(group, dict) and NEWER not in group:
            new = {OLD_ROUNDING if name == NEWER else name: value for name, value in new.items()}
            if OLD_ROUNDING not in group:
                new.pop(OLD_ROUNDING, None)
        _same_keys(where, group, new)
        wanted = {**new, "lr": rate, "params": list(range(first, first + len(members)))}
        for name, value in group.items():
            good = type(value) is float and math.isclose(value, rate) if name == "lr" else _same(value, wanted[name])
            if not good:
                raise WrongContents(f"{where}: {name} is {_shown(value)}, of the run it is {_shown(wanted[name])}")
        first += len(members)
    _same_keys(f"{what}, state", found["state"], range(first) if step else ())
    for key, entry in found["state"].items():
        where = f"{what}, state of parameter {key}"
        group = fresh[0 if key < len(split[0]) else 1]
        moments = _moments(optimizer, group, [*split[0], *split[1]][key])
        if isinstance(entry, dict):
            olds = {name: name.replace(*OLD_COLUMN) for name in moments}
            moments = {olds[name] if olds[name] in entry else name: tensor for name, tensor in moments.items()}
        _same_keys(where, entry, ("step", *moments))
        _check_tensor(f"{where}, step", entry["step"], torch.empty((), device="meta"))
        if entry["step"].item() != step:
            raise WrongContents(f"{where}: step is {entry['step'].item():g}, the run was at {step}")
        for name, tensor in moments.items():
            _check_tensor(f"{where}, {name}", entry[name], tensor)


def _moments(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the columns of a parameter's two moments by their keys, as tensors without memory."""
    if not isinstance(optimizer, RuleOptimizer):
        return dict.fromkeys(MOMENTS, p)
    columns = state_columns(optimizer, MOMENTS, p, group)
    return {key: torch.empty(of.column.shape(p), dtype=of.column.dtype, device="meta") for key, of in columns.items()}


def _check_curve(what: str, found: Any, step: int) -> None:
    _same_keys(what, found, [field.name for field in dataclasses.fields(Curve)])
    for name, values in found.items():
        if not isinstance(values, list) or len(values) != step or not all(type(v) is float for v in values):
            raise WrongContents(f"{what}: {name} must be {step} floats, one for each step")
        if name != "losses" and not all(math.isfinite(v) and v >= 0 for v in values):
            raise WrongContents(f"{what}: {name} holds times below zero, or no numbers")


def _same_keys(what: str, found: Any, wanted: Any) -> None:
    """Refuse what is not a dict with exactly these keys."""
    if not isinstance(found, dict):
        raise WrongContents(f"{what} is {kind_of(found)}, not a dict")
    for key in wanted:
        if key not in found:
            raise WrongContents(f"{what} has no {key}")
    for key in found:
        if key not in wanted or type(key) is not type(next(iter(wanted))):
            raise WrongContents(f"{what} has {_shown(key)}, which no run of these options saves")


def _check_tensor(what: str, value: Any, wanted: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise WrongContents(f"{what} is {kind_of(value)}, not a tensor")
    if value.is_nested:
        raise WrongContents(f"{what} is a nested tensor, the model's is {wanted.dtype} {tuple(wanted.shape)}")
    if (value.dtype, value.shape, value.layout) != (wanted.dtype, wanted.shape, wanted.layout):
        shape, right = tuple(value.shape), tuple(wanted.shape)
        raise WrongContents(f"{what} is {value.dtype} {shape} ({value.layout}), the model's is {wanted.dtype} {right}")
    if not is_whole(value):
        raise WrongContents(f"{what} does not hold its values")
    if not value.is_contiguous():  # torch's fused kernel would access memory beyond it
        raise WrongContents(f"{what} has strides {value.stride()}; a run saves its tensors contiguous")


def _same(value: Any, wanted: Any) -> bool:
    """Return whether two values are equal and of one type, also inside of containers: True is not 1."""
    if isinstance(wanted, (list, tuple)):
        return type(value) is type(wanted) and len(value) == len(wanted) and all(map(_same, value, wanted))
    return type(value) is type(wanted) and bool(value == wanted)


def _shown(value: Any) -> str:
    """Return a value as at most 60 characters on one line."""
    readable = value is None or isinstance(value, (bool, int, float, str, list, tuple))
    text = " ".join((repr(value) if readable else kind_of(value)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
