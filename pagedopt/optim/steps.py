"""Numbers of parameters: tensors of one number each, theirs who edit ``optimizer.state``, read and written in bulk.

Each parameter has its step count, where the optimizer keeps one, and the hyperparameters that its rule carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import SINGLES
from ..rules import Rule
from ..tables.addresses import memory_at
from .owner import Group, Owner

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64] | slice
#: What numbers will be, by address, once the launches prepared so far have run.
Ahead = dict[int, float]

_ALL = slice(None)
_NOTHING: Values = np.empty(0)


def number_names(optimizer: Owner, rule: Rule) -> tuple[str, ...]:
    """Names of the numbers that a parameter has in its state, in torch's order."""
    return ("step", *rule.carried) if optimizer.has_step else tuple(rule.carried)


def beside_param(group: Group) -> bool:
    """Whether torch has the numbers of a group's parameters where these are, and not on the CPU."""
    return bool(group.get("fused") or group.get("capturable"))


class Place(NamedTuple):
    """Where a number is, and in which dtype."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, group: Group, p: torch.Tensor) -> Place:
        """As torch has the step count of a parameter (torch/optim/adam.py, "special device hosting for step")."""
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        device = p.device if beside_param(group) else torch.device("cpu")
        return cls(device, torch.float64 if wide else torch.float32)


@torch.inference_mode(False)  # they outlive the block in which they are made
def new_numbers(places: Sequence[Place]) -> list[torch.Tensor]:
    """A zero for each place, with memory of its own."""
    made: dict[Place, Iterator[torch.Tensor]] = {}
    for place, count in Counter(places).items():
        if place.device.type == "cpu" and count > 1:
            made[place] = iter(_zeros_here(place.dtype, count))
        else:
            made[place] = (torch.zeros((), dtype=place.dtype, device=place.device) for _ in range(count))
    return [next(made[place]) for place in places]


def _zeros_here(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    block = np.zeros(count, SINGLES[dtype])
    return [torch.frombuffer(block, dtype=dtype, count=1, offset=i * dtype.itemsize).view(()) for i in range(count)]


class Numbers:
    """One number of each of some parameters, as it is when asked.

    Args:
        tensors: the numbers, one element each, on any device.
        shared: addresses of numbers that stand for several parameters.  As in torch's loop, each of these changes it.

    Attributes:
        coming: the numbers as the launch that is prepared will leave them.
    """

    __slots__ = ("_away", "_mirror", "_others", "_tensors", "_windows", "coming")

    def __init__(self, tensors: Sequence[torch.Tensor], shared: set[int]) -> None:
        self.coming = _NOTHING
        self._tensors = tuple(tensors)  # kept, as their memory is read without them
        windows: list[tuple[Rows, npt.NDArray[np.floating], Rows]] = []
        at = np.array([t.data_ptr() for t in tensors], np.int64)
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
                windows.append((some, *_window(at[rows], kind)))
        self._windows = tuple(windows)
        away = np.flatnonzero([
            t.device.type != "cpu" and t.dtype in SINGLES and address not in shared
            for t, address in zip(tensors, at.tolist(), strict=True)
        ])  # fmt: skip
        left[away] = False
        self._away = (away, Mirror([tensors[row] for row in away.tolist()])) if len(away) else None
        self._others = tuple([(row, tensors[row]) for row in np.flatnonzero(left).tolist()])

    def read(self, absent: Sequence[int], ahead: Ahead) -> Values:
        """What a rule takes: the number of each parameter, as it will be.

        Args:
            absent: parameters that take no step now.
            ahead: what launches prepared before have announced.
        """
        out = np.empty(len(self._tensors), np.float64)
        for rows, window, places in self._windows:
            out[rows] = window[places]
        if self._away:
            away, mirror = self._away
            out[away] = mirror.read()
        for row, tensor in self._others:
            number = float(tensor)
            out[row] = ahead.get(tensor.data_ptr(), number)
        return out

    def announce(self, absent: Sequence[int], ahead: Ahead) -> None:
        """Enter what is coming into ``ahead``; no two parameters here have the same number."""
        skipped = set(absent) if self._others else ()
        for row, tensor in self._others:
            if row not in skipped:
                ahead[tensor.data_ptr()] = float(self.coming[row])

    def write(self, absent: Sequence[int]) -> None:
        """Write what was coming for all parameters but those that are absent."""
        values, self.coming = self.coming, _NOTHING
        if not absent and not self._others and not self._away:
            for rows, window, places in self._windows:
                window[places] = values[rows]
            return
        present = np.ones(len(values), bool)
        present[list(absent)] = False
        for rows, window, places in self._windows:
            window[places] = np.where(present[rows], values[rows], window[places])
        if self._away:
            away, mirror = self._away
            mirror.write(values[away], present[away])
        for row, tensor in self._others:
            if present[row]:
                tensor.detach().fill_(float(values[row]))


class Mirror:
    """Numbers on devices, known here too: read where somebody else has written them, and never waited for otherwise.

    Args:
        tensors: the numbers, one element each, float32 or float64.  Who writes one shows in its version counter.
    """

    __slots__ = ("_narrow", "_tensors", "_values", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [t.detach() for t in tensors]  # whose version counters are theirs
        self._narrow = np.array([t.dtype is torch.float32 for t in tensors], bool)
        self._values: Values = np.empty(0)
        self._versions: list[int] | None = None

    def read(self) -> Values:
        """The numbers; waits for the device if they have been written by others."""
        if self._versions is None or self._versions != self._now():
            where = {t.device for t in self._tensors}
            self._values = np.empty(len(self._tensors), np.float64)
            for device in where:
                rows = [i for i, t in enumerate(self._tensors) if t.device == device]
                self._values[rows] = torch.stack([self._tensors[i].double().view(()) for i in rows]).cpu().numpy()
            self._versions = self._now()
        return self._values

    def write(self, values: Values, chosen: npt.NDArray[np.bool_]) -> None:
        """Write those that are ``chosen``, on the current streams, in one launch where each is one more than it was."""
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return
        new = values[rows]
        if (new == self._values[rows] + 1).all():
            torch._foreach_add_([self._tensors[i] for i in rows], 1.0)
        else:
            for value in np.unique(new):
                some = [self._tensors[i] for i in rows[(new == value) | ((new != new) & (value != value))]]
                torch._foreach_zero_(some)
                torch._foreach_add_(some, float(value))
        self._values = self._values.copy()
        self._values[rows] = np.where(self._narrow[rows], new.astype(np.float32), new)
        self._versions = self._now()

    def _now(self) -> list[int] | None:
        """The version counters; None: there are none (tensors of ``torch.inference_mode``)."""
        return None if any(t.is_inference() for t in self._tensors) else [t._version for t in self._tensors]


class Steps(Numbers):
    """Step counts; parameters of one launch may have the same one."""

    __slots__ = ()

    def read(self, absent: Sequence[int], ahead: Ahead) -> Values:
        """What a rule takes: the number of each parameter's coming step.  It is announced, too."""
        out = super().read(absent, {})
        out += 1
        if not self._others:
            return out
        away = set(absent)
        for row, tensor in self._others:
            address = tensor.data_ptr()
            if address in ahead:
                out[row] = ahead[address] + 1
            if row not in away:
                ahead[address] = float(out[row])
        return out


class KeptSteps(Numbers):
    """Step counts that stand in no state.

    Args:
        behind: how many steps each parameter has taken.
    """

    __slots__ = ("_values",)

    def __init__(self, behind: Sequence[float]) -> None:
        super().__init__((), set())
        self._values: Values = np.array(behind, np.float64)

    def read(self, absent: Sequence[int], ahead: Ahead) -> Values:
        """What a rule takes: the number of each parameter's coming step."""
        return self._values + 1

    def write(self, absent: Sequence[int]) -> None:
        """Keep the numbers of all parameters but those that are absent."""
        values, self.coming = self.coming, _NOTHING
        if absent:
            values[absent] = self._values[absent]
        self._values = values


def _window(addresses: npt.NDArray[np.int64], kind: type) -> tuple[npt.NDArray[np.floating], Rows]:
    """Memory from the first address to the last as one array, and where in it the numbers at the addresses are.

    What lies between them is never touched, and need not be memory at all.
    """
    size = np.dtype(kind).itemsize
    first, last = int(addresses.min()), int(addresses.max())
    places = (addresses - first) // size
    in_order = bool((places == np.arange(len(places))).all())  # as those are that were made together
    return memory_at(first, last - first + size, kind), _ALL if in_order else places
