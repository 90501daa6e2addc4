"""``Rates``: how fast a machine moves bytes, as measured in a few seconds, read from a file, or assumed.

Every rate is in bytes a second.  If an operation both reads and writes (a copy within one memory, an update in place),
both count.
"""

from __future__ import annotations

import json
import os
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..common.facts_table import Shown
from ..common.units import text_of_rate
from ..system import driver, host, machine
from ..system.state_file import state_folder

#: What each rate measures.
WORDS = {
    "device": "device memory, copy (read + written)",
    "up": "link, host to device",
    "down": "link, device to host",
    "both": "link, both directions at once",
    "in_place": "link, kernel on host memory in place (both ways)",
    "ram": "host memory, changed in place (read + written)",
    "file_read": "state folder, reading a file",
    "file_write": "state folder, writing a file",
}


@dataclass(frozen=True)
class Rates(Shown):
    """Rates of one machine in bytes a second; None: the machine cannot do this, or it was not measured.

    Attributes:
        device: a copy within device memory, bytes read and bytes written.
        up: a copy from pinned host memory to the device, alone.
        down: a copy from the device to pinned host memory, alone.
        both: both copies at once, the sum of the two.
        in_place: a kernel that reads and writes pinned host memory, bytes read and bytes written.
        ram: a pass over host memory that changes it in place, bytes read and bytes written.
        file_read, file_write: a file in the folder for state, without the operating system's cache.
        machine: the machine that was measured or assumed.
        assumed: whether the rates were not measured on the user's machine.

    Example:
        >>> rates = Rates.load("rates.json")    # python -m pagedopt doctor --json > rates.json
        >>> rates.both / rates.device           # bytes the link moves per byte that device memory moves
    """

    device: float | None = None
    up: float | None = None
    down: float | None = None
    both: float | None = None
    in_place: float | None = None
    ram: float | None = None
    file_read: float | None = None
    file_write: float | None = None
    machine: str = "unknown"
    assumed: bool = False

    def __post_init__(self) -> None:
        for name in WORDS:
            value = getattr(self, name)
            good = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            if not good or (value is not None and not 0 < value <= sys.float_info.max):
                raise ValueError(f"rate {name} is {value!r}; it must be a number of bytes a second above 0, or None")

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """See :class:`Shown`."""
        known = [(text, text_of_rate(getattr(self, name))) for name, text in WORDS.items() if getattr(self, name)]
        return f"rates of {self.machine}", known

    def as_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values, as :meth:`save` writes them."""
        rates = {name: getattr(self, name) for name in WORDS}
        return {"machine": self.machine, "assumed": self.assumed, "bytes_per_second": rates}

    @classmethod
    def from_dict(cls, content: Any, where: str = "rates") -> Rates:
        """Return the rates that :meth:`as_dict` made JSON values; ValueError, begun with ``where``, if it has none."""
        try:
            name = str(content.get("machine", "unknown")).encode(errors="replace").decode()
            return cls(**content["bytes_per_second"], machine=name, assumed=bool(content.get("assumed")))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            what = "there are no rates in it; `python -m pagedopt doctor --json` writes such a file"
            raise ValueError(f"{where}: {what} ({error})") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rates as JSON, for :meth:`load` on this or another machine."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rates:
        """Read rates that :meth:`save` or ``python -m pagedopt doctor --json`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file holds no rates, is no regular file, or is too large for that.
        """
        text = read_small(path)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
            raise ValueError(f"{os.fspath(path)}: not JSON ({str(error).partition(';')[0]})") from error
        report = content.get("rates") if isinstance(content, dict) else None  # of `pagedopt doctor`
        return cls.from_dict(report or content, os.fspath(path))

    @classmethod
    def measured(cls, device: torch.device | str) -> Rates:
        """Measure this machine in about two seconds, with its link if ``device`` is a GPU; see :func:`measure`."""
        found: dict[str, Any] = dict(measure(device := torch.device(device)))
        return cls(**found, machine=machine.name(device))


#: Assumed for parameters on a CPU.
ASSUMED_CPU = Rates(
    ram=20e9, file_read=2e9, file_write=1e9, assumed=True, machine="a round guess, assumed: `pagedopt doctor` measures"
)
#: Assumed for parameters on a GPU: measured on one H200, but ``ram``, ``file_read`` and ``file_write`` are guesses.
ASSUMED = replace(
    ASSUMED_CPU, device=4.2e12, up=55.5e9, down=55.4e9, both=101.7e9, in_place=85.0e9,
    machine="an NVIDIA H200 on PCIe 5.0 x16, assumed: not measured here",
)  # fmt: skip


# --- small files that users name, which may be anything: a pipe, a device, or a file of many GiB ----------------------

#: The most bytes that are read of such a file; a report of ``pagedopt doctor`` has some thousands.
LIMIT = 1 << 20


def read_small(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; never waits for a writer.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or larger than :data:`LIMIT`; the text begins with ``path``.
    """
    name = os.fspath(path)
    with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{name}: no regular file, but a pipe or a device; write its content to a file")
        if len(content := file.read(LIMIT + 1)) > LIMIT:
            raise ValueError(f"{name}: more than {LIMIT:,} bytes, the most that are read of such a file")
    return content


# --- measuring, in about two seconds ----------------------------------------------------------------------------------

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
