"""What users do to an optimizer between two steps: to state, groups, parameters and gradients.

Each is a row of a table: a name, and a function of a :class:`tests.world.World`.  :func:`acts_of` has all of them that
a case knows; ``BEFORE`` has what changes in front of every step.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.utils import swap_tensors

from tests.loads import HOME, LOADED, MOVES, entries, load, switch
from tests.specs import BY_STATE
from tests.world import Act, World, give, numbers

TensorAct = Callable[[dict[str, Any], str], Any]


def nothing(w: World) -> None:
    pass


# --- the whole state, and entries -------------------------------------------------------------------------------------


def _new_state(make: Callable[[Any], Any]) -> Act:
    return lambda w: setattr(w.optimizer, "state", make(w.state))


def each_entry(change: Callable[[Any], Any], only: int | None = None) -> Act:
    """Every entry, or one, replaced by a dict of changed tensors."""

    def act(w: World) -> None:
        for p in w.params if only is None else [w.params[only]]:
            w.state[p] = {name: change(value) for name, value in w.state[p].items()}

    return act


def entry_in_place(w: World) -> None:
    """The dict stays, all that it holds is replaced."""
    for p in w.params[:2]:
        w.state[p].update({name: value.clone() for name, value in w.state[p].items()})


def swap_entries(w: World) -> None:
    """Two parameters of one shape take each other's entries."""
    w.state[w.params[1]], w.state[w.params[2]] = w.state[w.params[2]], w.state[w.params[1]]


def swap_moments(w: World) -> None:
    a, b, name = w.state[w.params[1]], w.state[w.params[2]], w.moments(w.params[1])[0]
    a[name], b[name] = b[name], a[name]


def reorder_names(w: World) -> None:
    for p in w.params:
        w.state[p] = dict(reversed(w.state[p].items()))


def offload(w: World) -> None:
    """To the CPU and back as RLHF libraries do: entries keep their dicts, tensors are new."""
    homes = [(entry, name, value.device) for entry in w.state.values() for name, value in entry.items()]
    for entry, name, _ in homes:
        entry[name] = entry[name].to("cpu", copy=True)
    for entry, name, home in homes:
        entry[name] = entry[name].to(home, copy=True)


def offload_data(w: World) -> None:
    """The same by ``.data``: the tensors stay, their memory is new."""
    for entry in w.state.values():
        for value in entry.values():
            home = value.device
            value.data = value.data.to("cpu", copy=True)
            value.data = value.data.to(home, copy=True)


def in_place(w: World) -> None:
    """What writes through the tensors that are there."""
    for i, p in enumerate(w.params):
        for name in w.moments(p):
            (lambda t: t.zero_(), lambda t: t.fill_(0.25), lambda t: t.mul_(3))[i % 3](w.state[p][name])


def share_all(w: World) -> None:
    for entry in w.state.values():
        for value in entry.values():
            if not value.is_cuda:
                value.share_memory_()


STATE: dict[str, Act] = {
    "clear": lambda w: w.state.clear(),
    "delete": lambda w: w.state.pop(w.params[1]),
    "delete the large": lambda w: w.state.pop(w.params[0]),
    "empty the entry": lambda w: w.state[w.params[0]].clear(),
    "state = {}": _new_state(lambda _: {}),
    "state = dict": _new_state(dict),
    "state = dict of dicts": _new_state(lambda s: {p: dict(e) for p, e in s.items()}),
    "clones": each_entry(torch.clone),
    "one entry of clones": each_entry(torch.clone, only=1),
    "the large entry of clones": each_entry(torch.clone, only=0),
    "update": entry_in_place,
    "swap entries": swap_entries,
    "swap tensors": swap_moments,
    "names in another order": reorder_names,
    "foreign name": lambda w: w.state[w.params[1]].update(ema=numbers((3,), 5)),  # stays as it is
    "offload": offload,
    "offload .data": offload_data,
    "in place": in_place,
    "share_memory_": share_all,
}
#: Acts that put all or some state where no budget covers it.
OUTSIDE = ("clones", "the large entry of clones", "offload", "update", "offload .data", "prune the large")


# --- one tensor of state ----------------------------------------------------------------------------------------------


def one(change: TensorAct, which: int, index: int = 1) -> Act:
    """Change state number ``which`` of a parameter (-1: the last, which is a second moment where there is one)."""
    return lambda w: change(w.state[w.params[index]], w.case.names[which])


def replace(change: Callable[[torch.Tensor], Any]) -> TensorAct:
    return lambda entry, name: entry.update({name: change(entry[name])})


def through(change: Callable[[torch.Tensor], Any]) -> TensorAct:
    """A change of the tensor itself, by one of its methods."""
    return lambda entry, name: change(entry[name])


def within(t: torch.Tensor, gap: int = 3) -> torch.Tensor:
    """A slice of something larger, aligned to an element only."""
    room = torch.full((t.numel() + 2 * gap,), 7.0, dtype=t.dtype, device=t.device)
    return room[gap : gap + t.numel()].view(t.shape).copy_(t)


def with_gaps(t: torch.Tensor) -> torch.Tensor:
    return torch.full((*t.shape, 2), 7.0, dtype=t.dtype, device=t.device)[..., 0].copy_(t)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


TENSORS: dict[str, TensorAct] = {
    "clone": replace(torch.clone),
    "slice of larger": replace(within),
    "gaps": replace(with_gaps),
    "other strides": replace(transposed),
    "expanded": replace(lambda t: t.flatten()[:1].reshape((1,) * t.dim()).expand(t.shape)),
    "other shape": replace(lambda t: t.flatten()[:-1].clone()),
    "same size, other shape": replace(lambda t: t.flatten().clone()),
    "other device": replace(lambda t: t.to("cpu" if t.is_cuda else "meta")),
    "float64": replace(torch.Tensor.double),
    "float16": replace(torch.Tensor.half),
    "bfloat16": replace(torch.Tensor.bfloat16),
    "int64": replace(torch.Tensor.long),
    "Parameter": replace(lambda t: Parameter(t.clone())),
    "number": replace(lambda t: 0.5),
    "None": replace(lambda t: None),
    "missing": lambda entry, name: entry.pop(name),
    "data": through(lambda t: setattr(t, "data", t.clone() * 2)),
    "set_": through(lambda t: t.set_((t.detach() * 3).clone())),
    "set_ slice": through(lambda t: t.set_(within(t))),
    "resize_(0)": through(lambda t: t.resize_(0)),
    "mul_": through(lambda t: t.mul_(2)),
    "share_memory_": through(lambda t: None if t.is_cuda else t.share_memory_()),
    "swap_tensors": through(lambda t: swap_tensors(t, t * 2)),
    "swap_tensors, other strides": through(lambda t: swap_tensors(t, transposed(t))),
    "swap_tensors, float64": through(lambda t: swap_tensors(t, t.double())),
    "its own view": replace(lambda t: t.view(t.shape)),
}


# --- step counts ------------------------------------------------------------------------------------------------------


def counts(change: Callable[[torch.Tensor], Any], every: bool = False) -> Act:
    """Replace the step count of one parameter or of all."""

    def act(w: World) -> None:
        for p in w.params if every else w.params[1:2]:
            w.state[p]["step"] = change(w.state[p]["step"])

    return act


def count_itself(change: Callable[[torch.Tensor], Any]) -> Act:
    return lambda w: change(w.state[w.params[1]]["step"])


def shared_count(w: World) -> None:
    """One tensor counts for three parameters of two groups: torch adds 1 for each of them, one after the other."""
    step = torch.tensor(3.0)
    for index in (0, 2, 4):
        w.state[w.params[index]]["step"] = step


COUNTS: dict[str, Act] = {
    "replaced": counts(lambda t: torch.tensor(9.0)),
    "clones": counts(torch.clone, True),
    "float64": counts(torch.Tensor.double),
    "all float64": counts(torch.Tensor.double, True),
    "int64": counts(torch.Tensor.long),
    "one element": counts(lambda t: t.reshape(1).clone()),
    "two elements": counts(lambda t: torch.ones(2)),
    "slice of larger": counts(lambda t: torch.full((5,), 4.0)[3]),
    "number": counts(float),
    "integer": counts(int),
    "numpy": counts(lambda t: t.numpy().copy()),
    "None": counts(lambda t: None),
    "missing": lambda w: w.state[w.params[1]].pop("step"),
    "meta": counts(lambda t: t.to("meta")),
    "fill_": count_itself(lambda t: t.fill_(17)),
    "data": count_itself(lambda t: setattr(t, "data", torch.tensor(21.0))),
    "set_": count_itself(lambda t: t.set_(torch.tensor(6.0))),
    "resize_(0)": count_itself(lambda t: t.resize_(0)),
    "share_memory_": count_itself(torch.Tensor.share_memory_),
    "swap_tensors": count_itself(lambda t: swap_tensors(t, t + 3)),
    "shared": shared_count,
}


# --- groups and their lists -------------------------------------------------------------------------------------------


def lists(change: Callable[[Any], Any], groups: int | None = None) -> Act:
    """The lists of the first ``groups``, or of all, are replaced."""

    def act(w: World) -> None:
        for group in w.groups[:groups]:
            group["params"] = change(group["params"])

    return act


def new_groups(make: Callable[[list[Any]], list[Any]]) -> Act:
    return lambda w: setattr(w.optimizer, "param_groups", make(w.groups))


def one_each(groups: list[Any]) -> list[Any]:
    return [{**g, "params": [p], "lr": 0.01 * (i + 1)} for g in groups for i, p in enumerate(g["params"])]


def then_clear(act: Act) -> Act:
    """State begins anew where a parameter stands in more than one place."""
    return lambda w: (act(w), w.state.clear())


def append_group(w: World) -> None:
    """Without ``add_param_group``."""
    w.groups.append({**w.groups[0], "params": [w.newcomer()]})


def add_group(w: World) -> None:
    w.optimizer.add_param_group({"params": [w.newcomer()], "lr": 0.02})


def twice(w: World) -> None:
    w.groups[0]["params"].append(w.params[1])


def in_two_groups(w: World) -> None:
    w.groups[1]["params"].append(w.params[0])


def group_twice(w: World) -> None:
    """The very group stands in the list twice: torch updates its parameters twice in a step."""
    w.groups.append(w.groups[1])


def set_groups(group: int | None = 0, **values: Any) -> Act:
    """Values of one group, or of all."""
    return lambda w: [each.update(values) for each in (w.groups if group is None else [w.groups[group]])]


def betas(kind: Callable[[list[float]], Any]) -> Act:
    """As many as the first group has."""
    return lambda w: w.groups[0].update(betas=kind([0.5 + 0.2 * i for i, _ in enumerate(w.groups[0]["betas"])]))


def without(name: str) -> Act:
    return lambda w: w.groups[0].pop(name)


def begin_anew(w: World) -> None:
    """Groups are emptied and filled again."""
    params = w.listed()
    w.optimizer.state = defaultdict(dict)
    del w.groups[:]
    w.optimizer.add_param_group({"params": params})


def zeros(w: World) -> Any:
    return defaultdict(dict, {p: {n: torch.zeros_like(t) for n, t in e.items()} for p, e in w.state.items()})


def content(make: Callable[[World], dict[str, Any]]) -> Act:
    """Some of an optimizer's content is set, as a pickle does."""
    return lambda w: w.optimizer.__setstate__(make(w))


#: Ways in which people reset an optimizer between tasks, and parts of its content that they set.
RESETS: dict[str, Act] = {
    "entries emptied": lambda w: w.state.update({p: {} for p in w.listed()}),
    "state = zeros": lambda w: setattr(w.optimizer, "state", zeros(w)),
    "groups anew": begin_anew,
    "an empty state dict": lambda w: w.optimizer.load_state_dict({**w.optimizer.state_dict(), "state": {}}),
    "content: state": content(lambda w: {"state": defaultdict(dict)}),
    "content: groups": content(lambda w: {"param_groups": one_each(w.groups)}),
    "content: groups without flags": content(
        lambda w: {"param_groups": [{k: g[k] for k in g if k not in ("maximize", "foreach")} for g in w.groups]}
    ),
    "content: defaults": lambda w: (
        w.optimizer.__setstate__({"defaults": {**w.optimizer.defaults, "lr": 0.5}}), begin_anew(w)
    ),
    "content: another name": content(lambda w: {"mine": 3}),
    "content: its own": content(lambda w: w.optimizer.__getstate__()),
}  # fmt: skip


# --- parameters, and Gaussian splatting: the parameter itself is replaced, and its state cut or grown -----------------


def parameter_data(w: World) -> None:
    for p in w.params:
        p.data = p.data.clone()


def share_parameters(w: World) -> None:
    for p in w.params:
        if not p.is_cuda:
            p.data.share_memory_()


def swap_parameters(w: World, dtype: torch.dtype | None = None) -> None:
    """As ``module.to()`` does under ``torch.__future__.set_swap_module_params_on_conversion(True)``."""
    for p in w.params:
        p.grad = None
        swap_tensors(p, Parameter((p.detach() * 0.5).to(dtype or p.dtype)))


def convert(w: World) -> None:
    """The same by ``module.to()``, there and back: gradients are swapped, too."""
    before = [(id(p), id(p.grad)) for p in w.params]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        torch.nn.ParameterList(w.params).to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert [(id(p), id(p.grad)) for p in w.params] == before


def _put(w: World, index: int, value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As gaussian_model.py of the reference implementation: entry popped, changed, put under a new Parameter."""
    old = w.params[index]
    group, place = next((g, i) for g in w.groups for i, p in enumerate(g["params"]) if p is old)
    stored = w.state.get(old)
    for name in w.moments(old):
        stored[name] = change(stored[name])
    del w.state[old]
    w.params[index] = group["params"][place] = Parameter(value.detach().requires_grad_(True))
    w.state[w.params[index]] = stored


def prune(w: World, index: int = 1) -> None:
    mask = torch.arange(w.params[index].shape[0], device=w.params[index].device) % 3 != 1
    _put(w, index, w.params[index][mask], lambda t: t[mask])


def slice_off(w: World, index: int = 1) -> None:
    """Views of the old memory instead of copies."""
    half = w.params[index].shape[0] // 2
    _put(w, index, w.params[index][:half], lambda t: t[half : 2 * half])


def densify(w: World, index: int = 1) -> None:
    more = numbers((5, *w.params[index].shape[1:]), 77, str(w.params[index].device))
    _put(w, index, torch.cat((w.params[index], more)), lambda t: torch.cat((t, torch.zeros_like(more))))


GROUPS: dict[str, Act] = {
    "append": lambda w: w.groups[0]["params"].append(w.newcomer()),
    "remove": lambda w: w.groups[0]["params"].pop(1),
    "move": lambda w: w.groups[1]["params"].append(w.groups[0]["params"].pop(0)),
    "exchange": lambda w: w.groups[0]["params"].__setitem__(1, w.newcomer((13, 18))),  # same shape, without state
    "twice in one list": twice,
    "in two groups": in_two_groups,
    "list replaced": lists(list),
    "list replaced by another": lambda w: w.groups[0].update(params=[w.newcomer(), w.newcomer((4000,))]),
    "list replaced by a tuple": lists(tuple, 1),
    "list reversed": lambda w: w.groups[0]["params"].reverse(),
    "all lists emptied": lists(lambda _: []),
    "groups reordered": lambda w: w.groups.reverse(),
    "group dropped": lambda w: w.groups.pop(0),
    "groups = edited copies": new_groups(lambda groups: [{**g, "lr": g["lr"] / 3} for g in reversed(groups)]),
    "groups = one each": new_groups(one_each),
    "add_param_group": add_group,
    "groups.append": append_group,
    "a group twice": group_twice,
    "twice in one list, cleared": then_clear(twice),
    "in two groups, cleared": then_clear(in_two_groups),
    "a group twice, cleared": then_clear(group_twice),
    "parameters .data": parameter_data,
    "parameters share_memory_": share_parameters,
    "parameters swap_tensors": swap_parameters,
    "parameters swap_tensors, float64": functools.partial(swap_parameters, dtype=torch.float64),
    "parameters converted": convert,
    "prune": prune,
    "prune the large": functools.partial(prune, index=0),
    "slice": slice_off,
    "densify": densify,
    "load behind a group that is added": lambda w: (HOME["load"](w), add_group(w), HOME["load"](w)),
    "reset": lambda w: _put(w, 1, w.params[1] * 0.5, torch.zeros_like),  # as its reset of opacities
}
#: What changes numbers of a group alone, and no tensor of state; by the hyperparameter, which not every class has.
FLAGS: dict[str, dict[str, Act]] = {
    "lr": {"lr": set_groups(lr=0.004), "lr tensor": set_groups(lr=torch.tensor(0.004)), "no lr": without("lr")},
    "weight_decay": {"weight_decay": set_groups(1, weight_decay=0.0)},
    "maximize": {"maximize": set_groups(maximize=True), "no maximize": without("maximize")},
    "foreach": {"foreach": set_groups(foreach=True)},
    "betas": {"betas": betas(tuple), "betas list": betas(list), "no betas": without("betas")},
    "eps": {"eps": set_groups(eps=0.1)},
    "decoupled_weight_decay": {"coupled weight_decay": set_groups(decoupled_weight_decay=False)},
    "momentum": {"momentum": set_groups(momentum=0.3)},
    "dampening": {"dampening": set_groups(dampening=0.1)},
    "nesterov": {"nesterov": set_groups(nesterov=True, dampening=0)},
}  # fmt: skip
#: What changes which state there is.
SWITCHES: dict[str, dict[str, Act]] = {
    "amsgrad": {
        "amsgrad on": set_groups(amsgrad=True),
        "amsgrad off": set_groups(amsgrad=False),
        "load amsgrad": load(switch(True)),
        "load no amsgrad": load(switch(False)),
    },
    "momentum": {
        "momentum off": set_groups(momentum=0),
        "load no momentum": entries(lambda state: {i: {"momentum_buffer": None} for i in state}),
    },
    "capturable": {"capturable": set_groups(capturable=True)},
}


def norm(change: Callable[[float | None], float | None]) -> Act:
    """Another norm to clip to, or none."""

    def act(w: World) -> None:
        w.clip = change(w.clip)
        if w.ours:
            w.optimizer.max_grad_norm = w.clip

    return act


NORMS: dict[str, Act] = {
    "clipping on and off": norm(lambda clip: None if clip else 0.5),
    "norm doubled": norm(lambda clip: (clip or 1.0) * 2),
}


@functools.cache
def acts_of(name: str) -> dict[str, Act]:
    """All that is done to an optimizer of this kind."""
    case = BY_STATE[name]
    found = {**STATE, **GROUPS, **RESETS, **MOVES, **LOADED}
    for which in sorted({0, len(case.names) - 1}):
        found |= {f"{case.names[which]}: {label}": one(change, which) for label, change in TENSORS.items()}
    for label in ("clone", "slice of larger", "data", "share_memory_"):
        found[f"large {case.names[0]}: {label}"] = one(TENSORS[label], 0, index=0)
    if case.has_step:
        found |= {f"step: {label}": act for label, act in COUNTS.items()}
    for hyper in sorted(case.known & (FLAGS.keys() | SWITCHES.keys())):
        found |= {**FLAGS.get(hyper, {}), **SWITCHES.get(hyper, {})}
    if case.ours.initial:  # torch's load rounds numbers beside state to the parameter's dtype; ours keeps them
        found = {label: act for label, act in found.items() if "behind a cast" not in label}
    return found


# --- what changes in front of each step -------------------------------------------------------------------------------


def groups(**values: Callable[[int], Any]) -> Act:
    """Values of each group, of a number that differs from step to step and from group to group."""

    def act(w: World) -> None:
        for i, group in enumerate(w.groups):
            group.update({name: value(w.count + 100 * i) for name, value in values.items()})

    return act


def now_and_then(w: World) -> None:
    """Some values of groups are new, and others in the next step."""
    chance = random.Random(w.count)
    for group in w.groups:
        group["lr"] = chance.random() if chance.random() < 0.5 else group["lr"]
        if chance.random() < 0.2:
            group["weight_decay"] = chance.choice([0.25, 1, True, np.float32(0.1)])
        if chance.random() < 0.1:
            group["maximize"] = not group["maximize"]


def absent(which: Callable[[int], Any]) -> Act:
    """Parameters that have no gradient in a step."""

    def act(w: World) -> None:
        for i in which(w.count):
            w.params[i].grad = None

    return act


def infinite(*steps: int, value: float = math.inf) -> Act:
    """A gradient that is not finite in some steps."""

    def act(w: World) -> None:
        if w.count in steps:
            w.params[1].grad.view(-1)[3] = value  # type: ignore[union-attr]

    return act


def grads(change: Callable[[torch.Tensor], torch.Tensor]) -> Act:
    def act(w: World) -> None:
        for p in w.params:
            p.grad = None if p.grad is None else change(p.grad)

    return act


def elsewhere(w: World) -> None:
    """Gradients, and once in a while parameters, in other memory, while that of before is there."""
    w.alive += [p.grad for p in w.params]
    for p in w.params if w.count % 6 == 5 else ():
        w.alive.append(p.data)
        p.data = p.data.clone()


def where_they_were(w: World) -> None:
    """Gradients are written into the memory of the last ones."""
    w.alive = w.alive or [p.grad for p in w.params]
    for p, memory in zip(w.params, w.alive, strict=True):
        p.grad = memory.copy_(p.grad)


def in_a_thread(w: World) -> None:
    """A step before the step."""
    thread = threading.Thread(target=w.take)
    thread.start()
    thread.join()
    give(w.params, 100 + w.count)


#: And how many of 12 steps are one compiled call at least; 0: none is; None: whatever.
BEFORE: dict[str, tuple[Act, int | None]] = {
    "nothing": (nothing, 8),
    "lr": (groups(lr=lambda k: 0.01 / (k + 1)), 8),
    "a NumPy number": (groups(lr=lambda k: np.float64(0.01 / (k + 1))), 8),
    "a narrow NumPy number": (groups(weight_decay=lambda k: np.float32(0.01 * k)), 8),
    "a tuple": (groups(betas=lambda k: (0.5 + 0.001 * k, 0.75)), 8),
    "a tuple of NumPy numbers": (groups(betas=lambda k: (np.float64(0.5 + 0.001 * k), 0.75)), 8),
    "an int": (groups(weight_decay=lambda k: k % 3), 8),
    "a switch": (groups(maximize=lambda k: k % 2 == 0), 8),
    "a tensor": (groups(lr=lambda k: torch.tensor(0.01 / (k + 1))), 0),
    "a list": (groups(betas=lambda k: [0.5, 0.75]), 0),
    "a rule": (groups(decoupled_weight_decay=lambda k: k < 5), 3),
    "now and then": (now_and_then, 6),
    "one stays away": (absent(lambda step: (1,) if step > 3 else ()), 4),
    "two stay away": (absent(lambda step: (0, 4) if step > 3 else ()), 4),
    "the last stays away": (absent(lambda step: (5,) if step > 3 else ()), 4),
    "two are never there": (absent(lambda step: (0, 4)), 8),
    "one comes late": (absent(lambda step: (5,) if step < 4 else ()), 4),
    "one comes and goes": (absent(lambda step: (1,) if step // 3 % 2 else ()), None),
    "two come and go": (absent(lambda step: (0, 4) if step // 5 % 2 else ()), 3),
    "another each time": (absent(lambda step: () if step % 4 < 2 else (step % 3,)), None),
    "none is there at first": (absent(lambda step: range(6) if step < 2 else ()), 4),
    "elsewhere": (elsewhere, 4),
    "where they were": (where_they_were, 8),
    "parts of larger ones": (grads(within), None),
    "laid out otherwise": (grads(lambda g: transposed(g) if g.dim() == 2 else g), None),
    "a step in a thread": (in_a_thread, None),
}
