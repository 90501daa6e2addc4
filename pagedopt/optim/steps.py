"""Step counts: tensors of one number each, theirs who edit ``optimizer.state``, that are read and raised in bulk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..tables.addresses import memory_at

Counts = npt.NDArray[np.float64]

_PLAIN = {torch.float32: np.float32, torch.float64: np.float64}


def new_steps(count: int) -> list[torch.Tensor]:
    """Step counts of zero, each a CPU tensor with memory of its own, in the dtype that torch's optimizers take."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    block = np.zeros(count, _PLAIN[dtype])
    return [torch.frombuffer(block, dtype=dtype, count=1, offset=i * dtype.itemsize).view(()) for i in range(count)]


class Steps:
    """The step counts of some parameters, as they are when asked.

    Args:
        tensors: the counts, one element each, on any device.
        shared: addresses of counts that stand for several parameters.  As in torch's loop, each of these raises it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], shared: set[int]) -> None:
        self._count = len(tensors)
        self._windows: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.floating], npt.NDArray[np.int64]]] = []
        at = np.array([t.data_ptr() for t in tensors], np.int64)
        left = np.ones(len(tensors), bool)
        for dtype, kind in _PLAIN.items():
            size = dtype.itemsize
            plain = [
                t.device.type == "cpu" and t.dtype is dtype and address not in shared and address % size == 0
                for t, address in zip(tensors, at.tolist(), strict=True)
            ]
            rows = np.flatnonzero(plain)
            if len(rows):
                left[rows] = False
                self._windows.append((rows, *_window(at[rows], kind)))
        self._others = [(row, tensors[row]) for row in np.flatnonzero(left).tolist()]

    def read(self, absent: Sequence[int], ahead: dict[int, int]) -> Counts:
        """The steps behind each parameter.

        Args:
            absent: parameters that take no step now.
            ahead: by the address of a shared count, how many parameters before these have raised it; goes on counting.
        """
        out = np.empty(self._count, np.float64)
        for rows, window, places in self._windows:
            out[rows] = window[places]
        away = set(absent) if self._others else ()
        for row, tensor in self._others:
            address = tensor.data_ptr()
            out[row] = float(tensor) + ahead.get(address, 0)
            if row not in away:
                ahead[address] = ahead.get(address, 0) + 1
        return out

    def count(self, absent: Sequence[int]) -> None:
        """Raise the counts of all parameters but those that are absent."""
        if not absent and not self._others:
            for _, window, places in self._windows:
                window[places] += 1
            return
        present = np.ones(self._count, bool)
        present[list(absent)] = False
        for rows, window, places in self._windows:
            window[places[present[rows]]] += 1
        for row, tensor in self._others:
            if present[row]:
                tensor.detach().add_(1)


def _window(addresses: npt.NDArray[np.int64], kind: type) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.int64]]:
    """Memory from the first address to the last as one array, and where in it the numbers at the addresses are.

    What lies between them is never touched, and need not be memory at all.
    """
    size = np.dtype(kind).itemsize
    first, last = int(addresses.min()), int(addresses.max())
    return memory_at(first, last - first + size, kind), (addresses - first) // size
