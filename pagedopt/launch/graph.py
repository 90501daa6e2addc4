"""A sweep captured into a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ..rules import Rule
from ..tables.pointers import PointerTable, TensorList


class Captured(Protocol):
    """What is captured: a :class:`~pagedopt.Sweep`, which stands above this room."""

    rule: Rule
    table: PointerTable
    device: torch.device

    def prepare(self) -> None:
        """Be ready for a capture."""

    def run(self, scalars: Mapping[str, float]) -> None:
        """Launch."""


class CapturedSweep:
    """A CUDA graph with one launch.  It owns its table: nothing rewrites it, later sweeps have tables of their own.

    Raises:
        ValueError: the tensors are not on a CUDA device.
    """

    def __init__(self, sweep: Captured, scalars: Mapping[str, float]) -> None:
        if sweep.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs CUDA tensors; these are on {sweep.device}")
        self._sweep = sweep
        sweep.prepare()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(sweep.device), torch.cuda.graph(self._graph):
            sweep.run(scalars)
        self._addresses = sweep.table.host.addresses.copy()

    def replay(self, lists: Sequence[TensorList] | None = None) -> None:
        """Run the captured launch on the current stream.

        Args:
            lists: the tensors as they are now, to be compared with those captured; left out: those of the sweep.

        Raises:
            RuntimeError: a tensor has moved since the capture, or the sweep was given other tensors.
            ValueError, TypeError: a tensor can no longer be used, e.g. has another size.
        """
        if lists is None:
            self._sweep.table.follow()
        if lists is not None and (moved := self._sweep.table.moved(lists)):
            self._refuse(*moved[0])
        now = self._sweep.table.host.addresses
        if not np.array_equal(now, self._addresses):
            row, column = np.argwhere(now != self._addresses)[0]
            self._refuse(self._sweep.table.names[column], int(row))
        self._graph.replay()

    @staticmethod
    def _refuse(name: str, index: int) -> None:
        raise RuntimeError(
            f"tensor {index} of {name} has moved since the graph was captured; a replay would use its old memory. "
            "Capture again, or keep gradients in place (zero_grad(set_to_none=False))"
        )
