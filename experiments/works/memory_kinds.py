"""Memory of every kind, as a child process has it: where it is for the CPU and for the GPU, filled and read safely."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

NBYTES = 1 << 18
PAGEABLE, PINNED, REGISTERED = "pageable", "pinned", "registered"
MANAGED, DEVICE, RANGE = "managed", "device", "mapped range, page on the host"
KINDS = (PAGEABLE, PINNED, REGISTERED, MANAGED, DEVICE, RANGE)


@dataclass(frozen=True)
class Memory:
    """So many bytes of a kind.

    Attributes:
        cpu: the address that the CPU uses; None where it has none.
        gpu: the one that the GPU uses; None where it has none.
        owner: kept, as long as it is used.
    """

    kind: str
    cpu: int | None
    gpu: int | None
    owner: Any

    @property
    def address(self) -> int:
        """To be given to a copy."""
        return (self.cpu if self.gpu is None else self.gpu) or 0

    def fill(self, value: int) -> None:
        """Set every byte, from the side that can."""
        from pagedopt.system.driver import call

        if self.gpu is None:
            ctypes.memset(self.cpu or 0, value, NBYTES)
        else:
            call("cuMemsetD8", self.gpu, value, NBYTES)
            call("cuCtxSynchronize")

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Every byte, through a copy of a direction that is right."""
        from pagedopt.system.driver import call

        found = np.empty(NBYTES, np.uint8)
        if self.gpu is None:
            ctypes.memmove(found.ctypes.data, self.cpu or 0, NBYTES)
        else:
            call("cuMemcpyDtoH", found.ctypes.data, self.gpu, NBYTES)
        return found


def memory(kind: str, device: int = 0) -> Memory:
    """Memory of a kind; the GPU's address is what the driver says."""
    import torch

    from pagedopt.system import driver, virtual

    torch.cuda.set_device(device)
    torch.empty(1, device="cuda")  # makes the context
    if kind in (PAGEABLE, REGISTERED):
        host = np.empty(NBYTES, np.uint8)
        at = host.ctypes.data
        if kind == PAGEABLE:
            return Memory(kind, at, None, host)
        driver.call("cuMemHostRegister", at, NBYTES, driver.bindings().CU_MEMHOSTREGISTER_DEVICEMAP)
        return Memory(kind, at, int(driver.call("cuMemHostGetDevicePointer", at, 0)), host)
    if kind in (PINNED, MANAGED):
        buffer = (driver.allocate_mapped if kind == PINNED else driver.allocate_managed)(NBYTES, device)
        return Memory(kind, int(buffer.host.ctypes.data), buffer.address, buffer)
    if kind == DEVICE:
        tensor = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
        return Memory(kind, None, tensor.data_ptr(), tensor)
    size = virtual.granule(driver.Location.HOST, device)
    found = virtual.Range(size, device)
    found.give(0, size, driver.Location.HOST)
    return Memory(kind, None, found.address, found)
