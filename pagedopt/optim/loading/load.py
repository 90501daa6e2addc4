"""Load a state dict in three phases: check everything, allocate everything, then copy.

A load that fails before the first copy leaves the optimizer as it was.  Copies go into the existing state tensors,
because there may be no room for all state twice.  A half-finished copy leaves the optimizer damaged, so signals wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...formats.floating import NUMBERS
from ...formats.format import Format
from ...placements.store import Store, Wanted
from ...system.interrupts import Uninterrupted
from ...tables.tensors import local, widest_first
from ..columns import decode, encode
from ..gather import check_choices
from ..options import check_group_options, keep_own
from ..room import tell_made
from ..rule_optimizer import RuleOptimizer, state_tensors, whole
from .check import Loaded, State, StateDict, check_form, check_groups, check_state, members, number_of, reusable
from .extras import with_extras
from .foreign import translate

#: Bytes copied at a time, which bounds the memory that conversions take.
STAGING_BYTES = 16 << 20
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
    written = contextlib.ExitStack()

    def take(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
        check_form(loaded)
        own = {name for group in optimizer.param_groups for name in optimizer.state_names(group)}
        given.append(translate(loaded, own))
        written.enter_context(whole(optimizer, "a load", lambda: begun))
        return {**given[0], "state": {}}

    def put(_: torch.optim.Optimizer) -> None:
        nonlocal begun, made
        loaded = given.pop()
        for group, old in zip(optimizer.param_groups, before["param_groups"], strict=True):
            keep_own(group, old)
            check_group_options(group)
        check_groups(optimizer, before["param_groups"], loaded)
        for group in optimizer.param_groups:
            check_choices(optimizer, group, optimizer.state_names(group))
        check_state(optimizer, loaded)
        ready = prepare(optimizer, store, loaded, before["state"])
        with Uninterrupted(gives_way=True):
            # Before the copies: if one fails, the next load reuses these tensors and needs no second copy of state.
            optimizer.state.update(ready.state)
            if ready.blocks:
                begin()
                copy_values(ready.blocks, store, ready.staging)
            for one in ready.conversions:
                _convert(one, store, ready.staging, begin)
            written.close()
            optimizer.damaged = ""  # all state is new: what was damaged before is mended
            made = ready.made

    def begin() -> None:
        nonlocal begun
        begun = True

    # Registered now, `take` runs after users' pre-hooks; `prepend` lets `put` run before their post-hooks.
    hooks = [optimizer.register_load_state_dict_pre_hook(take)]
    hooks.append(optimizer.register_load_state_dict_post_hook(put, prepend=True))
    try:
        with written:
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
        tell_made(optimizer, by="load_state_dict()")


class Conversion(NamedTuple):
    """State that is read in one format and written in another, or with other strides.

    Attributes:
        param: the parameter.
        source, values: the format in which it was saved, and its loaded columns.
        target, columns: the format of the state, and its columns.
    """

    param: torch.Tensor
    source: Format
    values: list[torch.Tensor]
    target: Format
    columns: list[torch.Tensor]


@dataclass(frozen=True)
class PreparedLoad:
    """A load that has been checked, and all memory that it needs but for single states that are converted.

    Attributes:
        state: the optimizer's state after the load.
        blocks: pairs of (part of a state tensor, values to copy into it).
        conversions: state that cannot be copied.
        staging: host memory for values that are converted on their way to a device.
        made: whether new state tensors were allocated.
    """

    state: State
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    conversions: list[Conversion]
    staging: torch.Tensor
    made: bool


def prepare(optimizer: RuleOptimizer, store: Store, state_dict: StateDict, before: State) -> PreparedLoad:
    """Return the load of a dict that :func:`check_state` has accepted, with all its memory; nothing is copied yet."""
    entries: dict[torch.Tensor, dict[str, Any]] = {}
    new: list[tuple[dict[str, Any], Wanted]] = []
    pairs: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    converted: list[tuple[dict[str, Any], Loaded, str]] = []
    old: list[torch.Tensor] = []
    everyone = list(members(optimizer, state_dict))
    for member in [each for each in everyone if each.entry]:
        p = member.param
        entry = entries[p] = {name: number_of(member, name) for name in member.numbers}
        reused = [reusable(optimizer, before, member, key) for key in member.columns]
        if None in reused and not all(old is None or store.is_outside_arenas(old) for old in reused):
            reused = [None] * len(reused)  # all columns of a piece move with one page, so they share an arena
        for (key, of), tensor in zip(member.columns.items(), reused, strict=True):
            entry[key] = tensor
            if tensor is None:
                new.append((entry, of.wanted(p, key, member.like)))
            else:
                old.append(tensor)
        for name, (_, keys) in member.states.items():
            if member.is_copied(name):
                pairs += [(entry, key, member.entry[key]) for key in keys]
            else:
                converted.append((entry, member, name))
    is_reused = _overlaps(old)
    values = [value if _same(entry[key], value) else _apart(value, is_reused) for entry, key, value in pairs]
    read = [[_apart(value, is_reused) for value in member.values(name)] for _, member, name in converted]
    on_devices = any(member.param.device.type != "cpu" for member in everyone if member.entry)
    staging = torch.empty(STAGING_BYTES if on_devices else 0, dtype=torch.uint8, device="cpu")
    made = store.create([wanted for _, wanted in new]) if new else []
    for (entry, wanted), tensor in zip(new, made, strict=True):
        entry[wanted.key] = tensor
    targets = [entry[key] for entry, key, _ in pairs]
    copies = [(a, b) for a, b in zip(targets, values, strict=True) if not _same(a, b)]
    conversions = []
    for (entry, member, name), loaded in zip(converted, read, strict=True):
        source, (target, keys) = member.sources[name].form, member.states[name]
        conversions.append(Conversion(member.param, source, loaded, target, [entry[key] for key in keys]))
    written = [target for target, _ in copies] + [column for one in conversions for column in one.columns]
    state = with_extras(entries, state_dict["state"], everyone, _overlaps(written))
    return PreparedLoad(state, in_order(copies), conversions, staging, bool(new))


def _convert(conversion: Conversion, store: Store, staging: torch.Tensor, begin: Callable[[], object]) -> None:
    """Write state in another format, or with other strides, than it was saved in; values are rounded once."""
    param, source, loaded, target, columns = conversion
    values = loaded[0] if source in NUMBERS else decode(source, loaded, param)
    if target in NUMBERS:
        begin()
        copy_values(in_order([(columns[0], values)]), store, staging)
    else:
        encode(target, columns, values, param, store, begin)


def _apart(tensor: torch.Tensor, is_written: Callable[[torch.Tensor], bool]) -> torch.Tensor:
    """Return the elements of a tensor; on the host, if they lie where the load writes."""
    tensor = local(tensor).detach()
    return tensor.to("cpu", copy=True) if is_written(tensor) else tensor


def _overlaps(written: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Return a function that says whether a tensor shares memory with one of those that will be written."""
    spans = np.array(sorted(map(_span, written)), np.uint64).reshape(-1, 2)
    starts, ends = spans[:, 0], np.maximum.accumulate(spans[:, 1])

    def overlaps(tensor: torch.Tensor) -> bool:
        first, last = _span(tensor)
        before = int(np.searchsorted(starts, np.uint64(last)))  # as many begin before it ends
        return bool(first < last and before and ends[before - 1] > first)

    return overlaps


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    tensor = local(tensor)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (elements * tensor.itemsize if tensor.numel() else 0)


def _same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are the same elements of the same memory."""
    if a is None:
        return False
    a, b = local(a), local(b)
    return (a.data_ptr(), a.dtype, a.stride()) == (b.data_ptr(), b.dtype, b.stride())


@torch.no_grad()
def copy_values(
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]], store: Store, staging: torch.Tensor = NO_STAGING
) -> None:
    """Copy the second tensor of each pair of :func:`in_order` into the first; ``store`` stays within its budget."""
    filled = 0
    for block, source in blocks:
        _copy(block, source, staging)
        filled += block.nbytes
        if filled >= STAGING_BYTES:
            store.drop()  # writing brings pages that are away into memory, beyond the budget
            filled = 0
    store.drop()


@torch.no_grad()
def in_order(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut pairs of (target, source), or their shards, into blocks of ``STAGING_BYTES`` by the target's address."""
    blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
    shards = [(local(target), local(source)) for target, source in copies]
    for target, source in sorted(shards, key=lambda pair: pair[0].data_ptr()):
        order = widest_first(target)  # so that blocks of a dense target are contiguous
        limit = STAGING_BYTES // max(target.itemsize, source.itemsize)
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
    direct = values.device.type == "cpu" and values.dtype == block.dtype and values.is_contiguous()
    if not (direct or block.device.type == "cpu" or block.device == values.device):
        values = staging[: block.nbytes].view(block.dtype).view(block.shape).copy_(values)
    block.copy_(values)
