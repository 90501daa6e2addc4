"""Numbers of parameters: tensors of one number each, theirs who edit ``optimizer.state``, read and written in bulk.

Each parameter has its step count, where the optimizer keeps one, and the hyperparameters that its rule carries.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...formats.floating import SINGLES
from ...rules import Rule
from .rule_optimizer import Group, RuleOptimizer

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64] | slice
#: Tensors of one number each.
Numerals = Sequence[torch.Tensor]
#: What numbers will be, by address, once the launches prepared so far have run.
Ahead = dict[int, float]

_ALL = slice(None)


def number_names(optimizer: RuleOptimizer, rule: Rule) -> tuple[str, ...]:
    """Names of the numbers that a parameter has in its state, in torch's order."""
    return _number_names(optimizer.has_step, rule)


@functools.lru_cache(maxsize=256)
def _number_names(has_step: bool, rule: Rule) -> tuple[str, ...]:
    return ("step", *rule.carried) if has_step else tuple(rule.carried)


def beside_param(group: Group) -> bool:
    """Whether torch has the numbers of a group's parameters where these are, and not on the CPU."""
    return bool(group.get("fused") or group.get("capturable"))


class ScalarPlace(NamedTuple):
    """Where a number is, and in which dtype."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, group: Group, p: torch.Tensor) -> ScalarPlace:
        """As torch has the step count of a parameter (torch/optim/adam.py, "special device hosting for step")."""
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        device = p.device if beside_param(group) else torch.device("cpu")
        return cls(device, torch.float64 if wide else torch.float32)


@torch.inference_mode(False)  # they outlive the block in which they are made
def new_numbers(places: Sequence[ScalarPlace]) -> list[torch.Tensor]:
    """A zero for each place, with memory of its own."""
    made: dict[ScalarPlace, Iterator[torch.Tensor]] = {}
    for place, count in Counter(places).items():
        if place.device.type == "cpu" and count > 1:
            made[place] = iter(_zeros_here(place.dtype, count))
        else:
            made[place] = (torch.zeros((), dtype=place.dtype, device=place.device) for _ in range(count))
    return [next(made[place]) for place in places]


def _zeros_here(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    block = np.zeros(count, SINGLES[dtype])
    return [torch.frombuffer(block, dtype=dtype, count=1, offset=i * dtype.itemsize).view(()) for i in range(count)]


class ScalarState:
    """One number of each of some parameters, read and written where its tensor lies.

    It keeps no tensor alive: who reads or writes gives them, in the order of construction, where :attr:`takes_tensors`
    says so.  That they are the very same ones, and lie where they did, is for the caller to know.

    Args:
        tensors: the numbers, one element each, on any device.
        shared: addresses of numbers that stand for several parameters.  As in torch's loop, each of these changes it.
    """

    __slots__ = ("_away", "_mirror", "_others", "_whole", "_windows", "count")

    _more = 0.0

    def __init__(self, tensors: Numerals, shared: set[int]) -> None:
        self.count = len(tensors)
        windows: list[tuple[Rows, npt.NDArray[np.floating], Rows]] = []
        at = np.array([t.data_ptr() for t in tensors], np.uint64)
        left = np.ones(len(tensors), bool)
        for dtype, kind in SINGLES.items():
            size = dtype.itemsize
            plain = [
                t.device.type == "cpu" and t.dtype is dtype and address not in shared and address % size == 0
                for t, address in zip(tensors, at.tolist(), strict=True)
            ]
            rows = np.flatnonzero(plain)
            if len(rows):
                left[rows] = False
                some: Rows = _ALL if len(rows) == len(tensors) else rows
                windows.append((some, *_window(at[rows].astype(np.int64), kind)))
        self._windows = tuple(windows)
        away = np.flatnonzero([
            t.device.type != "cpu" and t.dtype in SINGLES and address not in shared
            for t, address in zip(tensors, at.tolist(), strict=True)
        ])  # fmt: skip
        left[away] = False
        self._away = away
        self._mirror = (
            DeviceMirror([tensors[row].dtype is torch.float32 for row in away.tolist()]) if len(away) else None
        )
        self._others = tuple(np.flatnonzero(left).tolist())
        # All of them, where they lie one behind the other, as numbers do that were made together.
        in_order = len(windows) == 1 and isinstance(windows[0][0], slice) and isinstance(windows[0][2], slice)
        self._whole = windows[0][1] if in_order else None

    @property
    def takes_tensors(self) -> bool:
        """Whether tensors are looked at: others are read and written where they lie."""
        return bool(self._others) or self._mirror is not None

    def read(self, tensors: Numerals, absent: Sequence[int], ahead: Ahead) -> Values | float:
        """What a rule takes: the number of each parameter, as it will be, or one for all where they are the same.

        Args:
            tensors: the numbers.
            absent: parameters that take no step now.
            ahead: what launches prepared before have announced.
        """
        if self._whole is not None:
            now = self._whole.tobytes()
            if now == now[: self._whole.itemsize] * self.count:
                first = float(self._whole[0])
                return first + self._more if self._more else first  # -0.0 + 0.0 is 0.0
        out = np.empty(self.count, np.float64)
        for rows, window, places in self._windows:
            out[rows] = window[places]
        if self._mirror:
            out[self._away] = self._mirror.read([tensors[row] for row in self._away.tolist()])
        if self._more:
            out += self._more
        if self._others:
            self._read_others(out, tensors, absent, ahead)
        return out

    def _read_others(self, out: Values, tensors: Numerals, absent: Sequence[int], ahead: Ahead) -> None:
        for row in self._others:
            out[row] = ahead.get(tensors[row].data_ptr(), float(tensors[row]))

    def announce(self, tensors: Numerals, coming: Values, absent: Sequence[int], ahead: Ahead) -> None:
        """Enter what is coming into ``ahead``; no two parameters here have the same number."""
        skipped = set(absent) if self._others else ()
        for row in self._others:
            if row not in skipped:
                ahead[tensors[row].data_ptr()] = float(coming[row])

    def write(self, tensors: Numerals, coming: Values | float, absent: Sequence[int]) -> None:
        """Write what is coming, for each parameter or for all, where a parameter is not absent."""
        if self._whole is not None and not absent:
            self._whole[:] = coming
            return
        coming = np.broadcast_to(coming, self.count)
        present = np.ones(len(coming), bool)
        present[list(absent)] = False
        for rows, window, places in self._windows:
            window[places] = np.where(present[rows], coming[rows], window[places])
        if self._mirror:
            rows = self._away
            self._mirror.write([tensors[row] for row in rows.tolist()], coming[rows], present[rows])
        for row in self._others:
            if present[row]:
                tensors[row].detach().fill_(float(coming[row]))


class DeviceMirror:
    """Numbers on devices, known here too: read where somebody else has written them, and never waited for otherwise.

    Args:
        narrow: of each number, whether it is float32 and not float64.  Who writes one shows in its version counter.
    """

    __slots__ = ("_narrow", "_values", "_versions")

    def __init__(self, narrow: Sequence[bool]) -> None:
        self._narrow = np.array(narrow, bool)
        self._values: Values = np.empty(0)
        self._versions: list[int] | None = None

    def read(self, tensors: Numerals) -> Values:
        """The numbers; waits for the device if they have been written by others."""
        if self._versions is None or self._versions != _versions(tensors):
            where = {t.device for t in tensors}
            self._values = np.empty(len(tensors), np.float64)
            for device in where:
                rows = [i for i, t in enumerate(tensors) if t.device == device]
                self._values[rows] = torch.stack([tensors[i].detach().double().view(()) for i in rows]).cpu().numpy()
            self._versions = _versions(tensors)
        return self._values

    def write(self, tensors: Numerals, values: Values, chosen: npt.NDArray[np.bool_]) -> None:
        """Write those that are ``chosen``, on the current streams, in one launch where each is one more than it was."""
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return
        new, tensors = values[rows], [t.detach() for t in tensors]  # whose version counters are theirs
        if (new == self._values[rows] + 1).all():
            torch._foreach_add_([tensors[i] for i in rows], 1.0)
        else:
            for value in np.unique(new):
                some = [tensors[i] for i in rows[(new == value) | ((new != new) & (value != value))]]
                torch._foreach_zero_(some)
                torch._foreach_add_(some, float(value))
        self._values = self._values.copy()
        self._values[rows] = np.where(self._narrow[rows], new.astype(np.float32), new)
        self._versions = _versions(tensors)


def _versions(tensors: Numerals) -> list[int] | None:
    """The version counters; None: there are none (tensors of ``torch.inference_mode``)."""
    return None if any(t.is_inference() for t in tensors) else [t._version for t in tensors]


class StepCounts(ScalarState):
    """Step counts; parameters of one launch may have the same one."""

    __slots__ = ()

    _more = 1.0  # a rule takes the number of the coming step

    def _read_others(self, out: Values, tensors: Numerals, absent: Sequence[int], ahead: Ahead) -> None:
        """What is read is announced, too: parameters of one launch may have the same one."""
        away = set(absent)
        for row in self._others:
            address = tensors[row].data_ptr()
            out[row] = ahead.get(address, float(tensors[row])) + 1
            if row not in away:
                ahead[address] = float(out[row])


class UnsavedStepCounts(ScalarState):
    """Step counts that stand in no state.

    Args:
        behind: how many steps each parameter has taken.
    """

    __slots__ = ("_values",)

    def __init__(self, behind: Sequence[float]) -> None:
        super().__init__((), set())
        self._values: Values = np.array(behind, np.float64)

    def read(self, tensors: Numerals, absent: Sequence[int], ahead: Ahead) -> Values | float:
        """What a rule takes: the number of each parameter's coming step."""
        return self._values + 1

    def write(self, tensors: Numerals, coming: Values | float, absent: Sequence[int]) -> None:
        """Keep the numbers of all parameters but those that are absent."""
        coming = np.broadcast_to(coming, len(self._values))
        if absent:
            coming = coming.copy()
            coming[absent] = self._values[absent]
        self._values = coming


def _window(addresses: npt.NDArray[np.int64], kind: type) -> tuple[npt.NDArray[np.floating], Rows]:
    """Memory from the first address to the last as one array, and where in it the numbers at the addresses are.

    What lies between them is never touched, and need not be memory at all.
    """
    size = np.dtype(kind).itemsize
    first, last = int(addresses.min()), int(addresses.max())
    places = (addresses - first) // size
    in_order = bool((places == np.arange(len(places))).all())  # as those are that were made together
    return memory_at(first, last - first + size, kind), _ALL if in_order else places


def memory_at(address: int, nbytes: int, dtype: type) -> npt.NDArray[Any]:
    """Memory of this process as an array, which does not keep it alive."""
    if not nbytes:
        return np.empty(0, dtype)
    return np.frombuffer(_bytes(nbytes.bit_length()).from_address(address), dtype, nbytes // np.dtype(dtype).itemsize)


@functools.cache
def _bytes(bits: int) -> Any:
    """ctypes takes longer to make a type of arrays than all else here, and leaves memory behind: one does for many."""
    return ctypes.c_char * (1 << bits)
