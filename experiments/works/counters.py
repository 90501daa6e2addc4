"""Bytes over the link, counted by the card: NVML's PCIe byte counters, and what they count per byte that is moved.

The counters see whole packets: headers, read requests and acknowledgements too.  So known traffic of the same kind is
counted first, and other traffic is divided by what that took.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from pagedopt.system.cuda.driver import bindings, check

#: ``NVML_FI_DEV_PCIE_COUNT_TX_BYTES`` and ``…_RX_BYTES`` (nvml.h): sent by the card, received by it.
SENT, RECEIVED = 197, 198
#: The counters have 32 bits.
MODULUS = 1 << 32
#: More raw bytes than this in one reading and a wrap could be missed.
MOST = 3_500_000_000
#: The most raw bytes per byte seen so far (in place, sent: requests travel with what is written).
OVERHEAD = 1.45
#: Seconds until the counters have everything.
SETTLE = 0.1


@dataclass(frozen=True)
class Traffic:
    """Bytes on the link: ``up`` to the device, ``down`` from it."""

    up: float
    down: float

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.up - other.up, self.down - other.down)

    def __truediv__(self, other: Traffic) -> Traffic:
        """Per byte: counted ÷ moved is what packets add, and counted ÷ that is what was moved."""
        return Traffic(self.up / other.up, self.down / other.down)


def difference(before: int, after: int) -> int:
    """What a counter has counted from one reading to the next, if that is less than its range."""
    return (after - before) % MODULUS


def fits(moved: Traffic, overhead: float = OVERHEAD) -> bool:
    """Whether so many bytes, and what comes with them, are counted without a wrap too many."""
    return overhead * max(moved.up, moved.down) < MOST


class LinkCounters:
    """The PCIe byte counters of one card.

    Raises:
        RuntimeError: NVML is not here, or has no such counters.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import nvml
        except ImportError as error:
            raise RuntimeError(f"NVML is not here: {error}; cuda-bindings has it from 12.9.6 and 13.2 on") from None
        self._nvml: Any = nvml
        try:
            nvml.init_v2()
        except (nvml.NvmlError, RuntimeError) as error:  # the latter where there is no driver
            raise RuntimeError(f"NVML is not here: {error}") from None
        d = bindings()
        handle = check("cuDeviceGet", d.cuDeviceGet(device.index))
        address = check("cuDeviceGetPCIBusId", d.cuDeviceGetPCIBusId(32, handle)).split(b"\0")[0].decode()
        with self._explained(f"finding the card at {address}"):
            self._card = nvml.device_get_handle_by_pci_bus_id_v2(address)
        self.read()

    def read(self) -> tuple[int, int]:
        """The counters now: (received, sent)."""
        values = self._nvml.FieldValue(2)
        values.field_id, values.scope_id = (RECEIVED, SENT), (0, 0)  # what is not set may be rubbish
        with self._explained("reading the counters"):
            values = self._nvml.device_get_field_values(self._card, values)
        for field, code in zip(values.field_id, values.nvml_return, strict=True):
            if code:
                raise RuntimeError(f"field {field} failed with {code}: {self._nvml.error_string(int(code))}")
        received, sent = (int(value) % MODULUS for value in values.value["ull_val"])
        return received, sent

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
        return Traffic(median(c.up for c in counts), median(c.down for c in counts))

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Errors of NVML as RuntimeError, with what was being done."""
        try:
            yield
        except self._nvml.NvmlError as error:
            raise RuntimeError(f"{what} failed: {error}") from None
