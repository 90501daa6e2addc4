"""The parameters of an optimizer as a step sees them: each with its group, its state, and what of that is missing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...formats.floating import known, of_dtype, real_dtype
from ...formats.format import Format
from ...rules import Rule
from ...rules.rule import check_rule
from ...tables.checks import DtypeError
from ...tables.columns import has_memory, is_fake
from ...tables.shards import is_partial, is_sharded, local, local_grad, placed_alike, placement_of
from ..state.rule_optimizer import Group, RuleOptimizer, places
from ..state.scalar_state import number_names
from ..state.state_columns import StateColumn, state_columns
from .class_checks import check_update

#: Gradients of DTensors as their shards have them, by parameter.
Grads = Mapping[torch.Tensor, torch.Tensor]


@dataclass
class Member:
    """One parameter in one place of one group.

    Attributes:
        param: the parameter.
        group: the index of its group.
        rule: what happens to it.
        entry: its state, what is made for the coming step included.
        columns: of its state, by their keys in the entry, in the rule's order.
        index: of the parameter, counted through all groups.
        shard: what this process has of the parameter: itself, unless it is a DTensor.
        is_new: whether there is nothing of its state yet.
        missing: names of numbers and state tensors that there are not yet.
        moved: numbers as they are in the state, where the entry here has them on another device.
        again: whether the parameter stands in an earlier group, too, which will have made its state.
        turn: how often the parameter stands before this place: torch updates it each time, one after the other.
    """

    param: torch.Tensor
    group: int
    rule: Rule
    entry: dict[str, Any]
    columns: dict[str, StateColumn]
    index: int
    shard: torch.Tensor
    is_new: bool = False
    missing: list[str] = field(default_factory=list)
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
    again: bool = False
    turn: int = 0

    @property
    def formats(self) -> tuple[Format, ...]:
        """Of parameter, gradient and state, list by list, as a kernel sees them: those of real numbers.

        Raises:
            TypeError: no kernel takes such numbers.
        """
        p = self.param
        forms = {of.name: of_dtype(self.entry[key].dtype) if of.free else of.form for key, of in self.columns.items()}
        return (of_dtype(p.dtype, "param"), of_dtype((p if p.grad is None else p.grad).dtype, "grad"), *forms.values())


class Members(NamedTuple):
    """All parameters of an optimizer.

    Attributes:
        found: those that can be updated.
        waiting: indices, through all groups, of those that wait for their first gradient.
        params: all of them, group by group.
        lengths: how many each group has.
        rules: of each group.
    """

    found: list[Member]
    waiting: list[int]
    params: tuple[torch.Tensor, ...]
    lengths: tuple[int, ...]
    rules: tuple[Rule, ...]

    @property
    def sharded(self) -> tuple[int, ...]:
        """Indices of parameters that are DTensors, each once, in an order that all processes have."""
        first = {id(m.param): m.index for m in reversed(self.found) if m.shard is not m.param}
        return tuple(sorted(first.values()))


def members(optimizer: RuleOptimizer) -> Members:
    """Every parameter that can be updated, and those that wait for their first gradient.

    Raises:
        KeyError: state holds some of a parameter's tensors and lacks another (as torch), or takes no new entries.
        RuntimeError: a tensor of state is of another device, shape or dtype than can be used (as torch), a gradient is
            sparse, or a parameter overlaps itself (as torch); one of them has lost its memory, or is a DTensor where
            another is none (as torch); a parameter is complex and its group ``fused`` (as torch).
        NotImplementedError: a parameter with a gradient is neither of floating-point nor of complex numbers (as torch).
        TypeError, ValueError: see :func:`refuse`.
        TypeError: a rule changes hyperparameters and is not among the class's ``rules``, or is none.
        RuleError: see :func:`check_update`.
    """
    found: list[Member] = []
    waiting: list[int] = []
    turns: dict[int, int] = {}
    first: dict[int, int] = {}
    rules = tuple([optimizer.rule_of(group) for group in optimizer.param_groups])
    everywhere = list(places(optimizer))
    for rule in rules:
        check_rule(rule)
        check_update(rule)
        if unknown := rule.carried.keys() - optimizer.numbers:
            raise TypeError(
                f"rule {rule.name!r} changes {', '.join(sorted(unknown))}: {type(optimizer).__name__}, which chooses "
                "among rules, has to name them all in its attribute 'rules'"
            )
    for index, (number, group, p) in enumerate(everywhere):
        rule, entry = rules[number], dict(optimizer.state.get(p) or {})
        if p.grad is None and not (entry and known(real_dtype(p.dtype))):  # its first gradient asks for its dtype, too
            waiting.append(index)
            continue
        if p.grad is not None and p.is_complex() and group.get("fused"):
            raise RuntimeError(
                f"`fused=True` requires all the params to be floating point Tensors, and parameter {index} is {p.dtype}"
            )
        if not known(real_dtype(p.dtype)):
            raise NotImplementedError(f"{type(optimizer).__name__} cannot update parameter {index}: it is {p.dtype}")
        member = Member(p, number, rule, entry, state_columns(optimizer, rule.inputs[2:], p), index, local(p))
        if p.grad is None:
            if not _is_complete(optimizer, member):
                waiting.append(index)
                continue
        else:
            _find_missing(optimizer, member)
            _check(optimizer, member)
        member.turn = turns.get(id(p), 0)
        turns[id(p)] = member.turn + 1
        member.again = first.setdefault(id(p), number) < number
        found.append(member)
    lengths = Counter(number for number, _, _ in everywhere)
    params = tuple([p for _, _, p in everywhere])
    return Members(found, waiting, params, *_shared(tuple([lengths[i] for i in range(len(rules))]), rules))


@functools.lru_cache(maxsize=64)
def _shared(lengths: tuple[int, ...], rules: tuple[Rule, ...]) -> tuple[tuple[int, ...], tuple[Rule, ...]]:
    """The same objects for all optimizers that have as many parameters and these rules: there may be thousands."""
    return lengths, rules


def refuse(optimizer: RuleOptimizer, group: Group, states: Collection[str]) -> None:
    """What can be said of a group's parameters before there is a gradient.

    Args:
        states: names of all state there may be.

    Raises:
        TypeError: a parameter is a DTensor of sums that have not been made.
        ValueError: state of a complex parameter would be stored in a format that has no complex numbers, or that of a
            DTensor in one whose entries stand for several elements; a parameter is a ``FakeTensor``.
    """
    for p in group["params"]:
        if is_fake(p):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is a FakeTensor, which has no memory to update; make the "
                "optimizer outside of FakeTensorMode (pagedopt.estimate() says what its state will take)"
            )
        if is_sharded(p):
            _check_sharded(optimizer, p, states)
        if p.is_complex():
            for name in states:
                optimizer.format_of(name, p)


def _check_sharded(optimizer: RuleOptimizer, p: torch.Tensor, states: Collection[str]) -> None:
    if is_partial(p):
        raise TypeError(
            f"a parameter of shape {tuple(p.shape)} is {placement_of(p)}: its values are sums that have not been made; "
            "redistribute() it to Replicate() or Shard()"
        )
    for name in states:
        form = optimizer.format_of(name, p)
        if not form.plain:
            raise ValueError(
                f"state_format is {form.name!r} for {name!r} of a parameter of shape {tuple(p.shape)} that is "
                f"{placement_of(p)}: shards have formats of single elements only, as 'float32' or 'bfloat16'"
            )


def reduced(params: Collection[torch.Tensor]) -> Grads:
    """The gradients of DTensors as their shards have them; all their processes call this, once in each step.

    Raises:
        RuntimeError: one is no DTensor (as torch).
    """
    return {p: grad for p in params if (grad := local_grad(p)) is not None}


def sharded(optimizer: RuleOptimizer) -> list[torch.Tensor]:
    """The parameters that are DTensors, each once, in an order that all processes have."""
    return list(dict.fromkeys(p for _, _, p in places(optimizer) if is_sharded(p)))


def _is_complete(optimizer: RuleOptimizer, member: Member) -> bool:
    """Whether a parameter without gradient has state that a step could use, should there be one."""
    needed = (*number_names(optimizer, member.rule), *member.columns)
    if any(member.entry.get(name) is None for name in needed):
        return False
    try:
        _check(optimizer, member)
    except (RuntimeError, TypeError):
        return False
    return True


def _find_missing(optimizer: RuleOptimizer, member: Member) -> None:
    needed = (*number_names(optimizer, member.rule), *member.columns)
    if optimizer.has_step and member.entry:  # torch makes all of a parameter's state at once, or looks up each
        for name in needed:
            member.entry[name]
        return
    member.is_new = bool(needed) and not member.entry
    if member.is_new and getattr(optimizer.state, "default_factory", None) is None:
        optimizer.state[member.param]  # a plain dict in the place of torch's has no entry for a new parameter
    member.missing = [name for name in needed if member.entry.get(name) is None]


def _check(optimizer: RuleOptimizer, member: Member) -> None:
    p = member.param
    if p.grad is not None and p.grad.layout is not torch.strided:
        raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
    if is_sharded(p.grad) and member.shard is p:
        raise RuntimeError(f"the gradient of {_named(member)} is {placement_of(p.grad)}, the parameter is none")
    if member.shard is not p:
        _check_sharded(optimizer, p, {of.name for of in member.columns.values()})
        p = member.shard
    if _is_expanded(p):
        raise RuntimeError(
            f"parameter {member.index} of shape {tuple(p.shape)} is expanded: several of its elements are one in "
            "memory, and cannot be updated; use p.clone()"
        )
    if not has_memory(p):
        raise RuntimeError(f"{_named(member)} has no memory for all of it: its storage was freed or resized")
    for key in member.columns:
        if key not in member.missing:
            _check_tensor(optimizer, member, key)
    for name in number_names(optimizer, member.rule):
        if name not in member.missing:
            _check_number(member, name)
            _move_number(optimizer, member, name)


def _check_number(member: Member, name: str) -> None:
    value = member.entry[name]
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex() or is_sharded(value):
        raise RuntimeError(f"state {name!r} of {_named(member)} is {_words(value)}; it must be a tensor of one number")


def _move_number(optimizer: RuleOptimizer, member: Member, name: str) -> None:
    """Where a group's flags ask for numbers on the device, one that others have put on the CPU comes back, as ZeRO's
    ``load_state_dict`` leaves them there."""
    group, value = optimizer.param_groups[member.group], member.entry[name]
    if (group.get("fused") or group.get("capturable")) and value.device.type == "cpu" != member.param.device.type:
        member.moved[name] = value
        member.entry[name] = value.to(member.param.device)


def _check_tensor(optimizer: RuleOptimizer, member: Member, key: str) -> None:
    p, value, of = member.param, member.entry[key], member.columns[key]
    what = f"state {key!r} of {_named(member)} is {_words(value)}"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise RuntimeError(f"{what}; it must be a dense tensor")
    if value.device != p.device:
        raise RuntimeError(f"{what} on {value.device}, the parameter is on {p.device}: they must be on the same device")
    if value.shape != (shape := of.column.shape(p)):
        there = "the parameter has shape" if of.column.per == 1 else f"format {of.form.name!r} has"
        raise RuntimeError(f"{what}; {there} {tuple(shape)}")
    if not placed_alike(value, p):
        raise RuntimeError(f"{what}, {placement_of(value)}; the parameter is {placement_of(p)}")
    value = local(value)
    if _is_expanded(value):
        raise RuntimeError(f"{what}, expanded: several of its elements are one in memory, and cannot be updated")
    if not has_memory(value):
        raise RuntimeError(f"{what}, without memory for all of it: its storage was freed or resized")
    wanted = of.column.dtype
    kind = value.is_complex() if p.is_complex() else value.is_floating_point()
    fixed = of.name in optimizer.fixed_dtypes and (p.grad is None or value.dtype is not p.grad.dtype)
    if value.dtype is not wanted and (fixed or not kind or not of.free):
        # Of complex and real numbers torch says one or the other, by its version.
        raise DtypeError(f"{what}; it is stored as {wanted} (state_format says how)")


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _named(member: Member) -> str:
    return f"parameter {member.index} of shape {tuple(member.param.shape)}"


def _words(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def state_tensors(optimizer: RuleOptimizer) -> list[torch.Tensor]:
    """Every tensor of state but numbers, each once, whether a rule names it now or not; of DTensors the shards."""
    found = {
        id(value): local(value)
        for entry in optimizer.state.values()
        if isinstance(entry, Mapping)
        for name, value in entry.items()
        if isinstance(value, torch.Tensor) and name not in optimizer.numbers
    }
    return list(found.values())
