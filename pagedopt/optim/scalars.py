"""Numbers of a rule: hyperparameters, as groups give them, and parameters' own (as step counts), as state has them."""

from __future__ import annotations

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import SINGLES
from ..rules import Rule

Group = dict[str, Any]


def scalars_of(
    rule: Rule, group: Mapping[str, Any], needed: Collection[str] = (), on_device: bool = False
) -> dict[str, Any]:
    """Return the rule's hyperparameters that ``group`` has, by name, as doubles; reads tensors of one element.

    A tuple with a plural name gives its items by number: ``betas`` is ``beta1``, ``beta2``.  A hyperparameter whose
    default is a bool gets the truth value, and one whose default is NaN gets that for None.

    Args:
        needed: names that the group must have.
        on_device: return CUDA tensors as they are, unread.

    Raises:
        KeyError: one of the ``needed`` names is missing (as torch).
        ValueError: a tuple has another length than the rule takes (as torch).
        TypeError: a value is not a number.
    """
    found = {}
    for name, plural, item, length, is_switch in _sources(rule):
        if name in group:
            value = group[name]
        elif plural in group:
            value = group[plural]
            if length and len(value) != length:
                raise ValueError(f"{plural} is {value}; rule {rule.name!r} takes {length} of them")
            value = value[item]
        elif name in needed or plural in needed:
            raise KeyError(name if name in needed else plural)
        else:
            continue
        if value is None and math.isnan(rule.defaults.get(name, 0)):
            value = math.nan
        if type(value) is not float and not (on_device and isinstance(value, torch.Tensor) and value.is_cuda):
            value = (1.0 if value else 0.0) if is_switch else number_of(name, value)
        found[name] = value
    return found


def scalar_of(rule: Rule, name: str, group: Mapping[str, Any]) -> Any:
    """Return one hyperparameter as ``group`` has it, a number or a tensor; the rule's default if it has none."""
    if name in group:
        return group[name]
    source = next((each for each in _sources(rule) if each.name == name), None)
    if source is None or source.plural not in group:
        return rule.defaults.get(name)
    return group[source.plural][source.item]


def number_of(name: str, value: Any) -> float:
    """Return a group's value as a double; TypeError for None and texts, RuntimeError for large tensors (as torch)."""
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r}{'' if value is None else ', a text'}; give a number")
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def tuple_of_betas(given: Any, like: tuple[float, ...] = (0.9, 0.999)) -> Any:
    """Return a sequence of numbers or tensors as a tuple, as torch's AdamW does; NumPy's numbers become Python's.

    How many there are is not looked at.  Raises TypeError for what is no sequence, and for an item that is no number.
    """
    try:
        if isinstance(given, str | bytes | Mapping | Set):
            raise TypeError
        betas = tuple([beta.item() if isinstance(beta, np.generic | np.ndarray) else beta for beta in given])
        for beta in betas:
            if not isinstance(beta, torch.Tensor):
                number_of("betas", beta)
    except (TypeError, ValueError):
        many = "two" if len(like) == 2 else "three"
        raise TypeError(f"betas is {given!r}; give {many} numbers, as betas={like}") from None
    return betas


@functools.cache
def group_keys(rule: Rule) -> frozenset[str]:
    """Return the keys under which groups may have the rule's hyperparameters: ``beta1``, and ``betas``."""
    return frozenset(key for source in _sources(rule) for key in (source.name, source.plural) if key)


class _Source(NamedTuple):
    """Where groups have a hyperparameter: under ``name``, or in a tuple.

    Attributes:
        plural, item: the tuple's name and the index in it; "" if there is no tuple.
        length: to be compared with the tuple's; 0: another item does that, or the rule takes only some items.
        is_switch: whether it is a bool.
    """

    name: str
    plural: str
    item: int
    length: int
    is_switch: bool


@functools.cache
def _sources(rule: Rule) -> list[_Source]:
    """Return the source of each hyperparameter that groups hold."""
    stems = {n: n.rstrip("0123456789") for n in rule.scalars if n != "step" and n not in rule.carried}
    found = []
    for name, stem in stems.items():
        numbers = {int(n[len(stem) :]) for n, of in stems.items() if of == stem != n}
        plural, item = (f"{stem}s", int(name[len(stem) :]) - 1) if stem != name else ("", 0)
        checks = item == 0 and len(numbers) > 1 and numbers == {*range(1, len(numbers) + 1)}
        is_switch = isinstance(rule.defaults.get(name), bool)
        found.append(_Source(name, plural, item, len(numbers) if checks else 0, is_switch))
    return found


Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64] | slice
#: Tensors of one element each.
NumberTensors = Sequence[torch.Tensor]
#: Address of a number -> the value it will have after the launches of this step that are prepared so far.
Ahead = dict[int, float]

_ALL = slice(None)


def beside_param(group: Group) -> bool:
    """Return whether torch puts numbers of this group's parameters on their device, and not on the CPU."""
    return bool(group.get("fused") or group.get("capturable"))


class NumberSpec(NamedTuple):
    """Device and dtype of a number."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, group: Group, p: torch.Tensor) -> NumberSpec:
        """Return device and dtype of torch's step count (torch/optim/adam.py, "special device hosting for step")."""
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        device = p.device if beside_param(group) else torch.device("cpu")
        return cls(device, torch.float64 if wide else torch.float32)


@torch.inference_mode(False)  # state outlives the user's inference_mode block, and inference tensors are read-only
def new_numbers(specs: Sequence[NumberSpec]) -> list[torch.Tensor]:
    """Return a zero for each of ``specs``, each a tensor with a storage of its own."""
    made: dict[NumberSpec, Iterator[torch.Tensor]] = {}
    for spec, count in Counter(specs).items():
        if spec.device.type == "cpu" and count > 1:
            made[spec] = _adjacent_zeros(spec.dtype, count)
        else:
            made[spec] = (torch.zeros((), dtype=spec.dtype, device=spec.device) for _ in range(count))
    return [next(made[spec]) for spec in specs]


def _adjacent_zeros(dtype: torch.dtype, count: int) -> Iterator[torch.Tensor]:
    """Yield zeros that lie one behind the other: :class:`ScalarState` then reads all of them as one array."""
    block = np.zeros(count, SINGLES[dtype])
    return (torch.frombuffer(block, dtype=dtype, count=1, offset=i * dtype.itemsize).view(()) for i in range(count))


class ScalarState:
    """One number per parameter.  Keeps no tensor alive: callers pass the same tensors, at the same addresses, again.

    What is read is what memory holds now: a collective of ``torch.distributed`` and a write through ``.data`` raise no
    version counter.  Numbers on a device are waited for, unless a ``DeviceNumbers`` leaves them there.

    ``shared`` are addresses of numbers that several parameters have in common; as in torch's loop, each changes it.
    """

    __slots__ = ("_others", "_whole", "_windows", "count", "takes_tensors")

    #: What :meth:`read` adds to each number.
    _added = 0.0

    def __init__(self, tensors: NumberTensors, shared: set[int]) -> None:
        self.count = len(tensors)
        addresses = [t.data_ptr() for t in tensors]
        by_dtype: dict[torch.dtype, list[int]] = {}
        others = []
        for row, (t, address) in enumerate(zip(tensors, addresses, strict=True)):
            if t.device.type != "cpu" or t.dtype not in SINGLES or address in shared or address % t.dtype.itemsize:
                others.append(row)
            else:
                by_dtype.setdefault(t.dtype, []).append(row)
        windows: list[tuple[Rows, npt.NDArray[np.floating], Rows]] = []
        for dtype, rows in by_dtype.items():
            some: Rows = _ALL if len(rows) == self.count else np.array(rows)
            windows.append((some, *_window([addresses[row] for row in rows], dtype)))
        #: For each dtype on the CPU: (rows, an array over their memory, the position of each row in it).
        self._windows = tuple(windows)
        self._others = tuple(others)
        #: Whether methods use the tensors they are given.  Else all numbers are reached through their addresses.
        self.takes_tensors = bool(others)
        in_order = len(windows) == 1 and windows[0][0] is windows[0][2] is _ALL
        #: All numbers as one array, if they lie one behind the other, as :func:`new_numbers` makes them.
        self._whole = windows[0][1] if in_order else None

    def addresses(self) -> tuple[npt.NDArray[np.int64], int] | None:
        """Return the address of each number, and its bytes; None: some are not on the CPU, or of several dtypes."""
        if self._others or len(self._windows) != 1:
            return None
        _, window, positions = self._windows[0]
        steps = np.arange(self.count) if isinstance(positions, slice) else positions
        return window.ctypes.data + window.itemsize * steps, window.itemsize

    def read(self, tensors: NumberTensors, absent: Sequence[int], ahead: Ahead) -> Values | float:
        """Return the numbers for a rule: one per parameter, or one float if all are the same.

        ``absent`` are rows that take no step.  Numbers that earlier launches of the step will write are in ``ahead``.
        """
        if self._whole is not None:
            now = self._whole.tobytes()
            if now == now[: self._whole.itemsize] * self.count:
                first = float(self._whole[0])
                return first + self._added if self._added else first  # -0.0 + 0.0 would lose the sign
        out = np.empty(self.count, np.float64)
        for rows, window, positions in self._windows:
            out[rows] = window[positions]
        if self._added:
            out += self._added
        if self._others:
            self._read_others(out, tensors, absent, ahead)
        return out

    def _read_others(self, out: Values, tensors: NumberTensors, absent: Sequence[int], ahead: Ahead) -> None:
        for row in self._others:
            out[row] = ahead.get(tensors[row].data_ptr(), float(tensors[row]))

    def announce(self, tensors: NumberTensors, coming: Values, absent: Sequence[int], ahead: Ahead) -> None:
        """Enter the numbers after this launch into ``ahead``.  No two parameters here share a number."""
        for row in set(self._others).difference(absent):
            ahead[tensors[row].data_ptr()] = float(coming[row])

    def write(self, tensors: NumberTensors, coming: Values | float, absent: Sequence[int]) -> None:
        """Write new numbers, one per parameter or one for all, except for absent parameters."""
        if self._whole is not None and not absent:
            self._whole[:] = coming
            return
        coming = np.broadcast_to(coming, self.count)
        present = np.ones(len(coming), bool)
        present[list(absent)] = False
        for rows, window, positions in self._windows:
            window[positions] = np.where(present[rows], coming[rows], window[positions])
        for row in self._others:
            if present[row]:
                tensors[row].detach().fill_(float(coming[row]))


class StepCounts(ScalarState):
    """Step counts.  Parameters of one launch may share one."""

    __slots__ = ()

    _added = 1.0  # a rule takes the step count after this step

    def _read_others(self, out: Values, tensors: NumberTensors, absent: Sequence[int], ahead: Ahead) -> None:
        """Also enter each count into ``ahead``, so that the next parameter that shares it gets the count after."""
        skipped = set(absent)
        for row in self._others:
            address = tensors[row].data_ptr()
            out[row] = ahead.get(address, float(tensors[row])) + 1
            if row not in skipped:
                ahead[address] = float(out[row])


class UnsavedStepCounts(ScalarState):
    """Step counts of an optimizer whose state has none.  ``behind``: the steps that each parameter has taken."""

    __slots__ = ("behind",)

    def __init__(self, behind: Sequence[float]) -> None:
        super().__init__((), set())
        self.behind: Values = np.array(behind, np.float64)

    def read(self, tensors: NumberTensors, absent: Sequence[int], ahead: Ahead) -> Values | float:
        """Return each parameter's step count after this step."""
        return self.behind + 1

    def write(self, tensors: NumberTensors, coming: Values | float, absent: Sequence[int]) -> None:
        """Store the new counts, except for absent parameters."""
        absent_values = self.behind[list(absent)]
        self.behind[:] = coming
        self.behind[list(absent)] = absent_values

    def addresses(self) -> tuple[npt.NDArray[np.int64], int]:
        """Return the address of each count, and its bytes."""
        return self.behind.ctypes.data + self.behind.itemsize * np.arange(len(self.behind)), self.behind.itemsize


def _window(addresses: list[int], dtype: torch.dtype) -> tuple[npt.NDArray[np.floating], Rows]:
    """Return (array from the first to the last address, position of each address in it); it keeps no memory alive."""
    # Only the positions may be used: between them there may be other data, or no memory at all.
    first, size = min(addresses), dtype.itemsize
    count = (max(addresses) - first) // size + 1
    array = np.frombuffer(_bytes((count * size).bit_length()).from_address(first), SINGLES[dtype], count)
    positions = (np.array(addresses, np.int64) - first) // size
    return array, _ALL if (positions == np.arange(len(positions))).all() else positions


@functools.cache
def _bytes(bits: int) -> Any:
    """Return a ctypes array type of 2**bits bytes.  Cached: making one is slow, and ctypes never frees it."""
    return ctypes.c_char * (1 << bits)
