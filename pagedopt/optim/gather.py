"""The rows of a step: parameters as they are now, checked, each with its state, made where it is missing."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..formats.choice import Choice
from ..formats.floating import chosen_format, known, of_dtype, real_dtype
from ..formats.format import Format
from ..formats.sixteen import PARAM, REMAINDERS, ParameterFormat
from ..rules.rule import Rule, check_rule
from ..system.warn import warn_once
from ..tables.tensors import (
    DtypeError,
    first_element,
    is_fake,
    is_partial,
    is_sharded,
    local,
    misfit,
    placement_of,
    same_layout,
)
from ..transports.choose import DEFAULT
from .class_checks import check_rules
from .columns import Columns, blocks_along, encode
from .options import check_group_options
from .room import tell_made
from .rule_optimizer import Group, RuleOptimizer, number_names, occurrences, state_tensors
from .scalars import NumberSpec, beside_param, new_numbers

#: Local gradients of DTensors, by parameter.
Grads = Mapping[torch.Tensor, torch.Tensor]


#: Shared by the many members that lack nothing.
NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(slots=True)
class Member:
    """One occurrence of a parameter in a group.

    Attributes:
        param: the parameter.
        group: the index of its group.
        rule: the group's rule.
        numbers: the names of its numbers (as the step count).
        entry: its state, including what is made for the coming step.
        columns: those of its state.
        index: of this occurrence, counted through all groups.
        shard: the parameter itself, or the local shard of a DTensor.
        is_new: whether it has no state yet.
        missing: names of numbers and keys of state tensors that the entry lacks.
        moved: numbers as ``optimizer.state`` has them, where ``entry`` has copies on another device.
        form: the format of the parameter; None: it is plain numbers.
        again: whether the parameter is in an earlier group, too, which will have made its state.
        turn: launches run in this order.  A later occurrence of a parameter has a later turn, as in torch's loop.
    """

    param: torch.Tensor
    group: int
    rule: Rule
    numbers: tuple[str, ...]
    entry: dict[str, Any]
    columns: Columns
    index: int
    shard: torch.Tensor
    is_new: bool = False
    missing: Sequence[str] = ()
    moved: Mapping[str, torch.Tensor] = field(default_factory=lambda: NOTHING)
    form: ParameterFormat | None = None
    again: bool = False
    turn: int = 0

    @property
    def like(self) -> torch.Tensor:
        """A tensor (it may be a meta tensor) with the strides along which a kernel walks parameter and state."""
        return self.columns.walked_like(self.entry, self.shard) if self.columns.in_blocks else self.shard

    @property
    def draws(self) -> bool:
        """Whether the parameter is rounded at random."""
        return self.form is not None and self.form.draws

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of parameter, gradient and state as a kernel sees them; of complex numbers that of their parts.

        Raises:
            TypeError: no kernel takes the dtype.
        """
        p, state = self.param, [(key, of) for key, of in self.columns.items() if of.form not in REMAINDERS]
        grad = of_dtype((p if p.grad is None else p.grad).dtype, "grad")
        forms = {of.name: of_dtype(self.entry[key].dtype) if of.free else of.form for key, of in state}
        return (self.form or of_dtype(p.dtype, "param"), grad, *forms.values())


class Members(NamedTuple):
    """All parameters of an optimizer.

    Attributes:
        found: those that can be updated.
        waiting: indices of those that wait for their first gradient, counted through all groups.
        params: all parameters, group by group.
        lengths: the number of parameters in each group.
        rules: the rule of each group.
    """

    found: list[Member]
    waiting: list[int]
    params: tuple[torch.Tensor, ...]
    lengths: tuple[int, ...]
    rules: tuple[Rule, ...]

    @property
    def sharded(self) -> tuple[int, ...]:
        """Indices of parameters that are DTensors, each once, in the same order in all processes."""
        first = {id(m.param): m.index for m in reversed(self.found) if m.shard is not m.param}
        return tuple(sorted(first.values()))


def members(optimizer: RuleOptimizer, expected: Container[int] = (), only: int | None = None) -> Members:
    """Return the parameters that can be updated, and those that wait for their first gradient.

    Args:
        expected: ids of parameters whose gradients are to come, and count as if they were there.
        only: the index of the only group that is asked for; None: all are.

    Raises:
        KeyError: state has some of a parameter's tensors and lacks another (as torch), or takes no new entries.
        RuntimeError: device, shape or dtype of a state tensor is wrong (as torch); a gradient is sparse; a parameter
            overlaps itself (as torch); one of them has lost its memory, or only some are DTensors (as torch); a
            parameter is complex and its group ``fused`` (as torch).
        NotImplementedError: a parameter with a gradient is neither floating-point nor complex (as torch).
        TypeError, ValueError: see :func:`refuse`.
        TypeError: a rule is not a rule, or changes hyperparameters and is not in the class's ``rules``.
        RuleError: see :func:`check_rules`.
    """
    found: list[Member] = []
    waiting: list[int] = []
    params: list[torch.Tensor] = []
    before: dict[int, tuple[int, int]] = {}  # by id: how often a parameter has occurred, and in which group first
    rules = tuple([optimizer.update_of(group) for group in optimizer.param_groups])
    check_rules(type(optimizer).__name__, rules)
    for rule in rules:
        if unknown := rule.carried.keys() - optimizer.numbers:
            raise TypeError(
                f"rule {rule.name!r} changes {', '.join(sorted(unknown))}: {type(optimizer).__name__}, which chooses "
                "among rules, has to name them all in its attribute 'rules'"
            )
    numbers = [number_names(optimizer, rule) for rule in rules]
    formatted = [optimizer.state_format_of(group) is not None for group in optimizer.param_groups]
    # Made once for parameters of one group, dtype and (if a format is asked for) size.
    of_alike: dict[tuple[object, ...], Columns] = {}
    for index, (group_index, group, p) in enumerate(occurrences(optimizer)):
        params.append(p)
        if only is not None and group_index != only:
            continue
        rule, entry = rules[group_index], dict(optimizer.state.get(p) or {})
        comes = p.grad is not None or id(p) in expected
        if not comes and not (entry and known(real_dtype(p.dtype))):  # a dtype is refused at the first gradient
            waiting.append(index)
            continue
        if p.grad is not None and p.is_complex() and group.get("fused"):
            raise RuntimeError(
                f"`fused=True` requires all the params to be floating point Tensors, and parameter {index} is {p.dtype}"
            )
        if not known(real_dtype(p.dtype)):
            raise NotImplementedError(f"{type(optimizer).__name__} cannot update parameter {index}: it is {p.dtype}")
        alike = group_index, p.dtype, p.numel() if formatted[group_index] else 0
        if (columns := of_alike.get(alike)) is None:
            columns = of_alike[alike] = Columns.of(optimizer, rule.inputs[2:], p, group)
        member = Member(
            p, group_index, rule, numbers[group_index], entry, columns, index, local(p), form=optimizer.form_of(p)
        )  # fmt: skip
        if not comes:
            if not _is_complete(optimizer, member):
                waiting.append(index)
                continue
        else:
            _find_missing(optimizer, member)
            _check(optimizer, member)
        member.turn, first = before.get(id(p), (0, group_index))
        before[id(p)], member.again = (member.turn + 1, first), first < group_index
        found.append(member)
    lengths = tuple([len(group["params"]) for group in optimizer.param_groups])
    return Members(found, waiting, tuple(params), lengths, rules)


def refuse(optimizer: RuleOptimizer, group: Group, states: Collection[str]) -> None:
    """Refuse parameters that can never be updated, before there is a gradient; ``states`` are all state names.

    Raises:
        TypeError: a parameter is a DTensor with a ``Partial`` placement: its sums have not been made.
        ValueError, TypeError: the group has an option with a bad value, or a format that cannot store its state.
        ValueError: a parameter is a ``FakeTensor``, or its state has an unsuitable format: one without complex numbers
            for a complex parameter, one whose entries stand for several elements for a DTensor, or float16 for squares
            of a parameter that is not float16.
    """
    check_group_options(group, states or None)
    check_choices(optimizer, group, states)
    if optimizer.param_format is not None and PARAM in states:
        raise ValueError(
            f"param_format is {optimizer.param_format!r}, and keeps in state {PARAM!r} what parameters have lost: the "
            "rule has a state of that name, which needs another"
        )
    for p in group["params"]:
        if (form := optimizer.form_of(p)) is not None and form.draws:
            group.setdefault("seed", optimizer.seed)
        if is_fake(p):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is a FakeTensor, which has no memory to update; make the "
                "optimizer outside of FakeTensorMode (pagedopt.estimate() says what its state will take)"
            )
        if is_sharded(p):
            _check_sharded(optimizer, p, group, states)
        for name in states if p.is_complex() else ():
            optimizer.format_of(name, p, group)
        optimizer.check_squares(states, p, group)


def check_choices(optimizer: RuleOptimizer, group: Group, states: Collection[str]) -> None:
    """Check formats that follow from rule and decay, and give the group seed and rounding if it has such a format.

    ``states`` are all state names.

    Raises:
        ValueError: a state cannot be stored.
        TypeError: the group's rule is none.
    """
    said = optimizer.state_format_of(group)
    if any(isinstance(chosen_format(said, name), Choice) for name in states):
        check_rule(optimizer.update_of(group))
        chosen = [name for name in optimizer.state_names(group) if isinstance(chosen_format(said, name), Choice)]
        for p in group["params"]:
            for name in chosen:
                optimizer.format_of(name, p, group)
        group.setdefault("seed", optimizer.seed)
        group.setdefault("rounding", optimizer.rounding)


def _check_sharded(optimizer: RuleOptimizer, p: torch.Tensor, group: Group, states: Collection[str]) -> None:
    if is_partial(p):
        raise TypeError(
            f"a parameter of shape {tuple(p.shape)} is {placement_of(p)}: its values are sums that have not been made; "
            "redistribute() it to Replicate() or Shard()"
        )
    if (own := optimizer.form_of(p)) is not None and own.draws and first_element(p) is None:
        raise ValueError(
            f"format {own.name!r} of a parameter of shape {tuple(p.shape)} that is {placement_of(p)}: random bits are "
            "of elements of the whole parameter, which follow each other where it is replicated, or sharded once by "
            "its first dimension; param_format='bfloat16+16' takes no random bits"
        )
    for name in states:
        form = optimizer.format_of(name, p, group)
        if not form.plain:
            raise ValueError(
                f"state_format is {form.name!r} for {name!r} of a parameter of shape {tuple(p.shape)} that is "
                f"{placement_of(p)}: shards have formats of single elements only, as 'float32' or 'bfloat16'"
            )


def _is_complete(optimizer: RuleOptimizer, member: Member) -> bool:
    """Tell whether a parameter without a gradient has all state, and as a step needs it."""
    needed = (*member.numbers, *member.columns)
    if any(member.entry.get(name) is None for name in needed):
        return False
    try:
        _check(optimizer, member)
    except (RuntimeError, TypeError):
        return False
    return True


def _find_missing(optimizer: RuleOptimizer, member: Member) -> None:
    needed = (*member.numbers, *member.columns)
    if optimizer.has_step and member.entry:  # torch makes all state of a parameter at once
        for name in needed:
            if name in member.entry:
                continue
            if name not in member.columns or member.columns[name].form not in REMAINDERS:
                raise KeyError(_lacking(member, name))  # as in torch
            member.missing = [name]  # of parameters that were cast since: nothing is lost so far
        return
    member.is_new = bool(needed) and not member.entry
    if member.is_new and getattr(optimizer.state, "default_factory", None) is None:
        optimizer.state[member.param]  # KeyError: a dict was put in place of torch's defaultdict
    entry = member.entry
    member.missing = [name for name in needed if entry.get(name) is None] if None in map(entry.get, needed) else ()


def _check(optimizer: RuleOptimizer, member: Member) -> None:
    p = member.param
    if p.grad is not None and p.grad.layout is not torch.strided:
        raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
    if p.grad is not None and is_sharded(p.grad) and member.shard is p:
        raise RuntimeError(f"the gradient of {_named(member)} is {placement_of(p.grad)}, the parameter is not")
    if member.shard is not p:
        group = optimizer.param_groups[member.group]
        _check_sharded(optimizer, p, group, {of.name for of in member.columns.values() if of.form not in REMAINDERS})
        p = member.shard
    if found := misfit(p, p.shape):
        raise RuntimeError(f"{_named(member)} {found.why}{'; use p.clone()' if found.aspect == 'expanded' else ''}")
    for key in member.columns:
        if key not in member.missing:
            _check_tensor(optimizer, member, key)
    _check_blocks(member)
    for name in member.numbers:
        if name not in member.missing:
            _check_number(member, name)
            _move_number(optimizer, member, name)


def _check_number(member: Member, name: str) -> None:
    value = member.entry[name]
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex() or is_sharded(value):
        raise RuntimeError(f"state {name!r} of {_named(member)} is {_words(value)}; it must be a tensor of one number")
    if value.is_meta:  # torch raises one or the other here, by what of it is loaded
        raise NotImplementedError(f"state {name!r} of {_named(member)} is on meta, and has no value")
    if found := misfit(value, value.shape):  # the host reads it where it lies: without memory that ends the process
        raise RuntimeError(f"state {name!r} of {_named(member)} {found.why}")


def _move_number(optimizer: RuleOptimizer, member: Member, name: str) -> None:
    """Copy a number to the device if the group's flags want it there: ZeRO's loading leaves it on the CPU."""
    value = member.entry[name]
    if beside_param(optimizer.param_groups[member.group]) and value.device.type == "cpu" != member.param.device.type:
        member.moved = {**member.moved, name: value}
        member.entry[name] = value.to(member.param.device)


def _check_tensor(optimizer: RuleOptimizer, member: Member, key: str) -> None:
    p, value, of = member.param, member.entry[key], member.columns[key]
    dtype, shaped_by = of.column.dtype, "" if of.column.per == 1 else f"format {of.form.name!r}"
    if of.free and isinstance(value, torch.Tensor) and value.dtype is not dtype:
        fixed = of.name in optimizer.fixed_dtypes and (p.grad is None or value.dtype is not p.grad.dtype)
        if not fixed and (value.is_complex() if p.is_complex() else value.is_floating_point()):
            dtype = value.dtype  # users may replace plain numbers by those of another dtype
    if found := misfit(value, of.column.shape(p), dtype, p.device, shaped_by=shaped_by, placed=p):
        what = f"state {key!r} of {_named(member)} {found.why}"
        if found.aspect == "dtype":
            # DtypeError is several errors of torch in one: versions of torch differ in what they raise here.
            raise DtypeError(f"{what} (by state_format; without one, by the parameter)")
        raise RuntimeError(what)


def _check_blocks(member: Member) -> None:
    """Refuse states whose blocks lie along different strides: a kernel walks all of them at once."""
    for form, keys in member.columns.in_blocks:
        like, along = member.like, blocks_along(form, [member.entry.get(key) for key in keys], member.shard)
        if along is not None and not same_layout(like.shape, along.stride(), like.stride()):
            raise RuntimeError(
                f"state {keys[0]!r} of {_named(member)} has strides {along.stride()}, other state in blocks "
                f"{like.stride()}: blocks follow the strides, which must be equal"
            )


def _lacking(member: Member, name: str) -> str:
    """Return the name of a missing state, and what to do if that state is there in another format."""
    of = member.columns.get(name)
    other = next((key for key in member.entry if of is not None and str(key).partition(".")[0] == of.name), None)
    if of is None or other is None:
        return name
    return (
        f"{name}: state {of.name!r} of {_named(member)} is stored as {other!r}, in another state_format; "
        "optimizer.load_state_dict(optimizer.state_dict()) stores it anew"
    )


def _named(member: Member) -> str:
    return f"parameter {member.index} of shape {tuple(member.param.shape)}"


def _words(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def create(optimizer: RuleOptimizer, found: Sequence[Member]) -> None:
    """Add missing state to the entries of members; all members of one parameter get the same entry.

    The optimizer does not change: new state belongs to the members.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room.
        ValueError: a decay is too slow for the format of the state.
    """
    if optimizer.store.arenas or not optimizer.store.budget.everything:
        optimizer.store.forget_and_warn(state_tensors(optimizer), type(optimizer).__name__)
    entries: dict[int, dict[str, Any]] = {}
    firsts = []
    for member in found:
        member.entry = entries.setdefault(id(member.param), member.entry)
        if member.turn == 0 and (member.is_new or member.missing):
            firsts.append(member)
            if optimizer.state_format_of(group := optimizer.param_groups[member.group]) is not None:
                optimizer.check_decays(member.param, group)
                # A parameter was cast, or a format changed, since the constructor has refused squares in float16.
                optimizer.check_squares(member.rule.inputs[2:], member.param, group, refuse=False)
    if not firsts:
        return
    late, columns, numbers = [], list[tuple[Member, str]](), list[tuple[Member, str]]()
    for member in firsts:
        if made := _preallocated(optimizer, member):
            member.entry.update(made)
            continue
        late.append(member)
        for name in member.missing:
            (columns if name in member.columns else numbers).append((member, name))
    wanted = [m.columns[key].wanted(m.param, key, m.like) for m, key in columns]
    created = optimizer.store.create(wanted) if wanted else []
    _warn_on_cpu(optimizer, firsts)
    _warn_without_int8(optimizer, firsts)
    if wanted:
        tell_made(optimizer, created)
    zeros = new_numbers([NumberSpec.of(optimizer.param_groups[m.group], m.param) for m, _ in numbers])
    for (member, name), value in zip((*numbers, *columns), (*zeros, *created), strict=True):
        member.entry[name] = value
    for member in late if optimizer.initial else ():
        _fill(optimizer, member)


def _preallocated(optimizer: RuleOptimizer, member: Member) -> dict[str, Any]:
    """Return a member's missing state, made by ``preallocate=True``; {} if it does not fit now."""
    made = optimizer.preallocated.get(member.param)
    if made is None or any(name not in made for name in member.missing):
        return {}
    spec = NumberSpec.of(optimizer.param_groups[member.group], member.param)
    for name in member.missing:
        column, value = member.columns.get(name), made[name]
        if column is None:
            fits = (value.device, value.dtype) == spec
        else:
            fits = column.fits(value, member.param) and value.dtype is column.column.dtype
        if not fits:
            return {}
    return {name: made[name] for name in member.missing}


def _warn_on_cpu(optimizer: RuleOptimizer, members: Sequence[Member]) -> None:
    """Warn, once, of options that have an effect beside a GPU only."""
    if "cpu" in {member.param.device.type for member in members}:
        store, transport = optimizer.store, optimizer.transport
        given = {"host_access": (store.host_access, None), "blocks": (optimizer.blocks, None)}
        for name, (value, default) in {**given, "transport": (transport, DEFAULT)}.items():
            if value != default:
                said = value.__name__ if isinstance(value, type) else repr(value)
                text = f"{name}={said} on cpu: these parameters are on no GPU, so it has no effect"
                warn_once((name, "cpu", value), text)


def _warn_without_int8(optimizer: RuleOptimizer, members: Sequence[Member]) -> None:
    """Warn, once, of options of int8 where no group has it; a format of one's own may draw bits from the seed, too."""
    given = {"seed": optimizer.seed or None, "rounding": optimizer.rounding}
    if set(given.values()) == {None} or any(not of.free for m in members for of in m.columns.values()):
        return
    if any(m.draws for m in members):
        given.pop("seed")
    for group in optimizer.param_groups:
        said = optimizer.state_format_of(group)
        if any(isinstance(chosen_format(said, name), Choice) for name in optimizer.state_names(group)):
            return
    for name, value in given.items():
        if value is not None:
            warn_once((name, value), f"{name}={value!r}: no state_format is 'int8', and it has no effect")


def _fill(optimizer: RuleOptimizer, member: Member) -> None:
    """Give new state, which is zero, its first value."""
    for name, value in optimizer.initial.items():
        value = optimizer.param_groups[member.group][value] if isinstance(value, str) else value
        if value == 0:
            continue
        if name in member.missing and (name not in member.columns or member.columns[name].free):
            both = name in member.columns and member.param.is_complex()  # a rule sees a pair of numbers
            local(member.entry[name]).fill_(complex(value, value) if both else value)
            optimizer.store.drop()  # filling loads pages that are away into memory: give them back before the next fill
        elif keys := [key for key, of in member.columns.items() if of.name == name and key in member.missing]:
            form = member.columns[keys[0]].form
            encode(form, [member.entry[key] for key in keys], value, member.param, optimizer.store)
