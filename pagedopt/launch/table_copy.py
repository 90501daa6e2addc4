"""Tables in device memory, which copies in stream order keep as the host's are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..system import driver
from ..tables.layout import WORD, HostTable

#: Copies in flight before the host waits for the oldest.
STAGING_BUFFERS = 4


class TableCopy:
    """A copy of a table in device memory, at one address for as long as it lives."""

    def __init__(self, table: HostTable, device: int) -> None:
        nbytes = max(1, len(table.words)) * WORD
        self._memory, self._copies = driver.DeviceMemory(nbytes, device), StagedCopies(device, nbytes)
        self._stamp = self._rows_stamp = -1

    @property
    def address(self) -> int:
        """Where kernels read the table."""
        return self._memory.address

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._memory.nbytes

    def fill(self, table: HostTable) -> None:
        """Copy the table at once, before anything reads it: also during a capture, which does not see this copy."""
        self._memory.fill(table.words.ctypes.data)
        self._stamp, self._rows_stamp = table.stamp, table.rows_stamp

    def publish(self, table: HostTable, stream: int) -> None:
        """Queue a copy of what has changed on ``stream``, which is behind all launches that read it."""
        if table.stamp == self._stamp:
            return
        end = table.rows_at if table.rows_stamp == self._rows_stamp else table.rows_end
        words = table.words if self._stamp == -1 else table.words[:end]
        self._copies.queue(words, self.address, stream)
        self._stamp, self._rows_stamp = table.stamp, table.rows_stamp


class StagedCopies:
    """Copies from the host in stream order, through page-locked buffers, each guarded by an event."""

    def __init__(self, device: int, nbytes: int) -> None:
        self._device, self._nbytes, self._at = device, nbytes, -1
        self._slots: list[tuple[npt.NDArray[np.uint64], driver.Event]] = []

    def queue(self, words: npt.NDArray[np.uint64], target: int, stream: int) -> None:
        """Queue a copy of ``words`` to the device address ``target``."""
        following = (self._at + 1) % STAGING_BUFFERS
        if following == len(self._slots):
            memory = driver.allocate_pinned(self._nbytes, self._device)
            self._slots.append((memory.host.view(np.uint64), driver.Event(self._device)))
        self._at = following  # behind what may fail: the next call then finds the slot that is still missing
        buffer, copied = self._slots[self._at]
        copied.wait()  # at once if the buffer was never used
        buffer[: len(words)] = words
        try:
            driver.copy_to_device(target, buffer.ctypes.data, words.nbytes, stream)
            copied.record(stream)
        except BaseException:  # the copy may be queued, and no event guards it: the driver frees the buffer behind it
            del self._slots[self._at]
            self._at -= 1
            raise
