"""Load a state dict in three phases: check everything, allocate everything, then copy.

A load that fails before the first copy leaves the optimizer as it was.  Copies go into the existing state tensors,
because there may be no room for all state twice.  A half-finished copy leaves the optimizer damaged, so signals wait.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ..formats.floating import NUMBERS
from ..formats.format import Format
from ..placements import choose
from ..placements.store import Store, Wanted
from ..system.interrupts import Uninterrupted
from ..tables.tensors import has_memory, local, widest_first
from .columns import Columns, decode, encode
from .gather import check_choices
from .options import check_group_options, keep_own
from .room import tell_made
from .rule_optimizer import RuleOptimizer, occurrences, state_tensors, whole
from .scalars import beside_param
from .state_dict import (
    Loaded,
    State,
    StateDict,
    check_form,
    check_groups,
    check_state,
    members,
    number_of,
    reusable,
    translate,
)

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
    made = False
    block, written = whole(optimizer, "a load"), contextlib.ExitStack()

    def take(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
        check_form(loaded)
        own = {name for group in optimizer.param_groups for name in optimizer.state_names(group)}
        given.append(translate(loaded, own))
        written.enter_context(block)
        return {**given[0], "state": {}}

    def put(_: torch.optim.Optimizer) -> None:
        nonlocal made
        loaded = given.pop()
        for group, old in zip(optimizer.param_groups, before["param_groups"], strict=True):
            keep_own(group, old)
            check_group_options(group)
        check_groups(optimizer, before["param_groups"], loaded)
        for group in optimizer.param_groups:
            check_choices(optimizer, group, optimizer.state_names(group))
        everyone = [*members(optimizer, loaded)]
        check_state(optimizer, everyone)
        ready = prepare(optimizer, store, everyone, loaded["state"], before["state"])
        with Uninterrupted(gives_way=True):
            # Before the copies: if one fails, the next load reuses these tensors and needs no second copy of state.
            optimizer.state.update(ready.state)
            if ready.blocks:
                block.begin()
                copy_values(ready.blocks, store, ready.staging)
            for one in ready.conversions:
                _convert(one, store, ready.staging, block.begin)
            written.close()
            optimizer.damaged = ""  # all state is new: what was damaged before is mended
            made = ready.made

    # Registered now, `take` runs after users' pre-hooks; `prepend` lets `put` run before their post-hooks.
    hooks = [optimizer.register_load_state_dict_pre_hook(take)]
    hooks.append(optimizer.register_load_state_dict_post_hook(put, prepend=True))
    try:
        with written:
            torch_load(state_dict)
    except BaseException:
        with Uninterrupted():
            if not block.begun:
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


def prepare(
    optimizer: RuleOptimizer, store: Store, everyone: Sequence[Loaded], given: Mapping[Any, Any], before: State
) -> PreparedLoad:
    """Return the load of what :func:`check_state` has accepted, with all its memory; nothing is copied yet.

    Args:
        everyone: all parameters.
        given: the loaded state, by key.
        before: state as it was, by parameter.
    """
    entries: dict[torch.Tensor, dict[str, Any]] = {}
    new: list[tuple[dict[str, Any], Wanted]] = []
    pairs: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    converted: list[tuple[dict[str, Any], Loaded, str]] = []
    old: list[torch.Tensor] = []
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
        for name, (_, keys) in member.columns.states.items():
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
        source, (target, keys) = member.sources[name].form, member.columns.states[name]
        conversions.append(Conversion(member.param, source, loaded, target, [entry[key] for key in keys]))
    written = [target for target, _ in copies] + [column for one in conversions for column in one.columns]
    state = with_extras(entries, given, everyone, _overlaps(written))
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


# --- extras: what stands in ``optimizer.state`` and no rule names, because a wrapper or a user has put it there -------
#
# A load treats them as torch does.  What stands under a key that is no parameter stays the same object.  In the entry
# of a parameter, tensors go to its device and dtype, and containers are made anew; all else stays the same object.

IsWritten = Callable[[torch.Tensor], bool]


@torch.no_grad()
def with_extras(entries: State, state: Mapping[Any, Any], members: Sequence[Loaded], is_written: IsWritten) -> State:
    """Return ``entries``, state of an optimizer's own, with the extras of ``state``, a loaded one, and in its order.

    Args:
        entries: by parameter, the tensors that the load will fill.
        state: what is loaded, by key.
        members: all parameters of the optimizer.
        is_written: whether the load writes into the memory of a tensor.
    """
    by_key = {member.key: member for member in members}
    extras = _Extras({id(member.param): member.param for member in members}, is_written)
    for member in members:
        extras.follow(member.entry, entries.get(member.param, {}))
    found: dict[Any, Any] = {}
    for key, value in state.items():
        if key not in by_key:
            found[key] = extras.beside_entries(value)
            continue
        member = by_key[key]
        if (own := entries.get(member.param)) is not None:
            read = {*own, *(column for source in member.sources.values() for column in source.columns)}
            others = {name: extras.in_entry(item, name, member) for name, item in value.items() if name not in read}
            found[member.param] = {**own, **others}
    return found


def relink(state: MutableMapping[Any, Any], known: dict[int, torch.Tensor]) -> None:
    """Replace tensors in the extras of an optimizer's state by those that ``known`` has for their ids."""
    extras = _Extras(known, lambda _: False)
    for key, value in state.items():
        if (linked := extras.beside_entries(value)) is not value:
            state[key] = linked


@dataclass(frozen=True)
class _Extras:
    """How extras are taken over.

    Attributes:
        known: tensors by their ids: of a parameter itself, of loaded state the tensor that will have its values.
        is_written: whether the load writes into the memory of a tensor.
    """

    known: dict[int, torch.Tensor]
    is_written: IsWritten

    def follow(self, loaded: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Let extras that are ``loaded`` state be the optimizer's ``own``, where torch would take the loaded tensor."""
        for name, tensor in own.items():
            value = loaded.get(name)
            if isinstance(value, torch.Tensor) and (value.dtype, value.device) == (tensor.dtype, tensor.device):
                self.known[id(value)] = tensor

    def beside_entries(self, value: Any) -> Any:
        """Return what is loaded under a key that is no parameter: ``value``, if no tensor in it has to be another."""
        changed = False

        def link(tensor: torch.Tensor, _: Any) -> torch.Tensor:
            nonlocal changed
            linked = self.known[id(tensor)] if id(tensor) in self.known else self._apart(tensor)
            changed |= linked is not tensor
            return linked

        linked = _rebuilt(value, None, link, {})
        return linked if changed else value

    def in_entry(self, value: Any, key: Any, member: Loaded) -> Any:
        """Return what is loaded under ``key`` in the entry of a parameter."""
        p = member.param

        def place(tensor: torch.Tensor, key: Any) -> torch.Tensor:
            if id(tensor) in self.known:
                return self.known[id(tensor)]
            if key != "step":
                placed = tensor.to(p.device, p.dtype if p.is_floating_point() else tensor.dtype)
            else:
                placed = tensor.to(p.device, torch.float32) if beside_param(member.group) else tensor
            return self._apart(placed)

        return _rebuilt(value, key, place, {})

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, or a copy if it lies where the load writes.  (Other subclasses may have no memory.)"""
        known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        return tensor.clone() if known and has_memory(tensor) and self.is_written(tensor) else tensor


def _rebuilt(value: Any, key: Any, change: Callable[[torch.Tensor, Any], torch.Tensor], made: dict[int, Any]) -> Any:
    """Return ``value`` with each tensor within changed; ``made`` has the new containers by the ids of the old."""
    if isinstance(value, torch.Tensor):
        return change(value, key)
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict | list | deque):
        made[id(value)] = new = copy.copy(value)
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            new[name] = _rebuilt(item, name if isinstance(value, dict) else None, change, made)
        return new
    if type(value) in (tuple, set, frozenset):
        return type(value)(_rebuilt(item, None, change, made) for item in value)
    return value


# --- state moves into other tensors: where the placement wants it, into pages that can move, or into a deep copy ------

Optimizer = TypeVar("Optimizer", bound=RuleOptimizer)
#: (what to ask the store for, the parameter's state in which it will replace a tensor)
Replaced = tuple[Wanted, dict[str, Any]]


def bring_home(optimizer: RuleOptimizer, store: Store) -> None:
    """Copy state that is not where the placement wants it into new tensors, and free each old one when it is copied."""
    outside = _elsewhere(optimizer, store)
    if not outside:
        return
    made = store.create([wanted for wanted, _ in outside])
    known = {id(entry[wanted.key]): new for (wanted, entry), new in zip(outside, made, strict=True)}
    with _idle(wanted.param.device for wanted, _ in outside):
        for (wanted, entry), tensor in zip(outside, made, strict=True):
            with Uninterrupted():
                copy_values(in_order([(tensor, entry[wanted.key])]), store)
                entry[wanted.key] = tensor
    relink(optimizer.state, known)
    store.forget(state_tensors(optimizer))


def into_pages(optimizer: RuleOptimizer, store: Store, nbytes: int | None = None) -> int:
    """Move state from torch's own tensors into pages that are away; return the bytes freed on the device.

    Only for an optimizer without placement and budget, else 0.  Takes the state of the last parameters, ``nbytes`` or
    little more (None: all).  Old tensors are replaced after all copies, so a failure or interrupt changes nothing.
    """
    if not store.is_unplaced():
        return 0
    with store.all_away():
        moving, freed = _last(_elsewhere(optimizer, store), nbytes)
        made = store.create([wanted for wanted, _ in moving]) if moving else []
    try:
        with _idle(wanted.param.device for wanted, _ in moving):
            for (wanted, entry), new in zip(moving, made, strict=True):
                copy_values(in_order([(new, entry[wanted.key])]), store)
        with Uninterrupted():
            known = {id(entry[wanted.key]): new for (wanted, entry), new in zip(moving, made, strict=True)}
            for (wanted, entry), new in zip(moving, made, strict=True):
                entry[wanted.key] = new
            relink(optimizer.state, known)
    finally:
        del made
        moving.clear()
        store.forget(state_tensors(optimizer))
    torch.cuda.empty_cache()  # pages and other processes can use the memory only if torch returns it to the driver
    return freed


def _elsewhere(optimizer: RuleOptimizer, store: Store) -> list[Replaced]:
    """Return the state that is not where the placement wants it."""
    states = _whole_state(optimizer, used=False)
    return [each for state in states if not all(store.is_home(e[w.key]) for w, e in state) for each in state]


def _last(state: list[Replaced], nbytes: int | None) -> tuple[list[Replaced], int]:
    """Return state of the last parameters on devices that can move it, at least ``nbytes`` of it, and its bytes."""
    found, total, last = [], 0, None
    for wanted, entry in reversed(state):
        if nbytes is not None and total >= nbytes and wanted.param is not last:
            break
        if choose.moves_on_demand(wanted.param.device):
            found.append((wanted, entry))
            total, last = total + entry[wanted.key].nbytes, wanted.param
    return found[::-1], total


@contextlib.contextmanager
def _idle(devices: Iterable[torch.device]) -> Iterator[None]:
    """Synchronize the GPUs before and after the block: other streams may still use the tensors that it replaces."""
    gpus = {device for device in devices if device.type == "cuda"}
    for device in gpus:
        torch.cuda.synchronize(device)
    yield
    for device in gpus:
        torch.cuda.synchronize(device)


def _whole_state(optimizer: RuleOptimizer, used: bool = True) -> list[list[Replaced]]:
    """Return the state columns of each parameter that has all of them, in the right shapes and on its device.

    New ones will have their dtypes, and their blocks where they lie now.  ``used=False`` adds state that
    ``preallocate=True`` has made and no step has used yet.
    """
    found = {}
    for _, group, p in occurrences(optimizer):
        if not (entry := optimizer.state.get(p) or (not used and optimizer.preallocated.get(p))):
            continue
        columns = Columns.of(optimizer, optimizer.state_names(group), p, group)
        tensors = {key: (of, t) for key, of in columns.items() if of.fits(t := entry.get(key), p)}
        if columns and len(tensors) == len(columns):
            like = columns.walked_like(entry, p)
            found[p] = [(of.wanted(p, key, like, tensor.dtype), entry) for key, (of, tensor) in tensors.items()]
    return list(found.values())


def duplicate(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a deep copy.  State in arenas goes straight into the copy's arenas: ordinary memory might not hold it."""
    content = optimizer.__getstate__()
    twin = memo[id(optimizer)] = type(optimizer).__new__(type(optimizer))
    state = content.pop("state")
    empty = copy.copy(state)  # whatever mapping it is
    empty.clear()
    twin.__setstate__({**copy.deepcopy(content, memo), "state": empty})
    ours = [
        (wanted._replace(param=copy.deepcopy(wanted.param, memo)), entry[wanted.key])
        for state in _whole_state(optimizer)
        if not any(optimizer.store.is_outside_arenas(entry[wanted.key]) for wanted, entry in state)
        for wanted, entry in state
    ]
    made = twin.store.create([wanted for wanted, _ in ours]) if ours else []
    memo.update((id(tensor), new) for (_, tensor), new in zip(ours, made, strict=True))
    copy_values(in_order([(new, old) for (_, old), new in zip(ours, made, strict=True)]), twin.store)
    twin.state.update((copy.deepcopy(p, memo), copy.deepcopy(entry, memo)) for p, entry in state.items())
    return twin
