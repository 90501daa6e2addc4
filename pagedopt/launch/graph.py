"""A sweep captured into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..tables.pointers import PointerTable, TensorList


class CapturedSweep:
    """A CUDA graph with one launch.  It owns its table: nothing rewrites it, later sweeps have tables of their own.

    Args:
        table: the table that ``launch`` uses, on a CUDA device.
        launch: captured, and kept alive: a replay uses its kernel and table memory.
    """

    def __init__(self, table: PointerTable, launch: Callable[[], None]) -> None:
        self._table, self._launch = table, launch
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(table.device), torch.cuda.graph(self._graph):
            launch()
        self._addresses = table.host.addresses.copy()

    def replay(self, lists: Sequence[TensorList] | None = None) -> None:
        """Run the captured launch on the current stream.

        Args:
            lists: the current tensors, to be compared with the captured ones; left out: the tensors of the sweep.

        Raises:
            RuntimeError: a tensor has moved since the capture, or the sweep was given other tensors.
            ValueError, TypeError: a tensor can no longer be used, e.g. has another size.
        """
        if lists is None:
            self._table.follow()
        elif moved := self._table.moved(lists):
            self._refuse(*moved[0])
        now = self._table.host.addresses
        if not np.array_equal(now, self._addresses):
            row, column = np.argwhere(now != self._addresses)[0]
            self._refuse(self._table.names[column], int(row))
        self._graph.replay()

    @staticmethod
    def _refuse(name: str, index: int) -> None:
        raise RuntimeError(
            f"tensor {index} of {name} has moved since the graph was captured; a replay would use its old memory. "
            "Capture again, or keep gradients in place (zero_grad(set_to_none=False))"
        )
