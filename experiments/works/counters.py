"""Bytes over the link, counted by the card: NVML's PCIe byte counters, and what they count per byte that is moved.

The counters see whole packets: headers, read requests and acknowledgements too.  So known traffic of the same kind is
counted first, and other traffic is divided by what that took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagedopt.system.cuda.driver import bindings, check

#: To the device and from it: (received by the card, sent by it).
Bytes = np.ndarray[Any, Any]
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


def difference(before: Bytes, after: Bytes) -> Bytes:
    """What counters have counted from one reading to the next, if that is less than their range."""
    return (after - before) % MODULUS


def fits(moved: int) -> bool:
    """Whether so many bytes, and what comes with them, are counted without a wrap too many."""
    return OVERHEAD * moved < MOST


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
        self._card = nvml.device_get_handle_by_pci_bus_id_v2(address)
        self.read()

    def read(self) -> Bytes:
        """The counters now."""
        values = self._nvml.FieldValue(2)
        values.field_id, values.scope_id = (RECEIVED, SENT), (0, 0)  # what is not set may be rubbish
        values = self._nvml.device_get_field_values(self._card, values)
        for field, code in zip(values.field_id, values.nvml_return, strict=True):
            if code:
                raise RuntimeError(f"field {field} failed with {code}: {self._nvml.error_string(int(code))}")
        return np.array([int(value) % MODULUS for value in values.value["ull_val"]])

    def count(self, run: Callable[[], object], times: int = 4) -> Bytes:
        """What is counted during one run (which may be asynchronous), the median of ``times``."""
        counts = []
        for _ in range(times):
            before = self._settled()
            run()
            counts.append(difference(before, self._settled()))
        return np.median(counts, axis=0)

    def _settled(self) -> Bytes:
        torch.cuda.synchronize()
        time.sleep(SETTLE)
        return self.read()
