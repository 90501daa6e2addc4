"""Bytes over the link, counted by the card: NVML's PCIe byte counters, and what they count per byte that is moved.

The counters see whole packets: headers, read requests and acknowledgements too.  So known traffic of the same kind is
counted first, and other traffic is divided by what that took.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from pagedopt.system.driver import bindings, check

#: NVML_FI_DEV_PCIE_COUNT_TX_BYTES and …_RX_BYTES (nvml.h): sent by the card, received by it.
SENT, RECEIVED = 197, 198
#: The counters have 32 bits.
MODULUS = 1 << 32
#: More raw bytes than this in one reading and a wrap could be missed.
MOST = 3_500_000_000
#: The most raw bytes per byte seen so far (in place, sent: requests travel with what is written).
OVERHEAD = 1.45
#: Seconds until the counters have everything.
SETTLE = 0.1


class FieldValue(ctypes.Structure):
    """``nvmlFieldValue_t``."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("result", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes on the link: ``up`` to the device, ``down`` from it."""

    up: float
    down: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.up + other.up, self.down + other.down)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.up - other.up, self.down - other.down)

    @property
    def sum(self) -> float:
        """Both directions."""
        return self.up + self.down


def difference(before: int, after: int) -> int:
    """What a counter has counted from one reading to the next, if that is less than its range."""
    return (after - before) % MODULUS


def fits(moved: Traffic, overhead: float = OVERHEAD) -> bool:
    """Whether so many bytes, and what comes with them, are counted without a wrap too many."""
    return overhead * max(moved.up, moved.down) < MOST


@dataclass(frozen=True)
class Calibration:
    """What is counted per byte that is moved, in traffic of one kind.

    Attributes:
        raw: counted per byte moved up (received) and down (sent).
    """

    raw: Traffic

    @classmethod
    def of(cls, counted: Traffic, moved: Traffic) -> Calibration:
        """From known traffic in both directions."""
        return cls(Traffic(counted.up / moved.up, counted.down / moved.down))

    def moved(self, counted: Traffic) -> Traffic:
        """The bytes behind a count."""
        return Traffic(counted.up / self.raw.up, counted.down / self.raw.down)


def middle(counts: Sequence[Traffic]) -> Traffic:
    """The median of each direction."""
    return Traffic(median(c.up for c in counts), median(c.down for c in counts))


class LinkCounters:
    """The PCIe byte counters of one card.

    Raises:
        RuntimeError: NVML is not here, or has no such counters.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise RuntimeError(f"NVML is not here: {error}") from None
        self._check("nvmlInit_v2", self._library.nvmlInit_v2())
        self._card = ctypes.c_void_p()
        d = bindings()
        handle = check("cuDeviceGet", d.cuDeviceGet(device.index))
        address = check("cuDeviceGetPCIBusId", d.cuDeviceGetPCIBusId(32, handle)).split(b"\0")[0]
        found = self._library.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(self._card))
        self._check(f"nvmlDeviceGetHandleByPciBusId_v2({address!r})", found)
        self.read()

    def read(self) -> tuple[int, int]:
        """The counters now: (received, sent)."""
        values = (FieldValue * 2)(FieldValue(field=RECEIVED), FieldValue(field=SENT))
        self._check("nvmlDeviceGetFieldValues", self._library.nvmlDeviceGetFieldValues(self._card, 2, values))
        for value in values:
            self._check(f"field {value.field}", value.result)
        return values[0].value % MODULUS, values[1].value % MODULUS

    def count(self, run: Callable[[], object], times: int = 4) -> Traffic:
        """What is counted during one run (which may be asynchronous), the median of ``times``."""
        counts = []
        for _ in range(times):
            torch.cuda.synchronize()
            time.sleep(SETTLE)
            before = self.read()
            run()
            torch.cuda.synchronize()
            time.sleep(SETTLE)
            after = self.read()
            counts.append(Traffic(*(difference(b, a) for b, a in zip(before, after, strict=True))))
        return middle(counts)

    def _check(self, call: str, code: int) -> None:
        if code:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            text = self._library.nvmlErrorString(code) or b"unknown error"
            raise RuntimeError(f"{call} failed with {code}: {text.decode()}")
