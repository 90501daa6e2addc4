"""Loading state: checks, then all allocation, then the copying.

What can be foreseen to fail comes before the first byte is copied, and a load that fails until then leaves the
optimizer as it was.  Copying is in place, as a second copy of all state is what there is no room for: so no signal may
end it in the middle, and what ends it all the same leaves the optimizer damaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...formats.format import Format
from ...placements.store import Store, Wanted
from ...system.interrupts import Uninterrupted
from ...tables.columns import widest_first
from ...tables.shards import local
from ..state.encoding import encode
from ..state.rule_optimizer import RuleOptimizer
from ..step.members import state_tensors
from .check import Loaded, State, StateDict, check_form, check_groups, check_state, home, members, number_of
from .foreign import translate

#: Bytes copied at a time, and so the most that a conversion takes beside the state.
CHUNK = 16 << 20
NO_STAGING = torch.empty(0, dtype=torch.uint8, device="cpu")


def load(
    optimizer: RuleOptimizer,
    memory: Store,
    state_dict: StateDict,
    torch_load: Callable[[StateDict], None],
) -> None:
    """Load ``state_dict`` with the hooks and the groups of ``torch_load``, and state into ``memory``.

    torch would cast state to the parameters' dtype and keep references to what it was given; so it sees no state.

    Raises:
        ValueError: the dict does not fit the optimizer.  After any error before the first copy (also out of memory, or
            from a hook of others) every attribute, value and address is what it was.
    """
    before = dict(vars(optimizer))
    given: list[StateDict] = []
    begun = made = False

    def take(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
        check_form(loaded)
        given.append(loaded if _has_name(optimizer, "state1") else translate(loaded))
        optimizer.damaged = "a load ended in the middle"  # from here on, until it has not, or all is as before
        return {**given[0], "state": {}}

    def put(_: torch.optim.Optimizer) -> None:
        nonlocal begun, made
        loaded = given.pop()
        check_groups(optimizer, before["param_groups"], loaded)
        check_state(optimizer, loaded)
        plan = prepare(optimizer, memory, loaded, before["state"])
        with Uninterrupted(gives_way=True):
            # First, so that a load which fails from here on leaves its tensors to the one that mends it.
            optimizer.state.update(plan.entries)
            if plan.blocks:
                begin()
                copy_values(plan.blocks, memory, plan.staging)
            for one in plan.encodings:
                encode(*one, memory, begin)
            optimizer.damaged = ""
            made = plan.made

    def begin() -> None:
        nonlocal begun
        begun = True

    # Registered here, so that they run behind and before the hooks that others have registered.
    hooks = (
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(put, prepend=True),
    )
    try:
        torch_load(state_dict)
    except BaseException:
        with Uninterrupted():
            if not begun:
                for name in vars(optimizer).keys() - before.keys():
                    delattr(optimizer, name)
                vars(optimizer).update(before)
            before.clear()  # the traceback has it, and would keep the state alive that was there
            memory.forget(state_tensors(optimizer))
        raise
    finally:
        for hook in hooks:
            hook.remove()
    memory.forget(state_tensors(optimizer))
    if made:
        from ..step.budget_advice import (
            tell_made,  # loads what plans are made with: where state is made, and not before
        )

        tell_made(optimizer, by="load_state_dict()")


def _has_name(optimizer: RuleOptimizer, name: str) -> bool:
    return any(name in optimizer.state_names(group) for group in optimizer.param_groups)


class Encoding(NamedTuple):
    """Loaded plain numbers for state in another format."""

    form: Format
    columns: list[torch.Tensor]
    values: torch.Tensor
    param: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """What there is to do, with all memory that it takes.

    Attributes:
        entries: the optimizer's state when it is done.
        blocks: parts of state tensors, and what they get.
        encodings: loaded plain numbers, and the columns that will hold them.
        staging: bytes on the host for values that are converted on their way to a device.
        made: whether some state is in memory that was not there before.
    """

    entries: dict[Any, dict[str, Any]]
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    encodings: list[Encoding]
    staging: torch.Tensor
    made: bool


def prepare(optimizer: RuleOptimizer, memory: Store, state_dict: StateDict, before: State) -> Plan:
    """Allocate what loading takes: state that there is not yet, and room for conversions.

    Args:
        optimizer, state_dict, before: as :func:`check_state` found them good.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room.
    """
    entries: dict[Any, dict[str, Any]] = {}
    wanted: list[Wanted] = []
    new: list[tuple[dict[str, Any], str]] = []
    plain: list[tuple[dict[str, Any], list[str], Loaded, str]] = []
    pairs: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for member in members(optimizer, state_dict):
        if not member.entry:
            continue
        p = member.param
        entry = entries[p] = {name: number_of(member, name) for name in member.numbers}
        homes = [home(optimizer, before, p, key, of) for key, of in member.columns.items()]
        if not all(old is None or memory.is_plain(old) for old in homes) and None in homes:
            homes = [None] * len(homes)  # state that moves is whole, so that its pages are
        encoded = {key for keys in member.plain.values() for key in keys}
        plain += [(entry, keys, member, name) for name, keys in member.plain.items()]
        for (key, of), old in zip(member.columns.items(), homes, strict=True):
            entry[key] = old
            if key not in encoded:
                pairs.append((entry, key, local(member.entry[key])))
            if old is None:
                wanted.append(of.wanted(p, key))
                new.append((entry, key))
        others = [n for n in member.entry if n not in (*member.numbers, *member.columns, *member.plain)]
        entry.update((name, _own(member.entry[name], p)) for name in others)
    params = {member.key: member.param for member in members(optimizer, state_dict)}
    entries = {  # in the order of the dict, as torch
        params.get(key, key): entries.get(params[key], {}) if key in params else copy.deepcopy(entry)
        for key, entry in state_dict["state"].items()
        if key not in params or params[key] in entries
    }
    sources = _apart(pairs)
    on_devices = any(isinstance(p, torch.Tensor) and p.device.type != "cpu" for p in entries)
    staging = torch.empty(CHUNK if on_devices else 0, dtype=torch.uint8, device="cpu")
    made = iter(memory.create(wanted) if wanted else ())
    for entry, key in new:
        entry[key] = next(made)
    copies = [(entry[key], source) for (entry, key, _), source in zip(pairs, sources, strict=True)]
    encodings = [
        Encoding(member.columns[keys[0]].form, [entry[key] for key in keys], member.entry[name], member.param)
        for entry, keys, member, name in plain
    ]
    return Plan(entries, in_order([(a, b) for a, b in copies if not _same(a, b)]), encodings, staging, bool(new))


def _own(value: Any, p: torch.Tensor) -> Any:
    """A copy of a value that no rule names, where and in the dtype that torch would have it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to(p.device, p.dtype if p.is_floating_point() else value.dtype, copy=True)


def _apart(pairs: list[tuple[dict[str, Any], str, torch.Tensor]]) -> list[torch.Tensor]:
    """The loaded tensors; those that view memory of other state that will be overwritten are copied to the host."""
    homes = {local(old).untyped_storage().data_ptr() for entry, name, _ in pairs if (old := entry[name]) is not None}
    return [
        value.detach().to("cpu", copy=True)
        if value.untyped_storage().data_ptr() in homes and not _same(entry[name], value)
        else value
        for entry, name, value in pairs
    ]


def _same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are the same elements of the same memory."""
    a = None if a is None else local(a)
    return a is not None and (a.data_ptr(), a.dtype, a.stride()) == (b.data_ptr(), b.dtype, b.stride())


@torch.no_grad()
def copy_values(
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]], memory: Store, staging: torch.Tensor = NO_STAGING
) -> None:
    """Copy into each first tensor what the second has.

    Args:
        blocks: from :func:`in_order`.
        memory: keeps to its budget meanwhile.
        staging: bytes on the host for values that are converted on their way to a device.

    Raises:
        OSError, MemoryError: state in a file could not be written out; some of it is copied.
    """
    filled = 0
    for block, source in blocks:
        _copy(block, source, staging)
        filled += block.nbytes
        if filled >= CHUNK:
            memory.drop()  # keeps to the budget while pages are touched that should not stay in memory
            filled = 0
    memory.drop()


@torch.no_grad()
def in_order(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is to be copied, in the order of addresses, cut into blocks of ``CHUNK`` bytes: all that takes memory comes
    before the first copy.  Of DTensors the shards, which are placed alike."""
    blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
    shards = [(local(target), local(source)) for target, source in copies]
    for target, source in sorted(shards, key=lambda pair: pair[0].data_ptr()):
        order = widest_first(target)  # then each of its blocks is contiguous, too
        limit = CHUNK // max(target.itemsize, source.itemsize)
        blocks += _blocks(target.permute(order), source.permute(order), limit)
    return blocks


def _blocks(target: torch.Tensor, source: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut two tensors of one shape into blocks of at most ``limit`` elements."""
    if target.numel() <= limit:
        yield target, source
        return
    rows = limit // (target.numel() // len(target))
    if rows:
        yield from zip(target.split(rows), source.split(rows), strict=True)
        return
    for row in zip(target, source, strict=True):
        yield from _blocks(*row, limit)


def _copy(block: torch.Tensor, values: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy without temporaries on the target's device: what torch would convert there is converted on the host."""
    plain = values.device.type == "cpu" and values.dtype == block.dtype and values.is_contiguous()
    if not (plain or block.device.type == "cpu" or block.device == values.device):
        values = staging[: block.nbytes].view(block.dtype).view(block.shape).copy_(values)
    block.copy_(values)
