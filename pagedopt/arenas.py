"""Where optimizer state lives: an arena is one stretch of zeroed bytes that state tensors view and keep alive."""

from __future__ import annotations

import warnings

import torch

from . import memory

#: Placements by name.
PLACEMENTS = ("device", "managed")
#: State tensors begin at multiples of this many bytes, so that kernels may load 16 bytes at a time.
ALIGNMENT = 16


def check_placement(placement: str) -> None:
    """
    Raises:
        ValueError: the placement is unknown.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement is {placement!r}; there are {', '.join(PLACEMENTS)}")


def allocate(nbytes: int, device: torch.device, placement: str) -> tuple[torch.Tensor, str]:
    """``nbytes`` zeroed bytes for state of parameters on ``device``.

    Returns:
        a uint8 tensor, and the place it is in: ``host``, ``device`` or ``managed``.  Where managed memory cannot be
        had (no GPU, concurrentManagedAccess = 0, refused by the driver) it is the device's own, with one warning.

    Raises:
        MemoryError: more managed memory than a quarter of what the device has free.
    """
    if device.type != "cuda":
        if placement == "managed":
            _warn_once(device, "there is no GPU behind these parameters")
        return torch.zeros(nbytes, dtype=torch.uint8, device=device), "host" if device.type == "cpu" else device.type
    if placement == "managed":
        if memory.capabilities(device.index).concurrent_managed:
            try:
                return _managed(nbytes, device), "managed"
            except memory.CudaError as error:
                _warn_once(device, str(error))
        else:
            _warn_once(device, "it has no concurrent managed access (concurrentManagedAccess = 0)")
    return torch.zeros(nbytes, dtype=torch.uint8, device=device), "device"


def _managed(nbytes: int, device: torch.device) -> torch.Tensor:
    """Managed memory that prefers the device and is there from the start."""
    index = device.index
    buffer = memory.allocate_managed(max(nbytes, 1), index)
    memory.advise(buffer.address, buffer.nbytes, memory.Advice.PREFERRED, memory.Location.DEVICE, index)
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream().cuda_stream
        memory.prefetch(buffer.address, buffer.nbytes, memory.Location.DEVICE, index, stream)
    return memory.as_tensor(buffer)[:nbytes].zero_()


_warned: set[tuple[str, str]] = set()


def _warn_once(device: torch.device, reason: str) -> None:
    if (str(device), reason) not in _warned:
        _warned.add((str(device), reason))
        place = "ordinary memory" if device.type == "cpu" else "device memory"
        warnings.warn(
            f"placement='managed' on {device}: {reason}. State is kept in {place}; results are the same",
            RuntimeWarning,
            stacklevel=4,
        )
