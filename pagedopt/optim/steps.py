"""Numbers of parameters: tensors of one number each, theirs who edit ``optimizer.state``, read and written in bulk.

Each parameter has its step count, where the optimizer keeps one, and the hyperparameters that its rule carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import SINGLES
from ..rules import Rule
from ..tables.addresses import memory_at
from .owner import Owner

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64] | slice
#: What numbers will be, by address, once the launches prepared so far have run.
Ahead = dict[int, float]


def number_names(optimizer: Owner, rule: Rule) -> tuple[str, ...]:
    """Names of the numbers that a parameter has in its state, in torch's order."""
    return ("step", *rule.carried) if optimizer.has_step else tuple(rule.carried)


def new_numbers(count: int) -> list[torch.Tensor]:
    """Zeros, each a CPU tensor with memory of its own, in the dtype that torch's optimizers take for step counts."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    block = np.zeros(count, SINGLES[dtype])
    return [torch.frombuffer(block, dtype=dtype, count=1, offset=i * dtype.itemsize).view(()) for i in range(count)]


class Numbers:
    """One number of each of some parameters, as it is when asked.

    Args:
        tensors: the numbers, one element each, on any device.
        shared: addresses of numbers that stand for several parameters.  As in torch's loop, each of these changes it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], shared: set[int]) -> None:
        self._tensors = tuple(tensors)  # kept, as their memory is read without them
        self._windows: list[tuple[Rows, npt.NDArray[np.floating], npt.NDArray[np.int64]]] = []
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
                some: Rows = slice(None) if len(rows) == len(tensors) else rows
                self._windows.append((some, *_window(at[rows], kind)))
        self._others = [(row, tensors[row]) for row in np.flatnonzero(left).tolist()]

    def read(self, absent: Sequence[int], ahead: Ahead) -> Values:
        """What a rule takes: the number of each parameter, as it will be.

        Args:
            absent: parameters that take no step now.
            ahead: what launches prepared before have announced.
        """
        out = np.empty(len(self._tensors), np.float64)
        for rows, window, places in self._windows:
            out[rows] = window[places]
        for row, tensor in self._others:
            number = float(tensor)
            out[row] = ahead.get(tensor.data_ptr(), number)
        return out

    def announce(self, values: Values, absent: Sequence[int], ahead: Ahead) -> None:
        """Enter ``values``, which will be written, into ``ahead``; no two parameters here have the same number."""
        away = set(absent) if self._others else ()
        for row, tensor in self._others:
            if row not in away:
                ahead[tensor.data_ptr()] = float(values[row])

    def write(self, values: Values, absent: Sequence[int]) -> None:
        """Write the numbers of all parameters but those that are absent."""
        if not absent and not self._others:
            for rows, window, places in self._windows:
                window[places] = values[rows]
            return
        present = np.ones(len(self._tensors), bool)
        present[list(absent)] = False
        for rows, window, places in self._windows:
            here = present[rows]
            window[places[here]] = values[rows][here]
        for row, tensor in self._others:
            if present[row]:
                tensor.detach().fill_(float(values[row]))


class Steps(Numbers):
    """Step counts; parameters of one launch may have the same one."""

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

    def __init__(self, behind: Sequence[float]) -> None:
        super().__init__((), set())
        self._values: Values = np.array(behind, np.float64)

    def read(self, absent: Sequence[int], ahead: Ahead) -> Values:
        """What a rule takes: the number of each parameter's coming step."""
        return self._values + 1

    def write(self, values: Values, absent: Sequence[int]) -> None:
        """Keep the numbers of all parameters but those that are absent."""
        if absent:
            values[absent] = self._values[absent]
        self._values = values


def _window(addresses: npt.NDArray[np.int64], kind: type) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.int64]]:
    """Memory from the first address to the last as one array, and where in it the numbers at the addresses are.

    What lies between them is never touched, and need not be memory at all.
    """
    size = np.dtype(kind).itemsize
    first, last = int(addresses.min()), int(addresses.max())
    return memory_at(first, last - first + size, kind), (addresses - first) // size
