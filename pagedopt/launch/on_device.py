"""What launches read in memory of their device: the factor of gradients, copies of tables, a step's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import cuda
from ..rules import Rule
from ..system import driver, internals
from ..tables.layout import WORD, HostTable, Span, table_type
from ..transports.transport import Argument, Lent, Transport, argument_at, opaque

# --- the factor: by what a step multiplies gradients, and whether it is taken -----------------------------------------
#
# It is the coefficient of clipping divided by the scale of the loss.  Kernels find it by its address, which is a number
# of each set in their table, so one text of a kernel serves any transport, graph or placement.

#: ``Factor`` of ``factor.cuh``.
FACTOR = np.dtype(
    [("coefficient", np.float64), ("max_norm", np.float64), ("norm", np.float64), ("scale", np.float32),
     ("found_inf", np.float32), ("skips", np.float32), ("nonfinite", np.float32), ("skipped", np.float64)]
)  # fmt: skip
#: Where its parts lie: what clipping needs, and what a scaler gives.
_AT = {name: field[1] for name, field in FACTOR.fields.items()}  # type: ignore[union-attr]
_CLIPPING, _SCALING, _SKIPPING = _AT["norm"], _AT["scale"], _AT["skips"]
#: A loss that nobody has scaled: its scale is 1, and no gradient was found to be infinite.
UNSCALED = (1.0, 0.0)


class Factor:
    """The factor of gradients on one device; this class is the one on a CPU.

    Args:
        max_norm: see :meth:`clip_to`.
        skips: whether a step whose norm is not finite is left out, and counted.

    Attributes:
        address: where kernels read it.
        word: the float64 with the bits of the address, for tables.
    """

    device: torch.device = torch.device("cpu")

    def __init__(self, max_norm: float | None, skips: bool = False) -> None:
        self._words = np.zeros(1, FACTOR)
        self._words[0] = (*_first(max_norm), skips, 0.0, 0.0)
        self._max_norm = max_norm
        self._at(self._words.ctypes.data)

    def _at(self, address: int) -> None:
        self.address, self.word = address, float(np.array([address], np.uint64).view(np.float64)[0])

    @property
    def max_norm(self) -> float | None:
        """The norm that was given last."""
        return self._max_norm

    def clip_to(self, max_norm: float | None) -> None:
        """Set the norm to which gradients are clipped from now on; None: the coefficient is 1."""
        if max_norm != self._max_norm:
            self._words["coefficient"], self._words["max_norm"] = _first(max_norm)[:2]  # the last norm stays
            self._publish()
            self._max_norm = max_norm  # last: what fails before is done again

    def _publish(self) -> None:
        """Let kernels see what clipping needs."""

    def scale_by(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Take the scale of the loss (None: 1), and whether a gradient is infinite (None: none is)."""
        self._words["scale"] = UNSCALED[0] if scale is None else float(scale)
        self._words["found_inf"] = UNSCALED[1] if found_inf is None else float(found_inf)

    def total(self, squares: float) -> None:
        """Compute the coefficient from the sum of all squares, as ``total`` of ``sums.cu`` does."""
        words = self._words[0]
        with np.errstate(all="ignore"):
            norm = np.sqrt(np.float64(squares)) / np.float64(words["scale"])
            coefficient = words["max_norm"] / (norm + 1e-6)
        words["norm"], words["coefficient"] = norm, 1.0 if coefficient > 1.0 else coefficient
        if words["skips"]:
            words["nonfinite"] = not np.isfinite(norm)
            words["skipped"] += words["nonfinite"]

    def norm(self) -> torch.Tensor:
        """Return a copy of the last norm, float64 of no dimensions, on the device."""
        return self._copy_of("norm")

    @property
    def skipped(self) -> int:
        """How many steps were left out so far, which waits for the device."""
        return int(self._copy_of("skipped"))

    def _copy_of(self, name: str) -> torch.Tensor:
        return torch.tensor(float(self._words[name][0]), dtype=torch.float64, device="cpu")


class DeviceFactor(Factor):
    """The factor on a CUDA device.  All that is written there is written in the order of the current stream.

    Args:
        max_norm, skips: see :class:`Factor`.
        device: the CUDA device.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """

    def __init__(self, max_norm: float | None, device: torch.device, skips: bool = False) -> None:
        super().__init__(max_norm, skips)
        self.device, self._index = device, device.index
        self._memory = driver.DeviceMemory(FACTOR.itemsize, device.index)
        self._memory.fill(self._words.ctypes.data)  # at once: a capture must not do it in each replay
        self._copies = StagedCopies(device.index, FACTOR.itemsize)
        self._scaled = False  # whether a scale or found_inf was copied there
        self._at(self._memory.address)

    def _publish(self) -> None:
        self._write(0, _CLIPPING)

    def scale_by(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        if self._scaled and (scale is None or found_inf is None):
            self._write(_SCALING, _SKIPPING)
        self._scaled = True  # also if a copy fails behind another
        for at, given in ((_SCALING, scale), (_SCALING + 4, found_inf)):
            if given is not None:
                there = given.detach().to(self.device, torch.float32, non_blocking=True)
                self._copy(self.address + at, there.data_ptr(), 4)
        self._scaled = scale is not None or found_inf is not None

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy on the device."""
        with torch.cuda.device(self._index):  # its default stream has the number that every device's has
            driver.copy(target, source, nbytes, internals.current_stream(self._index))

    def _write(self, first: int, end: int) -> None:
        """Queue a copy of some of the host's bytes, where scale and found_inf are always those of no scaler."""
        words = self._words.view(np.uint64)[first // 8 : end // 8]
        with torch.cuda.device(self._index):
            self._copies.queue(words, self.address + first, internals.current_stream(self._index))

    def _copy_of(self, name: str) -> torch.Tensor:
        found = torch.empty((), dtype=torch.float64, device=self.device)
        self._copy(found.data_ptr(), self.address + _AT[name], found.itemsize)
        return found


def factor_on(device: torch.device, max_norm: float | None, skips: bool = False) -> Factor:
    """Return a new factor on a device; see :class:`Factor`."""
    return Factor(max_norm, skips) if device.type == "cpu" else DeviceFactor(max_norm, device, skips)


def _first(max_norm: float | None) -> tuple[float, ...]:
    """Return the words before the first step: nothing is clipped yet."""
    return (1.0, math.inf if max_norm is None else max_norm, math.nan, *UNSCALED)


# --- tables in device memory, which copies in stream order keep as the host's are -------------------------------------

#: Copies in flight before the host waits for the oldest.
STAGING_BUFFERS = 4


class TableCopy(Transport):
    """A copy of a table in device memory, at one address for as long as it lives; a graph may own it.

    Args:
        table: the table as the host has it.
        device: the CUDA device's index.
        more: words that lie behind it.

    Attributes:
        address: where kernels read the table.
        nbytes: bytes of device memory.
    """

    name = "copy"
    in_memory = True

    def __init__(self, table: HostTable, device: int, more: int = 0) -> None:
        super().__init__(device)
        self.nbytes = max(1, len(table.words) + more) * WORD
        self._memory, self._copies = driver.DeviceMemory(self.nbytes, device), StagedCopies(device, self.nbytes)
        self.address = self._memory.address
        self._stamp = self._rows_stamp = -1

    def kind(self, table: HostTable) -> str:
        return _Lent.kind

    def lend(self, table: HostTable, stream: int) -> Lent:
        """Lend the table.  It is filled in at once, if it is empty: a capture must not do it in each replay."""
        if self._stamp == -1:
            self._memory.fill(table.words.ctypes.data)
            self._stamp, self._rows_stamp = table.stamp, table.rows_stamp
        return _Lent(self, table)

    def publish(self, table: HostTable, stream: int) -> bool:
        """Queue a copy of what has changed on ``stream``, behind all launches so far; return whether anything had."""
        if table.stamp == self._stamp:
            return False
        end = table.rows_at if table.rows_stamp == self._rows_stamp else table.rows_end
        words = table.words if self._stamp == -1 else table.words[:end]
        self._copies.queue(words, self.address, stream)
        self._stamp, self._rows_stamp = table.stamp, table.rows_stamp
        return True


class _Lent(Lent):
    """The arguments of launches over a table at one address."""

    kind = table_type(0)

    def __init__(self, copy: TableCopy, table: HostTable) -> None:
        self.address, self._table = copy.address, table

    def parts(self, span: Span | None = None) -> Iterable[tuple[Argument, int]]:
        first, last = span or (0, len(self._table.chunk_words))
        return [(argument_at(self.address, self._table, (first, last)), last - first)] if first < last else []


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


# --- a launch whose hyperparameters are computed on the device: a kernel fills its table in ---------------------------
#
# That kernel, the *prologue* of the rule, reads learning rate, betas and step counts from memory each time, so that a
# CUDA graph in which it was captured follows them.  The host copies the rest (addresses, numbers that are no tensors)
# in stream order.

#: The lowest bit of an address that the prologue reads a float32 at; without it, a float64.
SINGLE = 1


class DeviceStep(TableCopy):
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
        super().__init__(table, device, total - len(table.words))
        self._last = driver.Event(device)
        self._stream: int | None = None  # on which ``_last`` was recorded
        self.changed, self.reads_hyperparameters, self.copies = True, False, 0

    def compile(self) -> None:
        """Compile (or load) the prologue now."""
        cuda.prologue_kernel(self._rule, self.device)

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
        return _LentBehindPrologue(self, table, stream, capturing)

    def is_told(self, table: HostTable) -> bool:
        """Whether nothing has changed since the last copy was queued."""
        return table.stamp == self._stamp and not self.changed

    def publish(self, table: HostTable, stream: int) -> bool:
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


class _LentBehindPrologue(_Lent):
    """The arguments of launches behind one run of the prologue."""

    def __init__(self, step: DeviceStep, table: HostTable, stream: int, capturing: bool) -> None:
        super().__init__(step, table)
        self._step, self._stream, self._capturing, self._prologue_ran = step, stream, capturing, False

    def parts(self, span: Span | None = None) -> Iterable[tuple[Argument, int]]:
        """Return the argument of each launch; before the first one the prologue is queued."""
        found = super().parts(span)
        if not self._prologue_ran:  # last, for it counts the step: what fails before has changed nothing
            kernel, numbers, rows = self._step.prologue(self._table)
            kernel(numbers, rows, cuda.Stream(self._stream))
            self._prologue_ran = True
        return found

    def __exit__(self, *_: object) -> None:
        if not self._capturing:
            self._step.launched(self._stream)
