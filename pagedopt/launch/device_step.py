"""A launch whose hyperparameters are computed on the device: its table lies in device memory, and a kernel fills it in.

That kernel, the *prologue* of the rule, reads learning rate, betas and step counts from memory each time, so that a
CUDA graph in which it was captured follows them.  The host copies the rest (addresses,
numbers that are no tensors) in stream order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import cuda
from ..rules import Rule
from ..system import driver
from ..tables.layout import WORD, HostTable, Span, table_type
from ..transports.transport import Argument, Lent, Transport, argument_at, opaque
from .factor import Factor
from .table_copy import StagedCopies

#: The lowest bit of an address that the prologue reads a float32 at; without it, a float64.
SINGLE = 1


class DeviceStep(Transport):
    """A table in device memory, and the prologue that computes its hyperparameters.  Each row is a set of its own.

    Args:
        rule: whose prologue it is.
        device: the CUDA device's index.
        table: the table as the host has it, with a set for each row.
        groups: how many groups have hyperparameters of their own.
        counters: for each row the steps taken, if no tensor counts them; left out: tensors do.
        factor: by what gradients are multiplied, whose address is in the table; None: they are not.

    Attributes:
        inputs: what the prologue reads of each row, (rows, 2 + scalars) uint64: 1 if the row takes a step, and in the
            upper half the seed; the address of its step count; that of each hyperparameter.  Set :attr:`changed` after
            a write.
        constants: the numbers of each group that are no tensors, (groups, scalars) float64; likewise.
        reads_hyperparameters: whether one is a tensor, which the prologue reads when its turn comes.
        copies: how many copies were queued.
    """

    name = "device"
    in_memory = True
    may_be_copied = True  # its table is on the device, at one address

    def __init__(
        self,
        rule: Rule,
        device: int,
        table: HostTable,
        groups: int,
        counters: npt.NDArray[np.float64] | None = None,
        factor: Factor | None = None,
    ) -> None:
        super().__init__(device)
        self._rule, self._rows, self._factor = rule, len(table.scalars), factor
        if factor is not None:  # sent once: the prologue writes the numbers before it
            table.scalars[:, rule.uniform_count] = factor.word
        width = len(rule.scalars)
        own = np.zeros(0) if counters is None else counters
        sizes = [len(table.words), self._rows * (2 + width), groups * width, len(own)]
        self._inputs_at, self._constants_at, self._counters_at, total = np.cumsum(sizes).tolist()
        self._image = np.zeros(total, np.uint64)
        self.inputs = self._image[self._inputs_at : self._constants_at].reshape(self._rows, 2 + width)
        self.constants = self._image[self._constants_at : self._counters_at].view(np.float64).reshape(groups, width)
        self._image[self._counters_at :] = own.view(np.uint64)
        self._memory = driver.DeviceMemory(max(1, total) * WORD, device)
        self._copies = StagedCopies(device, max(1, total) * WORD)
        self._last = driver.Event(device)
        self._stream: int | None = None  # on which ``_last`` was recorded
        self._stamp = -1
        self.changed, self.reads_hyperparameters, self.copies = True, False, 0

    def compile(self) -> None:
        """Compile (or load) the prologue now."""
        cuda.prologue_kernel(self._rule, self.device)

    def kind(self, table: HostTable) -> str:
        return table_type(0)

    @property
    def address(self) -> int:
        """Where kernels read the table."""
        return self._memory.address

    def constant_at(self, group: int, scalar: int) -> int:
        """The address of one of :attr:`constants`."""
        return self.address + WORD * (self._constants_at + group * self.constants.shape[1] + scalar)

    def counter_at(self, row: int) -> int:
        """The address of a row's own count of steps."""
        return self.address + WORD * (self._counters_at + row)

    def lend(self, table: HostTable, stream: int) -> Lent:
        """Lend the table; its first launch follows the prologue.  In a capture the table is filled in at once."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self._image[: len(table.words)] = table.words
            self._memory.fill(self._image.ctypes.data)
            self._stamp, self.changed = table.stamp, False
        else:
            self.publish(table, stream)
        return _Lent(self, table, stream, capturing)

    def is_told(self, table: HostTable) -> bool:
        """Whether nothing has changed since the last copy was queued."""
        return table.stamp == self._stamp and not self.changed

    def publish(self, table: HostTable, stream: int) -> bool:
        """Queue a copy of what has changed on ``stream``, behind all launches so far; return whether anything had."""
        if self.is_told(table):
            return False
        if self._stream is not None and self._stream != stream:
            self._last.hold(stream)
        first = self._stamp == -1  # later the scalars are the prologue's, and the counters the device's
        begin, end = (0, len(self._image)) if first else (table.rows_at, self._counters_at)
        self._image[begin : len(table.words)] = table.words[begin:]
        self._copies.queue(self._image[begin:end], self.address + WORD * begin, stream)
        self._stamp, self.changed = table.stamp, False
        self.copies += 1
        self.copied_bytes += WORD * (end - begin)
        return True

    def prologue(self, table: HostTable) -> tuple[cuda.CudaKernel, Argument, int]:
        """Return the kernel that comes before all launches, its argument and its count."""
        fields = np.zeros(1, cuda.PROLOGUE_AT)
        stride, uniforms = table.scalars.shape[1], self._rule.uniform_count + (self._factor is not None)
        seed_at = uniforms if stride > uniforms else -1
        factor_at = 0 if self._factor is None else self._factor.address
        fields[0] = self.address, self.address + WORD * self._inputs_at, self._rows, stride, seed_at, factor_at
        return cuda.prologue_kernel(self._rule, self.device), opaque(fields), self._rows

    def launched(self, stream: int) -> None:
        """Note that launches which read the table were queued on a stream."""
        self._last.record(stream)
        self._stream = stream


class _Lent(Lent):
    """The arguments of launches behind one run of the prologue."""

    kind = table_type(0)

    def __init__(self, step: DeviceStep, table: HostTable, stream: int, capturing: bool) -> None:
        self._step, self._table, self._stream, self._capturing = step, table, stream, capturing
        self.address, self._prologue_ran = step.address, False

    def parts(self, span: Span | None = None) -> Iterator[tuple[Argument, int]]:
        """Yield the argument of each launch; the first one finds the prologue queued before it."""
        first, last = span or (0, len(self._table.chunk_words))
        argument = argument_at(self.address, self._table, (first, last))
        if not self._prologue_ran:  # last, for it counts the step: what fails before has changed nothing
            kernel, numbers, rows = self._step.prologue(self._table)
            kernel(numbers, rows, cuda.Stream(self._stream))
            self._prologue_ran = True
        if first < last:
            yield argument, last - first

    def __exit__(self, *_: object) -> None:
        if not self._capturing:
            self._step.launched(self._stream)
