"""The float32 numbers that bfloat16 parameters stand for with what they have lost (``param_format``): masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter

import torch

from ..formats.sixteen import PARAM
from ..system.warn import warn_once
from ..tables.tensors import local, misfit
from .columns import HOST, decode
from .plan import preallocate
from .rule_optimizer import RuleOptimizer, check_whole, occurrences

Named = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
_version = attrgetter("_version")


def master(optimizer: RuleOptimizer, p: torch.Tensor) -> torch.Tensor:
    """See :meth:`PagedOptimizer.master`."""
    check_whole(optimizer)
    _check_own(optimizer, [p])
    return _master(optimizer, p, p.device)


def master_state_dict(optimizer: RuleOptimizer, named: Named) -> dict[str, torch.Tensor]:
    """See :meth:`PagedOptimizer.master_state_dict`."""
    check_whole(optimizer)
    return {name: _master(optimizer, p, HOST) for name, p in dict(named).items()}


@torch.no_grad()
def load_master(optimizer: RuleOptimizer, values: Mapping[str, torch.Tensor], named: Named) -> None:
    """See :meth:`PagedOptimizer.load_master`."""
    check_whole(optimizer)
    params = dict(named)
    if unknown := [name for name in values if name not in params]:
        raise ValueError(f"no parameter is called {', '.join(map(repr, unknown))}; there are {', '.join(params)}")
    given = {name: (params[name], each) for name, each in values.items()}
    _check_own(optimizer, [p for p, _ in given.values()])
    for name, (p, each) in given.items():
        if found := misfit(each, p.shape, placed=p, memory=False):
            raise ValueError(f"the master of {name} {found.why}")
    late = {id(p) for p, _ in given.values() if not optimizer.state.get(p)}
    for index, group in enumerate(optimizer.param_groups):
        if any(id(p) in late for p in group["params"]):
            preallocate(optimizer, index)
    made = optimizer.preallocated
    optimizer.state.update({p: made.pop(p) for p, _ in given.values() if p in made})
    for p, each in given.values():
        _set(optimizer, p, local(each).detach())
    optimizer.versions = None


def reset_master(optimizer: RuleOptimizer, p: torch.Tensor) -> None:
    """See :meth:`PagedOptimizer.reset_master`."""
    check_whole(optimizer)
    _check_own(optimizer, [p])
    if (lost := _lost(optimizer, p)) is not None:
        lost.zero_()
        optimizer.store.drop()


def _check_own(optimizer: RuleOptimizer, params: Iterable[torch.Tensor]) -> None:
    own = {id(p) for _, _, p in occurrences(optimizer)}
    for p in params:
        if id(p) not in own:
            raise ValueError(f"a tensor of shape {tuple(p.shape)} is no parameter of this optimizer")


def _lost(optimizer: RuleOptimizer, p: torch.Tensor) -> torch.Tensor | None:
    """Return the column of what a parameter has lost; None: it has none so far."""
    form = optimizer.form_of(p)
    if form is None or form.remainder is None:
        return None
    found: torch.Tensor | None = (optimizer.state.get(p) or {}).get(form.columns[1].key(PARAM))
    return found


def _master(optimizer: RuleOptimizer, p: torch.Tensor, device: torch.device) -> torch.Tensor:
    form, lost = optimizer.form_of(p), _lost(optimizer, p)
    if form is not None and lost is not None:
        return decode(form, [p.detach(), lost], p, device)
    return p.detach().to(device, p.dtype if p.dtype.itemsize >= 4 else torch.float32, copy=True)


def _set(optimizer: RuleOptimizer, p: torch.Tensor, values: torch.Tensor) -> None:
    """Write numbers into a parameter and what it loses, through the host: a device needs no room for them."""
    form, lost, own = optimizer.form_of(p), _lost(optimizer, p), local(p)
    if form is None or lost is None:
        own.copy_(values)
        return
    high, low = form.encode(values.to(HOST, torch.float32).reshape(-1))
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
    if len(now) == len(before) and any(_lost(optimizer, params[i]) is not None for i in written):
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
