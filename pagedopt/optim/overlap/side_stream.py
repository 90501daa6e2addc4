"""The stream beside a backward, on which its updates run, and the gradients that wait for these."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ...paging.policy import HELD
from ...system import internals
from ...system.driver import Event


class SideStream:
    """A stream of high priority, and gradients that are kept until updates there have read them.

    Gradients are given back in stream order: torch's allocator may reuse their memory for what is queued later on the
    stream on which they were made, once that stream waits for the updates.  (``record_stream`` would let it reuse
    nothing before the host has seen an event pass.)
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._joint = Event(device.index)
        self._held: deque[tuple[Event, int, Sequence[torch.Tensor], int]] = deque()
        self._bytes = 0
        self._free: list[Event] = []

    @property
    def handle(self) -> int:
        """The driver's handle of the stream."""
        return int(self.stream.cuda_stream)

    def follow(self) -> None:
        """Let updates wait for what the current stream was given so far: a gradient, or state that was loaded."""
        self._joint.record(internals.current_stream(self._index))
        self._joint.hold(self.handle)

    def keep(self, grads: Sequence[torch.Tensor]) -> None:
        """Keep gradients whose updates have been launched; if they are too many, their stream waits for the oldest."""
        event = self._free.pop() if self._free else Event(self._index)
        event.record(self.handle)
        nbytes = sum(grad.nbytes for grad in grads)
        self._held.append((event, internals.current_stream(self._index), grads, nbytes))
        self._bytes += nbytes
        while self._bytes > HELD:
            event, stream, _, nbytes = self._held[0]
            event.hold(stream)
            self._held.popleft()
            self._bytes -= nbytes
            self._free.append(event)

    def wait(self) -> None:
        """Let the current stream wait for all updates that have been launched."""
        self._joint.record(self.handle)
        self._joint.hold(internals.current_stream(self._index))

    def end(self) -> None:
        """:meth:`wait`, with all streams that gradients are from; and keep none any longer."""
        self.wait()
        for stream in {stream for _, stream, _, _ in self._held}:
            self._joint.hold(stream)
        self._free += [event for event, _, _, _ in self._held]
        self._held.clear()
        self._bytes = 0
