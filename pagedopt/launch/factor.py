"""``Factor``: by what a step multiplies gradients, and whether it is taken; in memory that kernels of a device read.

The factor is the coefficient of clipping divided by the scale of the loss.  Kernels find it by its address, which is a
number of each set in their table, so one text of a kernel serves any transport, graph or placement.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..system import driver, internals
from .table_copy import StagedCopies

#: ``Factor`` of ``factor.cuh``.
FACTOR = np.dtype(
    [("coefficient", np.float64), ("max_norm", np.float64), ("norm", np.float64), ("scale", np.float32),
     ("found_inf", np.float32)]
)  # fmt: skip
#: Where its parts lie: what clipping needs, and what a scaler gives.
_NORM, _CLIPPING, _SCALING = FACTOR.fields["norm"][1], 16, FACTOR.fields["scale"][1]  # type: ignore[index]
#: A loss that nobody has scaled: its scale is 1, and no gradient was found to be infinite.
UNSCALED = (1.0, 0.0)


class Factor:
    """The factor of gradients on one device; this class is the one on a CPU.

    Args:
        max_norm: see :meth:`clip_to`.

    Attributes:
        address: where kernels read it.
        word: the float64 with the bits of the address, for tables.
    """

    device: torch.device = torch.device("cpu")

    def __init__(self, max_norm: float | None) -> None:
        self._words = np.zeros(1, FACTOR)
        self._words[0] = _first(max_norm)
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

    def norm(self) -> torch.Tensor:
        """Return a copy of the last norm, float64 of no dimensions, on the device."""
        return torch.tensor(float(self._words["norm"][0]), dtype=torch.float64, device="cpu")


class DeviceFactor(Factor):
    """The factor on a CUDA device.  All that is written there is written in the order of the current stream.

    Args:
        max_norm: see :meth:`clip_to`.
        device: the CUDA device.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """

    def __init__(self, max_norm: float | None, device: torch.device) -> None:
        super().__init__(max_norm)
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
            self._write(_SCALING, FACTOR.itemsize)
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

    def norm(self) -> torch.Tensor:
        found = torch.empty((), dtype=torch.float64, device=self.device)
        self._copy(found.data_ptr(), self.address + _NORM, found.itemsize)
        return found


def factor_on(device: torch.device, max_norm: float | None) -> Factor:
    """Return a new factor on a device."""
    return Factor(max_norm) if device.type == "cpu" else DeviceFactor(max_norm, device)


def _first(max_norm: float | None) -> tuple[float, ...]:
    """Return the words before the first step: nothing is clipped yet."""
    return (1.0, math.inf if max_norm is None else max_norm, math.nan, *UNSCALED)
