"""Check that a state dict fits an optimizer, parameter by parameter; read those of bitsandbytes.  Changes nothing."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..common.names import kind_of
from ..formats.floating import AVERAGE, ENCODED, FLOAT32, NUMBERS, chosen_format, columns_of, known, real_dtype
from ..formats.format import Column, Format
from ..formats.int8 import OLD_ROOT2
from ..formats.sixteen import LOST, PARAM, REMAINDERS
from ..rules import UPDATES
from ..tables.tensors import (
    dense_like,
    has_memory,
    is_sharded,
    like_shard,
    local,
    misfit,
    placement_of,
    same_layout,
)
from .columns import Columns, blocks_along
from .rule_optimizer import Group, RuleOptimizer, number_names, occurrences
from .scalars import NumberSpec, beside_param, new_numbers

StateDict = dict[str, Any]
State = Mapping[Any, Mapping[str, Any]]


class NoStateDict(ValueError, KeyError):
    """This is no state dict of an optimizer.  Also a KeyError, as torch raises for the missing key."""

    __str__ = ValueError.__str__


class NoDict(TypeError, AttributeError):
    """Something else was given in place of a dict.  Also an AttributeError, which torch raises."""


def check_is_dict(state_dict: Any) -> None:
    """Raise NoDict for the path of a checkpoint, an optimizer and None."""
    if isinstance(state_dict, str | os.PathLike):
        raise NoDict(
            "a state dict of an optimizer is a dict, and this is a path; write "
            f"load_state_dict(torch.load({str(state_dict)!r}))"
        )
    if isinstance(state_dict, torch.optim.Optimizer):
        raise NoDict("a state dict of an optimizer is a dict, and this is an optimizer; pass its state_dict()")
    if state_dict is None:
        raise NoDict("a state dict of an optimizer is a dict, and this is None")


def check_form(state_dict: StateDict) -> None:
    """Raise TypeError or NoStateDict if this is no state dict of any optimizer."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict of an optimizer is a dict, and this is {kind_of(state_dict)}")
    groups = state_dict.get("param_groups")
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(groups, list | tuple):
        raise NoStateDict(
            f"this is no state dict of an optimizer: it should hold 'state' and 'param_groups', and has "
            f"{', '.join(map(repr, state_dict)) or 'nothing'}{_inner(state_dict)}"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise NoStateDict(f"loaded group {index} has no list of parameters")


def _inner(checkpoint: Mapping[Any, Any]) -> str:
    """Return the call to write where an item of a checkpoint is the state dict; "" where none is."""
    found = (key for key, item in checkpoint.items() if isinstance(item, Mapping) and "param_groups" in item)
    return "".join(f"; write load_state_dict(checkpoint[{key!r}])" for key in found)


class Source(NamedTuple):
    """Part of a loaded entry that a state is read from.

    Attributes:
        form: the format in which the state was saved; one of :data:`NUMBERS` stands for plain numbers of any dtype.
        columns: its columns by their keys.
    """

    form: Format
    columns: Mapping[str, Column]


@dataclass(frozen=True)
class Loaded:
    """A parameter, and what a state dict has for it: ``entry``, without values that are None.

    Attributes:
        group: its group, as loaded.
        key: its key in the state dict.
        numbers: names of its numbers.
        columns: those of its state.
    """

    param: torch.Tensor
    group: Group
    key: Any
    numbers: tuple[str, ...]
    columns: Columns
    entry: Mapping[str, Any]

    @functools.cached_property
    def like(self) -> torch.Tensor:
        """A tensor (it may be a meta tensor) with the strides that state gets: the parameter's, if its formats can."""
        return self.columns.walked_like({}, local(self.param))

    @functools.cached_property
    def sources(self) -> dict[str, Source]:
        """The source of each state, by its name; a state without all columns in the entry is left out."""
        encoded = () if is_sharded(self.param) or self.param.is_complex() else ENCODED
        found = {}
        for name, (own, _) in self.columns.states.items():
            forms = (own, FLOAT32, *encoded)
            sources = (Source(form, columns_of(form, name, self.param.dtype)) for form in forms)
            if source := next((each for each in sources if each.columns.keys() <= self.entry.keys()), None):
                found[name] = source
        return found

    def values(self, name: str) -> list[torch.Tensor]:
        """Return the tensors that a state is loaded from."""
        return [self.entry[key] for key in self.sources[name].columns]

    def is_copied(self, name: str) -> bool:
        """Whether a state is loaded as it is: in its own format, and its blocks lie where the optimizer has them."""
        form, _ = self.columns.states[name]
        if self.sources[name].form is not form:
            return False
        if form.block == 1:
            return True
        along = blocks_along(form, self.values(name), self.param)
        assert along is not None, "no column is missing"
        return same_layout(along.shape, along.stride(), dense_like(self.like).stride())


def has_old_codes(optimizer: RuleOptimizer) -> bool:
    """Return whether state is in codes that are loaded and no longer stored, as in a pickle of before."""
    ending = f".{OLD_ROOT2.columns[0].name}"
    entries = [optimizer.state.get(p) or {} for _, _, p in occurrences(optimizer)]
    return any(str(name).endswith(ending) for entry in entries for name in entry)


def members(optimizer: RuleOptimizer, state_dict: StateDict) -> Iterator[Loaded]:
    """Yield each parameter of ``optimizer``, whose groups are already the loaded ones, with its loaded entry."""
    state = state_dict["state"]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, (_, group, p) in zip(keys, occurrences(optimizer), strict=True):
        entry = state.get(key, {})
        if not isinstance(entry, Mapping):
            raise ValueError(f"loaded state of parameter {key} is {kind_of(entry)}, not a dict")
        numbers = number_names(optimizer, optimizer.update_of(group))
        columns = Columns.of(optimizer, optimizer.state_names(group), p, group) if entry else Columns()
        present = {name: value for name, value in entry.items() if value is not None}
        if present:
            _complete(optimizer, p, columns, numbers, present)
        yield Loaded(p, group, key, numbers, columns, present)


def _complete(
    optimizer: RuleOptimizer,
    p: torch.Tensor,
    columns: Columns,
    numbers: Sequence[str],
    present: dict[str, Any],
) -> None:
    """Add what only formats of parameters keep, if it was saved without: a count of steps, and what parameters lost."""
    if "step" in numbers and not optimizer.has_step:
        present.setdefault("step", 1.0)  # as of state that is there and not counted
    if present.keys().isdisjoint(LOST):
        for key in [key for key, of in columns.items() if of.form in REMAINDERS]:
            dtype = columns[key].column.dtype
            present[key] = like_shard(torch.zeros((), dtype=dtype, device="cpu").expand(local(p).shape), of=p)


def check_groups(optimizer: RuleOptimizer, before: Sequence[Mapping[str, Any]], state_dict: StateDict) -> None:
    """Raise ValueError if a loaded group lacks a hyperparameter it had ``before``, or a parameter appears twice."""
    for index, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        wanted = old.keys() - group.keys() - {"differentiable"}  # which torch adds to defaults with each load
        if absent := [name for name in optimizer.defaults if name in wanted]:
            raise ValueError(f"loaded group {index} has no {', '.join(absent)}: it is of another optimizer")
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(set(keys)) < len(keys):
        raise ValueError("the loaded groups name a parameter twice")


def check_state(optimizer: RuleOptimizer, everyone: Iterable[Loaded]) -> None:
    """Raise ValueError if a parameter has only part of the state that its rule needs, or state in wrong shapes.

    State of another optimizer is refused, too.  Beside complete state there may be other keys (:mod:`.extras`).
    """
    for member in everyone:
        if member.entry:
            _check_entry(optimizer, member)
            _check_lost(optimizer, member)
            if AVERAGE in member.entry and AVERAGE not in member.columns:
                raise ValueError(
                    f"loaded state of parameter {member.key} has {AVERAGE}, an average of the weights, and this "
                    f"optimizer makes none: give it after=pagedopt.ema(decay), or take {AVERAGE} out of each entry"
                )
            if others := _of_another(optimizer, member):
                raise ValueError(
                    f"loaded state of parameter {member.key} has {', '.join(others)}, which no rule of "
                    f"{type(optimizer).__name__} has: it is of another optimizer"
                )


def _check_lost(optimizer: RuleOptimizer, member: Loaded) -> None:
    """Raise ValueError if what a parameter has lost is loaded, and the optimizer does not keep it."""
    for form in REMAINDERS if PARAM not in member.columns.states else ():
        if (key := form.columns[0].key(PARAM)) in member.entry:
            raise ValueError(
                f"loaded state of parameter {member.key} has {key}, what it has lost in {form.of!r}. Here it is "
                f"{member.param.dtype} with param_format={optimizer.param_format!r}, and keeps none: take bfloat16 "
                f"parameters and param_format={form.of!r}, or load decoded_state_dict(), which has none"
            )


def _of_another(optimizer: RuleOptimizer, member: Loaded) -> list[str]:
    """Return the keys in an entry that are, together with the state of its rule, all state of another rule.

    Only of a rule that the optimizer lacks.  Other keys are no reason to think that the state is of another optimizer.
    """
    rules = optimizer.rules or (optimizer.rule_of(member.group),)
    own = {name for rule in rules for name in rule.inputs[2:]}
    for rule in UPDATES.values():
        names = rule.inputs[2:]
        own_names = {of.name for of in member.columns.values() if of.form not in REMAINDERS}
        if own_names and own_names < {*names}:
            more = {name: _keys_of(name, member.entry) for name in names if name not in own}
            if more and all(more.values()):
                return [key for keys in more.values() for key in keys]
    return []


def _keys_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the keys of an entry under which a state may be, in any format."""
    keys = {column.key(name) for form in (FLOAT32, *ENCODED) for column in form.columns}
    return [key for key in entry if key in keys]


def _check_entry(optimizer: RuleOptimizer, member: Loaded) -> None:
    needed = [key for name, (_, keys) in member.columns.states.items() if name not in member.sources for key in keys]
    if absent := [name for name in (*member.numbers, *needed) if name not in member.entry]:
        states = tuple({f"{member.columns[name].name}." for name in absent if name in member.columns})
        other = any(str(name).startswith(states) for name in member.entry if name not in member.columns)
        names = [name for name in member.entry if isinstance(name, str)]
        raise ValueError(
            f"loaded state of parameter {member.key} has no {', '.join(absent)}; it has {', '.join(names)}"
            + ("; it was saved in another state_format, whose decoded_state_dict() any format loads" if other else "")
            + (f"; an average begins with a copy: entry[{AVERAGE!r}] = p.detach().clone()" if AVERAGE in absent else "")
        )
    for name, value in member.entry.items():
        if isinstance(value, torch.Tensor) and not is_whole(value):
            raise ValueError(
                f"loaded {name} of parameter {member.key} does not hold its values: it is a meta tensor, or its file "
                "was cut off"
            )
    for name in member.numbers:
        _check_number(member, name)
    for name, (form, columns) in member.sources.items():
        for key, column in columns.items():
            what, value = f"loaded {key} of parameter {member.key}", member.entry[key]
            _check_column(what, value, form, column, member.param)
            if form in NUMBERS and (own := member.columns.get(key)) and own.free:
                said = chosen_format(optimizer.state_format_of(member.group), name)
                _check_precision(said is not None, what, value.dtype, own.column.dtype)


def _check_column(what: str, value: Any, form: Format, column: Column, p: torch.Tensor) -> None:
    """Raise ValueError if a value is no column of state of this format; plain numbers may have any dtype."""
    plain, asks = form in NUMBERS, f"format {form.name!r}"
    hints = {
        "placement": "; torch.distributed.checkpoint.state_dict.set_optimizer_state_dict() loads what was saved "
        "otherwise",
        "shape": f", an entry for {column.per} elements; it was saved with blocks of another size" * (column.per > 1),
        "dtype": f", as {asks} has it",
    }
    dtype, shaped_by = (None, "") if plain else (column.dtype, asks)
    if found := misfit(value, column.shape(p), dtype, shaped_by=shaped_by, placed=p, memory=False):
        raise ValueError(f"{what} {found.why}{hints.get(found.aspect, '')}")
    if plain and not known(real_dtype(value.dtype)):
        raise ValueError(f"{what} is {value.dtype}; state is a tensor of a floating-point type")
    if plain and value.is_complex() and not p.is_complex():
        raise ValueError(f"{what} is {value.dtype}, the parameter is real ({p.dtype})")


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
            f"{what} is {loaded} and would be rounded to {stored}, as no state_format says how to store state; "
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
    value, spec = member.entry[name], NumberSpec.of(member.group, member.param)
    if isinstance(value, torch.Tensor):
        dtype = torch.float32 if beside_param(member.group) else value.dtype
        return value.detach().to(spec.device, dtype, copy=True).reshape(())
    (number,) = new_numbers([spec])
    return number.copy_(torch.tensor(float(value), dtype=torch.float64, device="cpu"))


def reusable(optimizer: RuleOptimizer, before: State, member: Loaded, key: str) -> torch.Tensor | None:
    """Return the existing state tensor if a load can copy into it: it fits parameter, format and placement."""
    p, of = member.param, member.columns[key]
    old = before[p].get(key) if p in before else None
    if not of.fits(old, p) or old.dtype is not of.column.dtype or not optimizer.store.is_home(old):
        return None
    same_strides = local(old).stride() == of.column.like(member.like).stride()
    return old if same_strides or not local(p).numel() else None


# --- state of other libraries -----------------------------------------------------------------------------------------

#: bitsandbytes' names for Adam's moments, and torch's.
MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
#: Key of a dict in which bitsandbytes wraps the tensors of an entry, so that FSDP leaves them alone.
WRAP = "__bnb_optimizer_quant_state__"
#: Workspaces for clipping updates and gradients.
SCRATCH = {"unorm_vec", "gnorm_vec"}
#: Hyperparameters of AdEMAMix that every two-state optimizer carries.
UNUSED = {"alpha", "t_alpha", "t_beta3"}


def translate(state_dict: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return 32-bit state of bitsandbytes' Adam or AdamW, paged or not, as a state dict of ``torch.optim.AdamW``.

    It is a new dict over the same tensors, or ``state_dict`` itself if nothing in it comes from bitsandbytes: a
    parameter's entry with state of the optimizer's ``own`` names does not.

    Raises:
        ValueError: state is in 8 bits (of torchao: in 8 or 4), or its moments are not Adam's.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    keys = {key for group in groups for key in group["params"]}
    entries = {key: entry for key, entry in state.items() if key in keys}
    for key, entry in entries.items():
        _refuse_torchao(key, entry)
    foreign = {key: _translated(key, entry) for key, entry in entries.items() if _is_foreign(entry, own)}
    if not foreign:
        return state_dict
    return {
        **state_dict,
        "state": {key: foreign.get(key, entry) for key, entry in state.items()},
        "param_groups": [{k: v for k, v in group.items() if k not in UNUSED} for group in groups],
    }


def _refuse_torchao(key: Any, entry: Any) -> None:
    for name, value in entry.items() if isinstance(entry, Mapping) else ():
        if isinstance(value, torch.Tensor) and type(value).__module__.partition(".")[0] == "torchao":
            raise ValueError(
                f"loaded {name} of parameter {key} is torchao's {type(value).__name__}, which is not read. Expand it "
                f"first: {name} = {name}.dequantize()"
            )


def _is_foreign(entry: Any, own: Collection[str]) -> bool:
    return isinstance(entry, Mapping) and ("state1" in entry or WRAP in entry) and not any(n in entry for n in own)


def _translated(key: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    flat = {**{k: v for k, v in entry.items() if k != WRAP}, **entry.get(WRAP, {})}
    if any(isinstance(flat.get(name), torch.Tensor) and flat[name].dtype == torch.uint8 for name in MOMENTS):
        raise ValueError(
            f"loaded state of parameter {key} is that of an 8-bit optimizer of bitsandbytes, of which only 32-bit "
            "state is read. Expand it first: exp_avg = qmap1[state1.long()] times absmax1 of its block of 256 elements "
            "(bitsandbytes.functional.dequantize_blockwise), exp_avg_sq from state2 in the same way"
        )
    if "state1" not in flat or "state2" not in flat:
        raise ValueError(
            f"loaded state of parameter {key} is that of an optimizer of bitsandbytes with one moment; only Adam and "
            "AdamW are read"
        )
    return {MOMENTS.get(name, name): value for name, value in flat.items() if name not in SCRATCH}
