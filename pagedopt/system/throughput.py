"""How fast this machine moves bytes, measured in about two seconds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from . import driver, host
from .state_file import state_folder

#: Bytes that cross the link in a sample, so many that the time to start a copy does not matter.
SAMPLE = 256 << 20
#: Bytes that are written to a file, then read, in a sample.
FILE_SAMPLE = 32 << 20
#: The largest parts of free device memory and of free host memory that a measurement takes.
DEVICE_SHARE, HOST_SHARE = 0.1, 1 / 16
#: Sizes are multiples of this.
UNIT = 1 << 20
#: Seconds in which each rate is measured, and samples taken even if they are over.
SECONDS, MIN_SAMPLES = 0.25, 3


def measure(device: torch.device) -> dict[str, float]:
    """Return the rates of this machine, named as in :class:`~pagedopt.Rates`, without those that it does not have.

    Takes at most a tenth of free device memory, twice 256 MiB of the host and 32 MiB of disk.  Frees them afterwards,
    including torch's cached blocks.

    Args:
        device: a CUDA device, whose link is then measured too, or the CPU.

    Raises:
        CudaError: the driver allocates no pinned memory.
        MemoryError, torch.OutOfMemoryError: the host or the device is full.
    """
    nbytes = max(UNIT, min(SAMPLE, int(host.available() * HOST_SHARE)) // UNIT * UNIT)
    found = _of_files(min(FILE_SAMPLE, nbytes))
    if device.type == "cuda":
        with torch.cuda.device(device):
            found |= _of_gpu(torch.cuda.current_device(), nbytes)
            torch.cuda.empty_cache()
    numbers = torch.zeros(nbytes // 4, device="cpu")  # changed in place: a copy would also fetch what it overwrites
    return {**found, "ram": _rate(2 * nbytes, [lambda: numbers.add_(1.0)])}


def _of_gpu(index: int, nbytes: int) -> dict[str, float]:
    """Return the rates of the current device, number ``index``, and of its link, with ``nbytes`` of the host."""
    room = max(UNIT, int(torch.cuda.mem_get_info()[0] * DEVICE_SHARE) // 2 // UNIT * UNIT)
    size, nbytes = min(4 * nbytes, room), min(nbytes, room)
    mapped = driver.capabilities(index).mapped
    allocate = driver.allocate_mapped if mapped else driver.allocate_pinned
    source, target = allocate(nbytes, index), allocate(nbytes, index)
    arriving, leaving = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def up() -> None:
        driver.copy(arriving.data_ptr(), source.address, nbytes, one.cuda_stream)

    def down() -> None:
        driver.copy(target.address, leaving.data_ptr(), nbytes, other.cuda_stream)

    def copy() -> None:
        for _ in range(4):  # one alone takes half a millisecond, so that the time to start it would matter
            arriving.copy_(leaving)

    ways: dict[str, tuple[int, Sequence[Callable[[], object]]]] = {
        "device": (8 * size, [copy]),
        "up": (nbytes, [up]),
        "down": (nbytes, [down]),
        "both": (2 * nbytes, [up, down]),
    }
    if mapped:
        numbers = driver.as_tensor(source).view(torch.float32)
        ways["in_place"] = 2 * nbytes, [lambda: numbers.add_(1.0)]
    return {name: _rate(moved, [*queue, torch.cuda.synchronize]) for name, (moved, queue) in ways.items()}


def _of_files(nbytes: int) -> dict[str, float]:
    """Return the rates of a file in the folder of state files; none if there can be no file."""
    block = bytearray(os.urandom(UNIT)) * (nbytes // UNIT)
    try:
        with tempfile.TemporaryFile(dir=state_folder()) as temporary:
            file = temporary.fileno()

            os.posix_fallocate(file, 0, nbytes)
            write = _rate(nbytes, [lambda: os.pwrite(file, block, 0), lambda: os.fdatasync(file)])
            drop = partial(os.posix_fadvise, file, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache is measured
            read = _rate(nbytes, [lambda: os.preadv(file, [block], 0)], before=drop)
    except (OSError, ValueError):
        return {}
    return {"file_read": read, "file_write": write}


def _rate(nbytes: int, work: Sequence[Callable[[], object]], before: Callable[[], object] = lambda: None) -> float:
    """Return ``nbytes`` by the median of the seconds that ``work`` takes; ``before`` is called before each sample."""
    taken: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(taken) <= MIN_SAMPLES or time.perf_counter() < end:
        before()
        begin = time.perf_counter()
        for part in work:
            part()
        taken.append(time.perf_counter() - begin)
    return nbytes / statistics.median(taken[1:])  # the first one warms up
