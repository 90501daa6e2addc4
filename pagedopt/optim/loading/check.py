"""What a state dict must hold to be loaded, parameter by parameter; nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...tables.columns import dense_like
from ..owner import Owner, places
from ..steps import new_numbers, number_names

StateDict = dict[str, Any]
State = Mapping[Any, Mapping[str, Any]]

#: Dtypes that the kernels read.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def check_form(state_dict: StateDict) -> None:
    """
    Raises:
        ValueError: this is no state dict of an optimizer at all.
    """
    groups = state_dict.get("param_groups")
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(groups, list):
        raise ValueError(
            f"this is no state dict of an optimizer: it should hold 'state' and 'param_groups', and has "
            f"{', '.join(map(repr, state_dict)) or 'nothing'}"
        )
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise ValueError(f"loaded group {number} has no list of parameters")


@dataclass(frozen=True)
class Loaded:
    """A parameter, and what a state dict has for it.

    Attributes:
        param: the parameter.
        key: its name in the state dict.
        numbers: names of its numbers.
        names: of its state tensors, in the order of the rule's inputs.
        entry: the loaded values by name, those that are None left out.
    """

    param: torch.Tensor
    key: Any
    numbers: tuple[str, ...]
    names: tuple[str, ...]
    entry: Mapping[str, Any]


def members(optimizer: Owner, state_dict: StateDict) -> Iterator[Loaded]:
    """Every parameter of ``optimizer``, whose groups are already those that were loaded."""
    state = state_dict["state"]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, (_, group, p) in zip(keys, places(optimizer), strict=True):
        entry = state.get(key, {})
        if not isinstance(entry, Mapping):
            raise ValueError(f"loaded state of parameter {key} is a {type(entry).__name__}, not a dict")
        numbers, names = number_names(optimizer, optimizer.rule_of(group)), optimizer.state_names(group)
        yield Loaded(p, key, numbers, names, {name: value for name, value in entry.items() if value is not None})


def check_groups(optimizer: Owner, before: Sequence[Mapping[str, Any]], state_dict: StateDict) -> None:
    """See that the loaded groups have this optimizer's hyperparameters, and that the state is that of their parameters.

    Args:
        optimizer: with the groups that were loaded.
        before: its groups so far.

    Raises:
        ValueError: they have not.
    """
    for number, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        if absent := [name for name in optimizer.defaults if name in old and name not in group]:
            raise ValueError(f"loaded group {number} has no {', '.join(absent)}: it is of another optimizer")
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    known = set(keys)
    if len(known) < len(keys):
        raise ValueError("the loaded groups name a parameter twice")
    if strays := [key for key in state_dict["state"] if isinstance(key, int) and key not in known]:
        raise ValueError(f"there is loaded state of parameter {strays[0]}, which is in no loaded group")


def check_state(optimizer: Owner, state_dict: StateDict, before: State) -> None:
    """See that ``state_dict`` has all that the rules need, whole and of the right shape, or nothing, of each parameter.

    Args:
        optimizer: with the groups that were loaded.
        before: its state so far.

    Raises:
        ValueError: it does not; the text names the parameter.
    """
    for member in members(optimizer, state_dict):
        if member.entry:
            _check_entry(optimizer, member, before)


def _check_entry(optimizer: Owner, member: Loaded, before: State) -> None:
    if absent := [name for name in (*member.numbers, *member.names) if name not in member.entry]:
        raise ValueError(
            f"loaded state of parameter {member.key} has no {', '.join(absent)}; it has {', '.join(member.entry)}"
        )
    for name, value in member.entry.items():
        if isinstance(value, torch.Tensor) and not _is_whole(value):
            raise ValueError(
                f"loaded {name} of parameter {member.key} does not hold its values: it is a meta tensor, or its file "
                "was cut off"
            )
    for name in member.numbers:
        number_of(member, name)
    p = member.param
    for name in member.names:
        what = f"loaded {name} of parameter {member.key}"
        _check_tensor(what, member.entry[name], p)
        _check_precision(optimizer, what, name, member.entry[name].dtype, stored_as(optimizer, before, p, name))


def _check_tensor(what: str, value: Any, p: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} is a {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided or value.dtype not in DTYPES:
        raise ValueError(f"{what} is {value.dtype}, {value.layout}; state is a dense tensor of a floating-point type")
    if value.shape != p.shape:
        raise ValueError(f"{what} is {tuple(value.shape)}, the parameter is {tuple(p.shape)}")
    if value.is_complex() and not p.is_complex():
        raise ValueError(f"{what} is {value.dtype}, the parameter is real ({p.dtype})")


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether every element lies inside of the tensor's memory."""
    if tensor.layout is not torch.strided:
        return True
    storage = tensor.untyped_storage()
    if not tensor.numel() or storage.device.type == "meta":
        return not tensor.numel()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.itemsize <= storage.nbytes()


def _check_precision(optimizer: Owner, what: str, name: str, loaded: torch.dtype, kept: torch.dtype) -> None:
    chosen = optimizer.state_format
    if isinstance(chosen, Mapping):
        chosen = chosen.get(name)
    if chosen is None and torch.promote_types(loaded, kept) != kept:
        raise ValueError(
            f"{what} is {loaded} and would be rounded to {kept}, as no state_format says how to keep state; "
            "state_format='float32' keeps its precision, and naming a narrower format asks for the rounding"
        )


def number_of(member: Loaded, name: str) -> torch.Tensor:
    """A number of a loaded entry, as such or as a tensor on any device, as a new tensor; torch takes any number.

    Raises:
        ValueError: it is no number.
    """
    value = member.entry[name]
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().to("cpu", copy=True).reshape(())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        what = f"a tensor of {value.dtype}, {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"loaded {name} of parameter {member.key} is {what}, not a number")
    (number,) = new_numbers(1)
    return number.copy_(torch.tensor(value, dtype=torch.float64, device="cpu"))


def home(optimizer: Owner, before: State, p: torch.Tensor, name: str) -> torch.Tensor | None:
    """The state tensor that there is, if it is still laid out as its parameter and where its placement has it."""
    old = before[p].get(name) if p in before else None
    if not isinstance(old, torch.Tensor) or old.device != p.device or old.shape != p.shape:
        return None
    if old.dtype not in DTYPES or not optimizer.store.is_home(old):
        return None
    return old if old.stride() == dense_like(p).stride() or not p.numel() else None


def stored_as(optimizer: Owner, before: State, p: torch.Tensor, name: str) -> torch.dtype:
    """What state ``name`` is stored as: what there is keeps its format."""
    old = home(optimizer, before, p, name)
    return optimizer.dtype_of(name, p) if old is None else old.dtype
