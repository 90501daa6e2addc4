"""The link between a device and its host: copies in one direction, and in both at once."""

from __future__ import annotations

from typing import Self

import torch

from experiments.lab import Run
from pagedopt.system import driver

#: Bytes of a copy in one direction; of a quick run.
SIZE, QUICK_SIZE = 1 << 30, 16 << 20
UP, DOWN, BOTH, IN_PLACE = "up", "down", "both ways", "plain kernel in place"
#: How many copies' bytes each moves up and down.
MOVES = {UP: (1, 0), DOWN: (0, 1), BOTH: (1, 1), IN_PLACE: (2, 2)}


class Link:
    """Page-locked memory and what can be done with it; freed with this object.

    Args:
        device: of the card.
        nbytes: of a copy in one direction; twice as many are there.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.host = driver.allocate_mapped(2 * nbytes, device.index)
        noise = torch.empty(2 * nbytes // 4, device=device).normal_()
        driver.copy(self.host.address, noise.data_ptr(), 2 * nbytes, self._current())
        self.near = noise.view(torch.uint8)
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)

    @classmethod
    def of(cls, run: Run) -> Self:
        """The link of the device that is measured."""
        return cls(run.device, run.size(SIZE, QUICK_SIZE))

    def up(self) -> None:
        """Host to device."""
        driver.copy(self.near.data_ptr(), self.host.address, self.nbytes, self._current())

    def down(self) -> None:
        """Device to host, other memory than :meth:`up`."""
        source, target = self.near.data_ptr() + self.nbytes, self.host.address + self.nbytes
        driver.copy(target, source, self.nbytes, self._current())

    def both(self) -> None:
        """Both at once, on two streams; the current stream waits for them."""
        here = torch.cuda.current_stream(self.device)
        for stream, copy in zip(self.streams, (self.up, self.down), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                copy()
        for stream in self.streams:
            here.wait_stream(stream)

    def _current(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)
