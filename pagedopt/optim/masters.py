"""The float32 numbers that bfloat16 parameters stand for with what they have lost (``param_format``): masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter

import torch

from ..common.names import kind_of
from ..formats.sixteen import PARAM
from ..system.interrupts import Uninterrupted
from ..system.warn import warn_once
from ..tables.tensors import local, misfit
from .columns import HOST, decode
from .plan import preallocate
from .rule_optimizer import RuleOptimizer, check_whole, occurrences, whole
from .state_dict import is_whole

Named = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
_version = attrgetter("_version")


def master(optimizer: RuleOptimizer, p: torch.Tensor) -> torch.Tensor:
    """See :meth:`PagedOptimizer.master`."""
    check_whole(optimizer)
    _check_own(optimizer, [p])
    return exact_of(optimizer, p, p.device)


def master_state_dict(optimizer: RuleOptimizer, named: Named) -> dict[str, torch.Tensor]:
    """See :meth:`PagedOptimizer.master_state_dict`."""
    check_whole(optimizer)
    params = _as_dict("named", named)
    own = {id(p): local(p).data_ptr() for _, _, p in occurrences(optimizer)}
    memory = {*own.values()} - {0}
    for name, p in params.items():
        if id(p) not in own and local(p).data_ptr() in memory:
            raise ValueError(
                f"{name} is no parameter of this optimizer, and shares memory with one, whose lost bits would be left "
                "out: give model.named_parameters(), or model.state_dict(keep_vars=True)"
            )
    return {name: exact_of(optimizer, p, HOST) for name, p in params.items()}


@torch.no_grad()
def load_master(optimizer: RuleOptimizer, values: Mapping[str, torch.Tensor], named: Named) -> None:
    """See :meth:`PagedOptimizer.load_master`."""
    check_whole(optimizer)
    params, wanted = _as_dict("named", named), _as_dict("values", values)
    if unknown := [name for name in wanted if name not in params]:
        raise ValueError(f"no parameter is called {', '.join(map(repr, unknown))}; there are {', '.join(params)}")
    given = {name: (params[name], each) for name, each in wanted.items()}
    _check_own(optimizer, [p for p, _ in given.values()])
    for name, (p, each) in given.items():
        if found := misfit(each, p.shape, placed=p, memory=False):
            raise ValueError(f"the master of {name} {found.why}")
        if not (each.is_floating_point() or (each.is_complex() and p.is_complex())):
            raise ValueError(f"the master of {name} is {each.dtype}, and the parameter {p.dtype}; give float32")
        if not is_whole(each):
            raise ValueError(f"the master of {name} has no values: it is a meta tensor, or its file was cut off")
    _make_state(optimizer, [p for p, _ in given.values()])
    with Uninterrupted(gives_way=True), whole(optimizer, "load_master()") as block:
        for p, each in given.values():
            put(optimizer, p, local(each).detach(), block.begin)
    optimizer.versions = None


def reset_master(optimizer: RuleOptimizer, p: torch.Tensor) -> None:
    """See :meth:`PagedOptimizer.reset_master`."""
    check_whole(optimizer)
    _check_own(optimizer, [p])
    if (lost := lost_of(optimizer, p)) is not None:
        lost.zero_()
        optimizer.store.drop()
    if (before := optimizer.versions) is not None and (now := _versions_of(optimizer)) is not None:
        params = [q for _, _, q in occurrences(optimizer)]
        optimizer.versions = [b if q is p else a for q, a, b in zip(params, before, now, strict=False)]


def _make_state(optimizer: RuleOptimizer, params: Iterable[torch.Tensor]) -> None:
    """Make the state of parameters that lack what is kept beside them; an error leaves none of it."""
    lacking = [p for p in params if _key(optimizer, p) and lost_of(optimizer, p) is None]
    ids, before, made = {id(p) for p in lacking}, dict(optimizer.preallocated), optimizer.preallocated
    try:
        for index, group in enumerate(optimizer.param_groups):
            if any(id(p) in ids for p in group["params"]):
                preallocate(optimizer, index, ids)
    except BaseException:
        optimizer.preallocated = before
        raise
    optimizer.state.update({p: made.pop(p) for p in lacking if p in made})


def _as_dict(what: str, given: Named) -> dict[str, torch.Tensor]:
    """Return names and tensors, which are a mapping or pairs.

    Raises:
        TypeError: they are none.
    """
    try:
        found = dict(given)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {kind_of(given)}; give names and tensors, as of model.named_parameters()") from None
    for name, each in found.items():
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{name!r} in {what} is {kind_of(each)}, not a tensor")
    return found


def _check_own(optimizer: RuleOptimizer, params: Iterable[torch.Tensor]) -> None:
    own = {id(p) for _, _, p in occurrences(optimizer)}
    for p in params:
        if id(p) not in own:
            said = f"a tensor of shape {tuple(p.shape)}" if isinstance(p, torch.Tensor) else kind_of(p)
            raise ValueError(f"{said} is no parameter of this optimizer")


def _key(optimizer: RuleOptimizer, p: torch.Tensor) -> str | None:
    """Return the key in state of what a parameter has lost; None: nothing is kept beside it."""
    form = optimizer.form_of(p)
    return None if form is None or form.remainder is None else form.columns[1].key(PARAM)


def lost_of(optimizer: RuleOptimizer, p: torch.Tensor) -> torch.Tensor | None:
    """Return the column of what a parameter has lost; None: it has none so far."""
    key = _key(optimizer, p)
    found: torch.Tensor | None = None if key is None else (optimizer.state.get(p) or {}).get(key)
    return found


def exact_of(optimizer: RuleOptimizer, p: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what :func:`master` does, on a device."""
    form, lost = optimizer.form_of(p), lost_of(optimizer, p)
    if form is not None and lost is not None:
        return decode(form, [p.detach(), lost], p, device)
    return p.detach().to(device, p.dtype if p.dtype.itemsize >= 4 else torch.float32, copy=True)


def put(optimizer: RuleOptimizer, p: torch.Tensor, values: torch.Tensor, begin: Callable[[], object]) -> None:
    """Write numbers into a parameter and what it loses, through the host: a device needs no room for them.

    ``begin`` is called before the first write.
    """
    form, lost, own = optimizer.form_of(p), lost_of(optimizer, p), local(p)
    if form is None or lost is None:
        begin()
        own.copy_(values)
        return
    high, low = form.encode(values.to(HOST, torch.float32).reshape(-1))
    begin()
    own.copy_(high.view(own.shape))
    local(lost).copy_(low.view(own.shape))
    optimizer.store.drop()


def note_versions(optimizer: RuleOptimizer, done: bool = True) -> None:
    """Note the version counters of parameters behind a step; ``done``: it is, and no update of its own is to come."""
    optimizer.versions = _versions_of(optimizer) if done and not optimizer.told_of_writes else None


def look_for_writes(optimizer: RuleOptimizer) -> None:
    """Warn, once in a process, of parameters that others have written since the last step."""
    if (before := optimizer.versions) is None or (now := _versions_of(optimizer)) is None or now == before:
        return
    params = [p for _, _, p in occurrences(optimizer)]
    written = [i for i, (a, b) in enumerate(zip(now, before, strict=False)) if a != b]
    optimizer.versions = None
    if len(now) == len(before) and any(lost_of(optimizer, params[i]) is not None for i in written):
        optimizer.told_of_writes = True
        warn_once(
            "written parameters",
            f"parameter {written[0]} was written since the last step, and what it had lost of the number before, half "
            "of its last bit at most, still counts; reset_master(p) forgets it, load_master() writes float32",
        )


def _versions_of(optimizer: RuleOptimizer) -> list[int] | None:
    try:
        return [*map(_version, chain.from_iterable(group["params"] for group in optimizer.param_groups))]
    except RuntimeError:  # tensors of inference mode count no versions
        return None
