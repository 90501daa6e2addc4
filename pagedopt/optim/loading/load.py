"""Load a state dict in three phases: check everything, allocate everything, then copy.

A load that fails before the first copy leaves the optimizer as it was.  Copies go into the existing state tensors,
because there may be no room for all state twice.  A half-finished copy leaves the optimizer damaged, so signals wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...formats.format import Format
from ...placements.store import Store, Wanted
from ...system.interrupts import Uninterrupted
from ...tables.columns import widest_first
from ...tables.shards import local
from ..state.encoding import encode
from ..state.group_options import check_group_options, keep_own
from ..state.rule_optimizer import RuleOptimizer
from ..step.members import state_tensors
from .check import Loaded, State, StateDict, check_form, check_groups, check_state, members, number_of, reusable
from .foreign import translate

#: Bytes copied at a time, which bounds the memory that conversions take.
CHUNK = 16 << 20
#: Format, columns to write, loaded plain numbers, and the parameter.
Encoding = tuple[Format, list[torch.Tensor], torch.Tensor, torch.Tensor]
NO_STAGING = torch.empty(0, dtype=torch.uint8, device="cpu")


def load(
    optimizer: RuleOptimizer, store: Store, state_dict: StateDict, torch_load: Callable[[StateDict], None]
) -> None:
    """Let ``torch_load`` run hooks and load groups; load state here.  An error before the first copy changes nothing.

    torch sees no state, because it would cast it to the parameters' dtype and store references to what it was given.
    """
    before = dict(vars(optimizer))
    given: list[StateDict] = []
    begun = made = False

    def take(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
        check_form(loaded)
        # If a rule of this optimizer has state named "state1", the name does not mean that the dict is bitsandbytes'.
        has_state1 = any("state1" in optimizer.state_names(group) for group in optimizer.param_groups)
        given.append(loaded if has_state1 else translate(loaded))
        # Set first: if we are interrupted, the text stays and says that the state is damaged.
        optimizer.damaged = "a load ended in the middle"
        return {**given[0], "state": {}}

    def put(_: torch.optim.Optimizer) -> None:
        nonlocal begun, made
        loaded = given.pop()
        for group, old in zip(optimizer.param_groups, before["param_groups"], strict=True):
            keep_own(group, old)
            check_group_options(group)
        check_groups(optimizer, before["param_groups"], loaded)
        check_state(optimizer, loaded)
        plan = prepare(optimizer, store, loaded, before["state"])
        with Uninterrupted(gives_way=True):
            # Before the copies: if one fails, the next load reuses these tensors and needs no second copy of state.
            optimizer.state.update(plan.entries)
            if plan.blocks:
                begin()
                copy_values(plan.blocks, store, plan.staging)
            for one in plan.encodings:
                encode(*one, store, begin)
            optimizer.damaged = ""
            made = plan.made

    def begin() -> None:
        nonlocal begun
        begun = True

    # Registered now, `take` runs after users' pre-hooks; `prepend` lets `put` run before their post-hooks.
    hooks = [optimizer.register_load_state_dict_pre_hook(take)]
    hooks.append(optimizer.register_load_state_dict_post_hook(put, prepend=True))
    try:
        torch_load(state_dict)
    except BaseException:
        with Uninterrupted():
            if not begun:
                for name in vars(optimizer).keys() - before.keys():
                    delattr(optimizer, name)
                vars(optimizer).update(before)
            before.clear()  # the traceback refers to this frame and would keep the old state alive
            store.forget(state_tensors(optimizer))
        raise
    finally:
        for hook in hooks:
            hook.remove()
    store.forget(state_tensors(optimizer))
    if made:
        # Imported only when state is made, because it loads the planning modules.
        from ..step.budget_advice import tell_made

        tell_made(optimizer, by="load_state_dict()")


@dataclass(frozen=True)
class Plan:
    """A load that has been checked, and all memory that it needs.

    Attributes:
        entries: the optimizer's state after the load.
        blocks: pairs of (part of a state tensor, values to copy into it).
        staging: host memory for values that are converted on their way to a device.
        made: whether new state tensors were allocated.
    """

    entries: dict[Any, dict[str, Any]]
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    encodings: list[Encoding]
    staging: torch.Tensor
    made: bool


def prepare(optimizer: RuleOptimizer, store: Store, state_dict: StateDict, before: State) -> Plan:
    """Return the load of a dict that :func:`check_state` has accepted, with all its memory; nothing is copied yet."""
    entries: dict[Any, dict[str, Any]] = {}
    new: list[tuple[dict[str, Any], Wanted]] = []
    plain: list[tuple[dict[str, Any], list[str], Loaded, str]] = []
    pairs: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    everyone = list(members(optimizer, state_dict))
    for member in [each for each in everyone if each.entry]:
        p = member.param
        entry = entries[p] = {name: number_of(member, name) for name in member.numbers}
        reused = [reusable(optimizer, before, member, key) for key in member.columns]
        if None in reused and not all(old is None or store.is_plain(old) for old in reused):
            reused = [None] * len(reused)  # all columns of a piece move with one page, so they share an arena
        encoded = {key for keys in member.plain.values() for key in keys}
        plain += [(entry, keys, member, name) for name, keys in member.plain.items()]
        for (key, of), old in zip(member.columns.items(), reused, strict=True):
            entry[key] = old
            if key not in encoded:
                pairs.append((entry, key, local(member.entry[key])))
            if old is None:
                new.append((entry, of.wanted(p, key)))
        others = [n for n in member.entry if n not in (*member.numbers, *member.columns, *member.plain)]
        entry.update((name, _copied(member.entry[name], p)) for name in others)
    params = {member.key: member.param for member in everyone}
    entries = {  # in the order of the loaded dict, as torch
        params.get(key, key): entries.get(params[key], {}) if key in params else copy.deepcopy(entry)
        for key, entry in state_dict["state"].items()
        if key not in params or params[key] in entries
    }
    sources = _without_aliases(pairs)
    on_devices = any(isinstance(p, torch.Tensor) and p.device.type != "cpu" for p in entries)
    staging = torch.empty(CHUNK if on_devices else 0, dtype=torch.uint8, device="cpu")
    made = store.create([wanted for _, wanted in new]) if new else []
    for (entry, wanted), tensor in zip(new, made, strict=True):
        entry[wanted.key] = tensor
    copies = [(entry[key], source) for (entry, key, _), source in zip(pairs, sources, strict=True)]
    encodings = [
        (member.columns[keys[0]].form, [entry[key] for key in keys], member.entry[name], member.param)
        for entry, keys, member, name in plain
    ]
    return Plan(entries, in_order([(a, b) for a, b in copies if not _same(a, b)]), encodings, staging, bool(new))


def _copied(value: Any, p: torch.Tensor) -> Any:
    """Copy a value that no rule names, to the device and dtype that torch chooses."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to(p.device, p.dtype if p.is_floating_point() else value.dtype, copy=True)


def _without_aliases(pairs: list[tuple[dict[str, Any], str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the loaded tensors.  One that shares memory with state that will be overwritten is copied to the host."""
    targets = {local(old).untyped_storage().data_ptr() for entry, name, _ in pairs if (old := entry[name]) is not None}
    return [
        value.detach().to("cpu", copy=True)
        if value.untyped_storage().data_ptr() in targets and not _same(entry[name], value)
        else value
        for entry, name, value in pairs
    ]


def _same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are the same elements of the same memory."""
    a = None if a is None else local(a)
    return a is not None and (a.data_ptr(), a.dtype, a.stride()) == (b.data_ptr(), b.dtype, b.stride())


@torch.no_grad()
def copy_values(
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]], store: Store, staging: torch.Tensor = NO_STAGING
) -> None:
    """Copy the second tensor of each pair of :func:`in_order` into the first; ``store`` stays within its budget."""
    filled = 0
    for block, source in blocks:
        _copy(block, source, staging)
        filled += block.nbytes
        if filled >= CHUNK:
            store.drop()  # writing brings pages that are away into memory, beyond the budget
            filled = 0
    store.drop()


@torch.no_grad()
def in_order(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut pairs of (target, source), of DTensors the shards, into blocks of ``CHUNK`` bytes by the target's address."""
    blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
    shards = [(local(target), local(source)) for target, source in copies]
    for target, source in sorted(shards, key=lambda pair: pair[0].data_ptr()):
        order = widest_first(target)  # so that blocks of a dense target are contiguous
        limit = CHUNK // max(target.itemsize, source.itemsize)
        blocks += _blocks(target.permute(order), source.permute(order), limit)
    return blocks


def _blocks(target: torch.Tensor, source: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut two tensors of one shape into pairs of blocks of at most ``limit`` elements."""
    if target.numel() <= limit:
        yield target, source
    elif rows := limit // (target.numel() // len(target)):
        yield from zip(target.split(rows), source.split(rows), strict=True)
    else:
        for row in zip(target, source, strict=True):
            yield from _blocks(*row, limit)


def _copy(block: torch.Tensor, values: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy without temporaries on the target's device: values in another dtype are converted on the host first."""
    plain = values.device.type == "cpu" and values.dtype == block.dtype and values.is_contiguous()
    if not (plain or block.device.type == "cpu" or block.device == values.device):
        values = staging[: block.nbytes].view(block.dtype).view(block.shape).copy_(values)
    block.copy_(values)
