"""Check that a state dict fits an optimizer, parameter by parameter.  Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from ...formats.floating import chosen_format, known, real_dtype
from ...rules import UPDATES
from ...tables.columns import has_memory
from ...tables.shards import is_sharded, local, placed_alike, placement_of
from ..state.rule_optimizer import Group, RuleOptimizer, occurrences
from ..state.scalar_state import ScalarKind, beside_param, new_numbers, number_names
from ..state.state_columns import StateColumn, state_columns

StateDict = dict[str, Any]
State = Mapping[Any, Mapping[str, Any]]


class NoStateDict(ValueError, KeyError):
    """This is no state dict of an optimizer.  Also a KeyError, as torch raises for the missing key."""

    __str__ = ValueError.__str__


class IsPath(TypeError, AttributeError):
    """A path was given in place of a dict.  Also an AttributeError, which torch raises."""


def check_no_path(state_dict: Any) -> None:
    """Raise IsPath for the path of a checkpoint."""
    if isinstance(state_dict, str | os.PathLike):
        raise IsPath(
            "a state dict of an optimizer is a dict, and this is a path; write "
            f"load_state_dict(torch.load({str(state_dict)!r}))"
        )


def check_form(state_dict: StateDict) -> None:
    """Raise TypeError or NoStateDict if this is no state dict of any optimizer."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict of an optimizer is a dict, and this is a {type(state_dict).__name__}")
    groups = state_dict.get("param_groups")
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(groups, list | tuple):
        raise NoStateDict(
            f"this is no state dict of an optimizer: it should hold 'state' and 'param_groups', and has "
            f"{', '.join(map(repr, state_dict)) or 'nothing'}"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise NoStateDict(f"loaded group {index} has no list of parameters")


@dataclass(frozen=True)
class Loaded:
    """A parameter, and what a state dict has for it: ``entry``, without values that are None.

    Attributes:
        group: its group, as loaded.
        key: its key in the state dict.
        numbers: names of its numbers.
        columns: columns of its state by key, in the order of the rule's inputs.
    """

    param: torch.Tensor
    group: Group
    key: Any
    numbers: tuple[str, ...]
    columns: Mapping[str, StateColumn]
    entry: Mapping[str, Any]

    @property
    def plain(self) -> dict[str, list[str]]:
        """State loaded as plain numbers that its format has to encode: its name, and the keys of its columns."""
        found: dict[str, list[str]] = {}
        for key, of in self.columns.items():
            if not of.free and of.name in self.entry:
                found.setdefault(of.name, []).append(key)
        return {name: keys for name, keys in found.items() if not all(key in self.entry for key in keys)}


def members(optimizer: RuleOptimizer, state_dict: StateDict) -> Iterator[Loaded]:
    """Yield each parameter of ``optimizer``, whose groups are already the loaded ones, with its loaded entry."""
    state = state_dict["state"]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, (_, group, p) in zip(keys, occurrences(optimizer), strict=True):
        entry = state.get(key, {})
        if not isinstance(entry, Mapping):
            raise ValueError(f"loaded state of parameter {key} is a {type(entry).__name__}, not a dict")
        numbers = number_names(optimizer, optimizer.rule_of(group))
        columns = state_columns(optimizer, optimizer.state_names(group), p, group) if entry else {}
        present = {name: value for name, value in entry.items() if value is not None}
        yield Loaded(p, group, key, numbers, columns, present)


def check_groups(optimizer: RuleOptimizer, before: Sequence[Mapping[str, Any]], state_dict: StateDict) -> None:
    """Raise ValueError if a loaded group lacks a hyperparameter it had ``before``, or a parameter appears twice."""
    for index, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        if absent := [name for name in optimizer.defaults if name in old and name not in group]:
            raise ValueError(f"loaded group {index} has no {', '.join(absent)}: it is of another optimizer")
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(set(keys)) < len(keys):
        raise ValueError("the loaded groups name a parameter twice")


def check_state(optimizer: RuleOptimizer, state_dict: StateDict) -> None:
    """Raise ValueError unless each parameter has no loaded state, or all that its rule needs, in the right shapes.

    State of another optimizer is refused, too.  Keys that no rule of this package names may be there.
    """
    foreign = foreign_states(optimizer)
    for member in members(optimizer, state_dict):
        if member.entry:
            _check_entry(optimizer, member)
        if others := [name for name in member.entry if name in foreign]:
            raise ValueError(
                f"loaded state of parameter {member.key} has {', '.join(others)}, which no rule of "
                f"{type(optimizer).__name__} has: it is of another optimizer"
            )


def foreign_states(optimizer: RuleOptimizer) -> set[str]:
    """Return names of state that rules of this package have, and no rule of this optimizer."""
    own = optimizer.rules or tuple(optimizer.rule_of(group) for group in optimizer.param_groups)
    known, mine = ({name for rule in rules for name in rule.inputs[2:]} for rules in (UPDATES.values(), own))
    return known - mine


def _check_entry(optimizer: RuleOptimizer, member: Loaded) -> None:
    encoded = {key for keys in member.plain.values() for key in keys}
    if absent := [n for n in (*member.numbers, *member.columns) if n not in member.entry and n not in encoded]:
        states = tuple({f"{member.columns[name].name}." for name in absent if name in member.columns})
        other = any(str(name).startswith(states) for name in member.entry if name not in member.columns)
        raise ValueError(
            f"loaded state of parameter {member.key} has no {', '.join(absent)}; it has {', '.join(member.entry)}"
            + ("; it was saved in another state_format, whose decoded_state_dict() any format loads" if other else "")
        )
    for name, value in member.entry.items():
        if isinstance(value, torch.Tensor) and not is_whole(value):
            raise ValueError(
                f"loaded {name} of parameter {member.key} does not hold its values: it is a meta tensor, or its file "
                "was cut off"
            )
    for name in member.numbers:
        _check_number(member, name)
    p = member.param
    for name in member.plain:
        _check_tensor(f"loaded {name} of parameter {member.key}", member.entry[name], p)
    for key, of in member.columns.items():
        what = f"loaded {key} of parameter {member.key}"
        if of.free:
            _check_tensor(what, member.entry[key], p)
            said = chosen_format(optimizer.state_format_of(member.group), key)
            _check_precision(said is not None, what, member.entry[key].dtype, of.column.dtype)
        elif key not in encoded:
            _check_column(what, member.entry[key], of, p)


def _check_tensor(what: str, value: Any, p: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} is a {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided or not known(real_dtype(value.dtype)):
        raise ValueError(f"{what} is {value.dtype}, {value.layout}; state is a dense tensor of a floating-point type")
    if value.shape != p.shape:
        raise ValueError(f"{what} is {tuple(value.shape)}, the parameter is {tuple(p.shape)}")
    if value.is_complex() and not p.is_complex():
        raise ValueError(f"{what} is {value.dtype}, the parameter is real ({p.dtype})")
    if not placed_alike(value, p):
        raise ValueError(
            f"{what} is {placement_of(value)}, the parameter is {placement_of(p)}; "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict() loads what was saved otherwise"
        )


def _check_column(what: str, value: Any, of: StateColumn, p: torch.Tensor) -> None:
    wanted = (of.column.dtype, of.column.shape(p))
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != wanted or value.layout is not torch.strided:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        per = of.column.per
        other = "" if per == 1 else f", an entry for {per} elements; it was saved with blocks of another size"
        raise ValueError(f"{what} is {found}; format {of.form.name!r} has {wanted[0]} {tuple(wanted[1])}{other}")


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether all elements lie inside of the tensor's memory: False for a meta tensor or a file cut off."""
    if tensor.layout is not torch.strided or not local(tensor).numel():
        return True
    return has_memory(local(tensor)) and local(tensor).untyped_storage().device.type != "meta"


def _check_precision(asked: bool, what: str, loaded: torch.dtype, stored: torch.dtype) -> None:
    """Refuse to round float64 unless ``asked`` to.  Rounding to 16-bit parameters' dtype is allowed, as in torch."""
    lost = torch.promote_types(loaded, stored) != stored and real_dtype(stored).itemsize >= 4
    if lost and not asked:
        raise ValueError(
            f"{what} is {loaded} and would be rounded to {stored}, as no state_format says how to keep state; "
            "state_format='float64' keeps its precision, and state_format='float32' asks for the rounding"
        )


def _check_number(member: Loaded, name: str) -> None:
    """Accept what torch accepts: any real number, or a tensor of one element on any device."""
    value = member.entry[name]
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and (value.numel() != 1 or value.is_complex() or is_sharded(value)):
        what = f"a tensor of {value.dtype}, {tuple(value.shape)}" + (f", {placement_of(value)}" * is_sharded(value))
    elif not is_tensor and (isinstance(value, bool) or not isinstance(value, Real)):
        what = repr(value)
    else:
        return
    raise ValueError(f"loaded {name} of parameter {member.key} is {what}, not a number")


def number_of(member: Loaded, name: str) -> torch.Tensor:
    """Return a number of a loaded entry as a new tensor, on the device and in the dtype that torch chooses.

    A tensor goes to the CPU in its dtype; if the group is fused or capturable, to the parameter's device as float32.
    """
    value, place = member.entry[name], ScalarKind.of(member.group, member.param)
    if isinstance(value, torch.Tensor):
        dtype = torch.float32 if beside_param(member.group) else value.dtype
        return value.detach().to(place.device, dtype, copy=True).reshape(())
    (number,) = new_numbers([place])
    return number.copy_(torch.tensor(float(value), dtype=torch.float64, device="cpu"))


def reusable(optimizer: RuleOptimizer, before: State, member: Loaded, key: str) -> torch.Tensor | None:
    """Return the existing state tensor if a load can copy into it: it fits parameter, format and placement."""
    p, of = member.param, member.columns[key]
    old = before[p].get(key) if p in before else None
    if not of.fits(old, p) or old.dtype is not of.column.dtype or not optimizer.store.is_home(old):
        return None
    same_strides = local(old).stride() == of.column.like(local(p)).stride()
    return old if same_strides or not local(p).numel() else None
