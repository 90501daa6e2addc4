"""What users do to ``optimizer.param_groups``, and Gaussian splatting's way with parameters and state together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from edits import Edit, Params, moments, numbers, parameter
from torch.optim import Optimizer


def _newcomer(opt: Optimizer, params: Params, shape: tuple[int, ...] = (11, 3)) -> torch.nn.Parameter:
    params.append(parameter(shape, len(params), str(params[0].device)))
    return params[-1]


def exchange(opt: Optimizer, params: Params) -> None:
    """Another parameter of the same shape in the place of one, without state."""
    opt.param_groups[0]["params"][1] = _newcomer(opt, params, (13, 18))


def twice(opt: Optimizer, params: Params) -> None:
    opt.param_groups[0]["params"].append(params[1])


def in_two_groups(opt: Optimizer, params: Params) -> None:
    opt.param_groups[1]["params"].append(params[0])


def other_list(opt: Optimizer, params: Params) -> None:
    opt.param_groups[0]["params"] = [_newcomer(opt, params), _newcomer(opt, params, (4000,))]


def _lists(change: Callable[[Any], Any], groups: int | None = None) -> Edit:
    """The lists of the first ``groups``, or of all, are replaced."""

    def apply(opt: Optimizer, params: Params) -> None:
        for group in opt.param_groups[:groups]:
            group["params"] = change(group["params"])

    return apply


def copy_groups(opt: Optimizer, params: Params) -> None:
    opt.param_groups = [{**group, "params": list(group["params"])} for group in opt.param_groups]


def edited_groups(opt: Optimizer, params: Params) -> None:
    opt.param_groups = [{**group, "lr": group["lr"] / 3} for group in reversed(opt.param_groups)]


def one_group_each(opt: Optimizer, params: Params) -> None:
    opt.param_groups = [
        {**group, "params": [p], "lr": 0.01 * (i + 1)}
        for group in opt.param_groups
        for i, p in enumerate(group["params"])
    ]


def add_group(opt: Optimizer, params: Params) -> None:
    opt.add_param_group({"params": [_newcomer(opt, params)], "lr": 0.02})


def append_to_groups(opt: Optimizer, params: Params) -> None:
    """Without ``add_param_group``."""
    opt.param_groups.append({**opt.param_groups[0], "params": [_newcomer(opt, params)]})


def one_dict_twice(opt: Optimizer, params: Params) -> None:
    """The very group stands in the list twice: torch updates its parameters twice in a step."""
    opt.param_groups.append(opt.param_groups[1])


def parameter_data(opt: Optimizer, params: Params) -> None:
    for p in params:
        p.data = p.data.clone()


def swap_parameters(opt: Optimizer, params: Params, dtype: torch.dtype | None = None) -> None:
    """As ``module.to()`` does under ``torch.__future__.set_swap_module_params_on_conversion(True)``."""
    for p in params:
        p.grad = None
        torch.utils.swap_tensors(p, torch.nn.Parameter((p.detach() * 0.5).to(dtype or p.dtype)))


def share_parameters(opt: Optimizer, params: Params) -> None:
    for p in params:
        if not p.is_cuda:
            p.data.share_memory_()


# --- Gaussian splatting: the parameter itself is replaced, and its state cut or grown -------------------------------


def _put(opt: Optimizer, params: Params, index: int, value: torch.Tensor, change: Any) -> None:
    """As gaussian_model.py of the reference implementation: entry popped, changed, put under a new Parameter."""
    old = params[index]
    group, place = next((g, i) for g in opt.param_groups for i, p in enumerate(g["params"]) if p is old)
    stored = opt.state.get(old)
    for name in moments(opt, old):
        stored[name] = change(stored[name])
    del opt.state[old]
    params[index] = group["params"][place] = torch.nn.Parameter(value.detach().requires_grad_(True))
    opt.state[params[index]] = stored


def prune(opt: Optimizer, params: Params, index: int = 1) -> None:
    mask = torch.arange(params[index].shape[0], device=params[index].device) % 3 != 1
    _put(opt, params, index, params[index][mask], lambda t: t[mask])


def slice_off(opt: Optimizer, params: Params, index: int = 1) -> None:
    """Views of the old memory instead of copies."""
    half = params[index].shape[0] // 2
    _put(opt, params, index, params[index][:half], lambda t: t[half : 2 * half])


def densify(opt: Optimizer, params: Params, index: int = 1) -> None:
    more = numbers((5, *params[index].shape[1:]), 77, str(params[index].device))
    _put(opt, params, index, torch.cat((params[index], more)), lambda t: torch.cat((t, torch.zeros_like(more))))


def reset(opt: Optimizer, params: Params, index: int = 1) -> None:
    """As its reset of opacities: same shape, moments of zeros, the count stays."""
    _put(opt, params, index, params[index] * 0.5, torch.zeros_like)


def prune_and_densify(opt: Optimizer, params: Params) -> None:
    for index in (0, 2):
        densify(opt, params, index)
        prune(opt, params, index)


def _then_clear(edit: Edit) -> Edit:
    """State begins anew where a parameter stands in more than one place."""

    def apply(opt: Optimizer, params: Params) -> None:
        edit(opt, params)
        opt.state.clear()

    return apply


def _flag(group: int = 0, **values: Any) -> Edit:
    return lambda opt, params: opt.param_groups[group].update(values)


def _without(name: str) -> Edit:
    return lambda opt, params: opt.param_groups[0].pop(name)


GROUP_EDITS: dict[str, Edit] = {
    "append": lambda opt, params: opt.param_groups[0]["params"].append(_newcomer(opt, params)),
    "insert": lambda opt, params: opt.param_groups[1]["params"].insert(0, _newcomer(opt, params)),
    "remove": lambda opt, params: opt.param_groups[0]["params"].pop(1),
    "remove with state": lambda opt, params: opt.state.pop(opt.param_groups[0]["params"].pop(0), None),
    "move": lambda opt, params: opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop(0)),
    "exchange": exchange,
    "twice in one list": twice,
    "in two groups": in_two_groups,
    "list replaced": _lists(list),
    "list replaced by a shorter one": _lists(lambda params: params[:2], 1),
    "list replaced by another": other_list,
    "list replaced by a tuple": _lists(tuple, 1),
    "list reversed": lambda opt, params: opt.param_groups[0]["params"].reverse(),
    "list emptied": lambda opt, params: opt.param_groups[0]["params"].clear(),
    "all lists emptied": _lists(lambda _: []),
    "groups reordered": lambda opt, params: opt.param_groups.reverse(),
    "group dropped": lambda opt, params: opt.param_groups.pop(0),
    "groups = copies": copy_groups,
    "groups = edited copies": edited_groups,
    "groups = one each": one_group_each,
    "add_param_group": add_group,
    "groups.append": append_to_groups,
    "a group twice": one_dict_twice,
    "twice in one list, cleared": _then_clear(twice),
    "in two groups, cleared": _then_clear(in_two_groups),
    "a group twice, cleared": _then_clear(one_dict_twice),
    "parameters .data": parameter_data,
    "parameters share_memory_": share_parameters,
    "parameters swap_tensors": swap_parameters,
    "parameters swap_tensors, float64": functools.partial(swap_parameters, dtype=torch.float64),
    "prune": prune,
    "prune the large": functools.partial(prune, index=0),
    "slice": slice_off,
    "densify": densify,
    "reset": reset,
    "prune and densify": prune_and_densify,
    "lr": _flag(lr=0.004),
    "lr tensor": _flag(lr=torch.tensor(0.004)),
    "weight_decay": _flag(1, weight_decay=0.0),
    "maximize": _flag(maximize=True),
    "foreach": _flag(foreach=True),
    "no lr": _without("lr"),
    "no maximize": _without("maximize"),
}

#: By the hyperparameter they are about, which not every class has.
EDITS_OF: dict[str, dict[str, Edit]] = {
    "betas": {"betas": _flag(betas=(0.5, 0.7)), "betas list": _flag(betas=[0.5, 0.7]), "no betas": _without("betas")},
    "eps": {"eps": _flag(eps=0.1)},
    "amsgrad": {"amsgrad on": _flag(amsgrad=True), "amsgrad off": _flag(amsgrad=False)},
    "capturable": {"capturable": _flag(capturable=True)},
    "decoupled_weight_decay": {"coupled weight_decay": _flag(decoupled_weight_decay=False)},
    "momentum": {"momentum": _flag(momentum=0.3), "momentum off": _flag(momentum=0)},
    "dampening": {"dampening": _flag(dampening=0.1)},
    "nesterov": {"nesterov": _flag(nesterov=True, dampening=0)},
}

#: What changes numbers of a group alone, and no tensor of state.
FLAGS = (
    "lr", "lr tensor", "weight_decay", "maximize", "foreach", "no lr", "no maximize", "betas", "betas list", "no betas",
    "eps", "coupled weight_decay", "momentum", "dampening", "nesterov",
)  # fmt: skip
