"""What users do to ``optimizer.state`` between steps, and torch's optimizers beside ours.

An edit is a function of the optimizer and of the list of all parameters, to which it adds those that it makes.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

Params = list[Parameter]
Edit = Callable[[Optimizer, Params], None]
TensorEdit = Callable[[dict[str, Any], str], None]

#: Behind a first one that spans pages, of 64 KiB in a file and of 2 MiB on a device; two are alike.
SHAPES = ((13, 18), (13, 18), (5, 9), (), (70,))
LARGE = {"cpu": (200, 201), "cuda": (1100, 1101)}


def numbers(shape: tuple[int, ...], seed: int, device: str = "cpu") -> torch.Tensor:
    """Values between -1 and 1 by integer arithmetic, none of them 0, the same on every device."""
    return _numbers(tuple(shape), seed).to(device, copy=True)


# All edits are made to the same parameters and gradients.  They are kept on the host: memory of a device is counted.
@functools.lru_cache(maxsize=128)
def _numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    k = torch.arange(torch.Size(shape).numel(), device="cpu")
    return (((k * 7919 + seed * 104729) % 2003 * 2 - 2003).float() / 2003).reshape(shape)


def values(shape: tuple[int, ...], seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same as numbers of a dtype, complex ones among them."""
    if dtype.is_complex:
        return torch.complex(numbers(shape, seed, device), numbers(shape, seed + 1, device)).to(dtype)
    return numbers(shape, seed, device).to(dtype)


def parameter(shape: tuple[int, ...], seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Parameter:
    """A parameter whose values belong to the seed, the same on every device."""
    return Parameter(values(shape, 900 + seed, device, dtype))


def parameters(device: str = "cpu") -> Params:
    return [parameter(shape, i, device) for i, shape in enumerate((LARGE[device], *SHAPES))]


def groups_of(params: Params) -> list[dict[str, Any]]:
    """Two groups, of which the second has values of its own."""
    return [{"params": params[:4]}, {"params": params[4:], "lr": 0.07, "weight_decay": 0.3}]


def give(params: Iterable[torch.Tensor], step: int = 0, skip: Collection[int] = ()) -> None:
    """Fresh gradients that depend on step and index, laid out as their parameters; None for those in ``skip``."""
    for i, p in enumerate(params):
        grad = torch.empty_like(p, requires_grad=False)
        p.grad = None if i in skip else grad.copy_(values(p.shape, 31 * step + 7 * i + 1, str(p.device), p.dtype))


def steps(optimizer: Optimizer, params: Params, count: int, first: int = 0) -> None:
    """Steps ``first`` …; every gradient is new, and differs from step to step."""
    for step in range(first, first + count):
        give(params, step)
        optimizer.step()


def moments(optimizer: Optimizer, p: torch.Tensor) -> list[str]:
    return [name for name in optimizer.state[p] if name != "step"]


def listed(optimizer: Optimizer) -> Params:
    return [p for group in optimizer.param_groups for p in group["params"]]


# --- the whole state, and entries -----------------------------------------------------------------------------------


def pop_all(opt: Optimizer, params: Params) -> None:
    for p in list(opt.state):
        opt.state.pop(p)


def _new_state(make: Callable[[Any], Any]) -> Edit:
    return lambda opt, params: setattr(opt, "state", make(opt.state))


def each_entry(opt: Optimizer, params: Params, change: Callable[[Any], Any], only: int | None = None) -> None:
    """Every entry, or one, replaced by a dict of changed tensors."""
    for p in params if only is None else [params[only]]:
        opt.state[p] = {name: change(value) for name, value in opt.state[p].items()}


def entry_in_place(opt: Optimizer, params: Params) -> None:
    """The dict stays, all that it holds is replaced."""
    for p in params[:2]:
        opt.state[p].update({name: value.clone() for name, value in opt.state[p].items()})


def swap(opt: Optimizer, params: Params) -> None:
    """Two parameters of one shape take each other's entries."""
    opt.state[params[1]], opt.state[params[2]] = opt.state[params[2]], opt.state[params[1]]


def swap_tensors(opt: Optimizer, params: Params) -> None:
    a, b = opt.state[params[1]], opt.state[params[2]]
    name = moments(opt, params[1])[0]
    a[name], b[name] = b[name], a[name]


def reorder_names(opt: Optimizer, params: Params) -> None:
    for p in params:
        opt.state[p] = dict(reversed(opt.state[p].items()))


def offload(opt: Optimizer, params: Params) -> None:
    """To the CPU and back as RLHF libraries do: entries keep their dicts, tensors are new."""
    homes = [(entry, name, value.device) for entry in opt.state.values() for name, value in entry.items()]
    for entry, name, _ in homes:
        entry[name] = entry[name].to("cpu", copy=True)
    for entry, name, home in homes:
        entry[name] = entry[name].to(home, copy=True)


def offload_data(opt: Optimizer, params: Params) -> None:
    """The same by ``.data``: the tensors stay, their memory is new."""
    for entry in opt.state.values():
        for value in entry.values():
            home = value.device
            value.data = value.data.to("cpu", copy=True)
            value.data = value.data.to(home, copy=True)


def in_place(opt: Optimizer, params: Params) -> None:
    """What writes through the tensors that are there."""
    for i, p in enumerate(params):
        for name in moments(opt, p):
            (lambda t: t.zero_(), lambda t: t.fill_(0.25), lambda t: t.mul_(3))[i % 3](opt.state[p][name])


def share_all(opt: Optimizer, params: Params) -> None:
    for entry in opt.state.values():
        for value in entry.values():
            if not value.is_cuda:
                value.share_memory_()


# --- one tensor -----------------------------------------------------------------------------------------------------


def one(opt: Optimizer, params: Params, change: TensorEdit, which: int, index: int = 1) -> None:
    """Change state number ``which`` of a parameter (-1: the last, which is a second moment where there is one)."""
    p = params[index]
    change(opt.state[p], moments(opt, p)[which])


def replace(change: Callable[[torch.Tensor], Any]) -> TensorEdit:
    return lambda entry, name: entry.update({name: change(entry[name])})


def through(change: Callable[[torch.Tensor], Any]) -> TensorEdit:
    """A change of the tensor itself, by one of its methods."""
    return lambda entry, name: change(entry[name])


def set_data(entry: dict[str, Any], name: str) -> None:
    entry[name].data = entry[name].clone() * 2


def within(t: torch.Tensor, gap: int = 3) -> torch.Tensor:
    """A slice of something larger, aligned to an element only."""
    room = torch.full((t.numel() + 2 * gap,), 7.0, dtype=t.dtype, device=t.device)
    return room[gap : gap + t.numel()].view(t.shape).copy_(t)


def with_gaps(t: torch.Tensor) -> torch.Tensor:
    return torch.full((*t.shape, 2), 7.0, dtype=t.dtype, device=t.device)[..., 0].copy_(t)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


def elsewhere(t: torch.Tensor) -> torch.Tensor:
    return t.to("cpu" if t.is_cuda else "meta")


TENSOR_EDITS: dict[str, TensorEdit] = {
    "clone": replace(torch.clone),
    "zeros_like": replace(torch.zeros_like),
    "slice of larger": replace(within),
    "gaps": replace(with_gaps),
    "other strides": replace(transposed),
    "expanded": replace(lambda t: t.flatten()[:1].reshape((1,) * t.dim()).expand(t.shape)),
    "other shape": replace(lambda t: t.flatten()[:-1].clone()),
    "same size, other shape": replace(lambda t: t.flatten().clone()),
    "other device": replace(elsewhere),
    "float64": replace(torch.Tensor.double),
    "float16": replace(torch.Tensor.half),
    "bfloat16": replace(torch.Tensor.bfloat16),
    "int64": replace(torch.Tensor.long),
    "Parameter": replace(lambda t: Parameter(t.clone())),
    "transposed Parameter": replace(lambda t: Parameter(transposed(t))),
    "number": replace(lambda t: 0.5),
    "None": replace(lambda t: None),
    "missing": lambda entry, name: entry.pop(name),
    "data": set_data,
    "set_": through(lambda t: t.set_((t.detach() * 3).clone())),
    "set_ slice": through(lambda t: t.set_(within(t))),
    "resize_(0)": through(lambda t: t.resize_(0)),
    "zero_": through(torch.Tensor.zero_),
    "fill_": through(lambda t: t.fill_(0.5)),
    "mul_": through(lambda t: t.mul_(2)),
    "share_memory_": through(lambda t: None if t.is_cuda else t.share_memory_()),
    "swap_tensors": through(lambda t: torch.utils.swap_tensors(t, t * 2)),
    "swap_tensors, other strides": through(lambda t: torch.utils.swap_tensors(t, transposed(t))),
    "swap_tensors, float64": through(lambda t: torch.utils.swap_tensors(t, t.double())),
    "its own view": replace(lambda t: t.view(t.shape)),
    "detached": replace(torch.Tensor.detach),
}


# --- step -----------------------------------------------------------------------------------------------------------


def counts(opt: Optimizer, params: Params, change: Callable[[torch.Tensor], Any], every: bool) -> None:
    """Replace the step count of one parameter or of all."""
    for p in params if every else params[1:2]:
        opt.state[p]["step"] = change(opt.state[p]["step"])


def _count_itself(change: Callable[[torch.Tensor], Any]) -> Edit:
    return lambda opt, params: change(opt.state[params[1]]["step"])


def count_data(t: torch.Tensor) -> None:
    t.data = torch.tensor(21.0)


def shared_count(opt: Optimizer, params: Params) -> None:
    """One tensor counts for three parameters of two groups: torch adds 1 for each of them, one after the other."""
    step = torch.tensor(3.0)
    for index in (0, 2, 4):
        opt.state[params[index]]["step"] = step


def _counts(change: Callable[[torch.Tensor], Any], every: bool = False) -> Edit:
    return functools.partial(counts, change=change, every=every)


STEP_EDITS: dict[str, Edit] = {
    "replaced": _counts(lambda t: torch.tensor(9.0)),
    "all replaced": _counts(lambda t: torch.tensor(9.0), True),
    "clones": _counts(torch.clone, True),
    "float64": _counts(torch.Tensor.double),
    "all float64": _counts(torch.Tensor.double, True),
    "int64": _counts(torch.Tensor.long),
    "one element": _counts(lambda t: t.reshape(1).clone()),
    "two elements": _counts(lambda t: torch.ones(2)),
    "slice of larger": _counts(lambda t: torch.full((5,), 4.0)[3]),
    "number": _counts(float),
    "integer": _counts(int),
    "numpy": _counts(lambda t: t.numpy().copy()),
    "None": _counts(lambda t: None),
    "missing": lambda opt, params: opt.state[params[1]].pop("step"),
    "meta": _counts(lambda t: t.to("meta")),
    "fill_": _count_itself(lambda t: t.fill_(17)),
    "zero_": _count_itself(torch.Tensor.zero_),
    "add_": _count_itself(lambda t: t.add_(2)),
    "data": _count_itself(count_data),
    "set_": _count_itself(lambda t: t.set_(torch.tensor(6.0))),
    "resize_(0)": _count_itself(lambda t: t.resize_(0)),
    "share_memory_": _count_itself(torch.Tensor.share_memory_),
    "swap_tensors": _count_itself(lambda t: torch.utils.swap_tensors(t, t + 3)),
    "shared": shared_count,
}


STATE_EDITS: dict[str, Edit] = {
    "clear": lambda opt, params: opt.state.clear(),
    "delete": lambda opt, params: opt.state.pop(params[1]),
    "delete the large": lambda opt, params: opt.state.pop(params[0]),
    "pop all": pop_all,
    "empty the entry": lambda opt, params: opt.state[params[0]].clear(),
    "state = defaultdict": _new_state(lambda _: defaultdict(dict)),
    "state = {}": _new_state(lambda _: {}),
    "state = dict": _new_state(dict),
    "state = dict of dicts": _new_state(lambda s: {p: dict(e) for p, e in s.items()}),
    "clones": functools.partial(each_entry, change=torch.clone),
    "one entry of clones": functools.partial(each_entry, change=torch.clone, only=1),
    "the large entry of clones": functools.partial(each_entry, change=torch.clone, only=0),
    "deep copies": functools.partial(each_entry, change=lambda t: torch.clone(t * 2)),
    "update": entry_in_place,
    "swap entries": swap,
    "swap tensors": swap_tensors,
    "names in another order": reorder_names,
    "foreign name": lambda opt, params: opt.state[params[1]].update(ema=numbers((3,), 5)),  # stays as it is
    "offload": offload,
    "offload .data": offload_data,
    "in place": in_place,
    "share_memory_": share_all,
}


def state_edits(names: tuple[str, ...]) -> dict[str, Edit]:
    """All edits of state for an optimizer with state ``names``: of its first and of its last tensor each kind."""
    found = dict(STATE_EDITS)
    for which in sorted({0, len(names) - 1}):
        for label, change in TENSOR_EDITS.items():
            found[f"{names[which]}: {label}"] = functools.partial(one, change=change, which=which)
    for label in ("clone", "slice of larger", "data", "share_memory_"):
        found[f"large {names[0]}: {label}"] = functools.partial(one, change=TENSOR_EDITS[label], which=0, index=0)
    return found
