"""``Rates``: how fast a machine moves bytes, as measured in a few seconds, read from a file, or assumed.

Every rate is in bytes a second.  If an operation both reads and writes (a copy within one memory, an update in place),
both count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..common.facts_table import Shown
from ..common.kind_of import kind_of
from ..common.units import text_of_rate
from ..paging.pages import GRANULE
from ..system import machine
from ..system.cuda import driver
from ..system.files import host
from ..system.files.named import read_small
from ..system.files.state_file import state_folder

#: Bytes that cross the link in a sample, so many that the time to start a copy does not matter.
SAMPLE = 256 << 20
#: Bytes of a device copy in a sample, and the largest part of free device memory that the measurement takes.
DEVICE_SAMPLE, DEVICE_SHARE = 1 << 30, 0.1
#: The largest part of free host memory that a sample takes.
HOST_SHARE = 1 / 16
#: Bytes written to a file between two calls of fdatasync.
FILE_BLOCK = 32 << 20
#: The most bytes of a file with rates; a report of ``pagedopt doctor`` has some thousands.
MAX_BYTES = 1 << 20
#: Samples taken even if the time is over.
MIN_SAMPLES = 3

Folder = str | os.PathLike[str]


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
        versions: versions of torch, CUDA and the driver in the measurement.
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
    versions: Mapping[str, Any] = field(default_factory=dict)
    assumed: bool = False

    def __post_init__(self) -> None:
        for name in RATE_NAMES:
            value = getattr(self, name)
            good = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            if not good or (value is not None and not 0 < value <= sys.float_info.max):
                raise ValueError(f"rate {name} is {value!r}; it must be a number of bytes a second above 0, or None")

    def facts(self) -> tuple[str, list[tuple[str, str]]]:
        """See :class:`Shown`."""
        known = [(text, text_of_rate(getattr(self, name))) for name, text in WORDS.items() if getattr(self, name)]
        return f"rates of {self.machine}", known

    def __str__(self) -> str:
        title, rows = self.facts()
        return "\n".join([title, *(f"  {name}: {text}" for name, text in rows)])

    def as_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values, as :meth:`save` writes them."""
        values = asdict(self)
        return {"machine": values.pop("machine"), "versions": dict(values.pop("versions")),
                "assumed": values.pop("assumed"), "bytes_per_second": values}  # fmt: skip

    @classmethod
    def from_dict(cls, content: Any, where: str = "rates") -> Rates:
        """Return the rates that :meth:`as_dict` made JSON values.

        Raises:
            ValueError: there are no rates, or one is unknown or no positive number; the text begins with ``where``.
        """
        given = content.get("bytes_per_second") if isinstance(content, Mapping) else None
        if not isinstance(given, Mapping):
            said = "there are no rates in it; `python -m pagedopt doctor --json` writes such a file"
            raise ValueError(f"{where}: {said}")
        if unknown := sorted(set(given) - set(RATE_NAMES)):
            raise ValueError(f"{where}: unknown rates {', '.join(unknown)}; there are {', '.join(RATE_NAMES)}")
        machine = str(content.get("machine", "unknown")).encode(errors="replace").decode()
        versions = content.get("versions") or {}
        if not isinstance(versions, Mapping):
            raise ValueError(f"{where}: versions are {kind_of(versions)}, not names and texts")
        try:
            return cls(**given, machine=machine, versions=dict(versions), assumed=bool(content.get("assumed")))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def save(self, path: Folder) -> None:
        """Write the rates as JSON, for :meth:`load` on this or another machine."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Folder) -> Rates:
        """Read rates that :meth:`save` or ``python -m pagedopt doctor --json`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file holds no rates, is no regular file, or has more than ``MAX_BYTES``.
        """
        text = read_small(path, MAX_BYTES)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
            raise ValueError(f"{os.fspath(path)}: not JSON ({str(error).partition(';')[0]})") from error
        if isinstance(content, Mapping) and isinstance(content.get("rates"), Mapping):
            content = content["rates"]  # a report of `pagedopt doctor`
        return cls.from_dict(content, os.fspath(path))


#: Names of the rates.
RATE_NAMES = tuple(f.name for f in fields(Rates) if f.name not in ("machine", "versions", "assumed"))

#: Assumed for parameters on a GPU: measured on one H200, but ``ram``, ``file_read`` and ``file_write`` are guesses.
ASSUMED = Rates(
    device=4.2e12, up=55.5e9, down=55.4e9, both=101.7e9, in_place=85.0e9, ram=20e9, file_read=2e9, file_write=1e9,
    machine="an NVIDIA H200 on PCIe 5.0 x16, assumed: not measured here", assumed=True,
)  # fmt: skip

#: Assumed for parameters on a CPU.
ASSUMED_CPU = Rates(
    ram=ASSUMED.ram, file_read=ASSUMED.file_read, file_write=ASSUMED.file_write,
    machine="a round guess, assumed: `pagedopt doctor` measures", assumed=True,
)  # fmt: skip


def measure(device: torch.device | str = "cuda", seconds: float = 2.0, folder: Folder | None = None) -> Rates:
    """Measure this machine in about ``seconds``, plus well under a second to allocate memory.

    Takes at most a tenth of free device memory, twice 256 MiB of the host and 256 MiB of disk.  Frees them afterwards,
    including torch's cached blocks.

    Args:
        device: a CUDA device, whose link is then measured too, or the CPU.
        folder: a folder for state files; None: the default one.  Rates of files are None if it cannot have files.

    Raises:
        ValueError: ``device`` is neither a CUDA device nor the CPU.
        CudaError: the driver allocates no pinned memory.
        MemoryError: less than 32 MiB of host memory are free.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device is {device}; rates can be measured on cpu and cuda")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": machine.driver_version()}
    share = seconds / (8 if device.type == "cuda" else 3)
    nbytes = min(SAMPLE, int(host.available() * HOST_SHARE)) & -GRANULE
    if not nbytes:
        least = f"{GRANULE / HOST_SHARE:,.0f}"
        raise MemoryError(f"less than {least} bytes of host memory are free; rates are measured with more")
    found: dict[str, Any] = _link_rates(device, nbytes, share) if device.type == "cuda" else {}
    write, read = file_rates(folder, nbytes, share)
    return Rates(
        **found, ram=_ram_rate(nbytes, share), file_read=read, file_write=write, machine=machine.name(device),
        versions=versions,
    )  # fmt: skip


def _link_rates(device: torch.device, nbytes: int, share: float) -> dict[str, Any]:
    """Return rates of device memory and link, measured for ``share`` seconds each, with ``nbytes`` of the host."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        clock = _GpuClock(share)
        room = int(torch.cuda.mem_get_info(index)[0] * DEVICE_SHARE)
        sample = min(DEVICE_SAMPLE, room // 2) & -GRANULE
        if not sample:
            raise MemoryError(f"cuda:{index} has only {room / DEVICE_SHARE:,.0f} bytes free; rates need more")
        found: dict[str, Any] = {"device": _device_rate(sample, index, clock)}
        nbytes = min(nbytes, sample)
        found |= {**_copy_rates(nbytes, index, clock), "in_place": _in_place_rate(nbytes, index, clock)}
        torch.cuda.empty_cache()
    return found


def _device_rate(nbytes: int, index: int, clock: _GpuClock) -> float:
    source, target = _on_device(nbytes, index), _on_device(nbytes, index)
    copies = 4  # per sample: one copy takes half a millisecond, so the time to start it would matter

    def queue(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        with torch.cuda.stream(one):
            for _ in range(copies):
                target.copy_(source)

    return clock.rate(copies * 2 * nbytes, queue)


def _copy_rates(nbytes: int, index: int, clock: _GpuClock) -> dict[str, float]:
    """Measure copies over the link: each direction alone, and both at once on two streams."""
    source, target = (driver.allocate_pinned(nbytes, index) for _ in range(2))
    source.host[:] = target.host[:] = 0
    arriving, leaving = _on_device(nbytes, index), _on_device(nbytes, index)

    def up(one: torch.cuda.Stream, _: torch.cuda.Stream) -> None:
        driver.copy(arriving.data_ptr(), source.address, nbytes, one.cuda_stream)

    def down(_: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        driver.copy(target.address, leaving.data_ptr(), nbytes, other.cuda_stream)

    def both(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        up(one, other)
        down(one, other)

    return {"up": clock.rate(nbytes, up), "down": clock.rate(nbytes, down), "both": clock.rate(2 * nbytes, both)}


def _on_device(nbytes: int, index: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{index}")


def _in_place_rate(nbytes: int, index: int, clock: _GpuClock) -> float | None:
    """Measure a kernel on pinned host memory; None if the device cannot reach it."""
    if not driver.capabilities(index).mapped:
        return None
    buffer = driver.allocate_mapped(nbytes, index)
    buffer.host[:] = 0
    numbers = driver.as_tensor(buffer).view(torch.float32)

    def add(one: torch.cuda.Stream, _: torch.cuda.Stream) -> None:
        with torch.cuda.stream(one):
            numbers.add_(1.0)

    return clock.rate(2 * nbytes, add)


class _GpuClock:
    """Times work on two streams with events, for ``share`` seconds; takes the median."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def rate(self, nbytes: int, queue: Callable[[torch.cuda.Stream, torch.cuda.Stream], object]) -> float:
        """Return ``nbytes`` divided by the seconds in which both streams finish the work that ``queue`` queues."""
        one, other = self.streams
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            torch.cuda.synchronize()
            begin.record(one)
            other.wait_event(begin)
            queue(one, other)
            one.wait_stream(other)
            end.record(one)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return nbytes / _median(sample, self.share)


def _median(sample: Callable[[], float], seconds: float) -> float:
    """Return the median of samples taken for ``seconds``, without the first one."""
    sample()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < MIN_SAMPLES or time.perf_counter() - begin < seconds:
        taken.append(sample())
    return statistics.median(taken)


def _ram_rate(nbytes: int, share: float) -> float:
    """Measure an update in place, as in a step.  A copy looks a third slower: it also fetches what it overwrites."""
    numbers = torch.zeros(nbytes // 4, device="cpu")

    def sample() -> float:
        begin = time.perf_counter()
        numbers.add_(1.0)
        return time.perf_counter() - begin

    return 2 * nbytes / _median(sample, share)


def file_rates(folder: Folder | None, nbytes: int, seconds: float) -> tuple[float | None, float | None]:
    """Measure an unnamed file of at most ``nbytes`` in ``folder`` (None: the folder of state files).

    Return the rates of (writing, reading), each measured for ``seconds``; (None, None) if it cannot be written.
    """
    size = min(FILE_BLOCK, nbytes)
    block = memoryview(bytearray(os.urandom(GRANULE)) * (size // GRANULE))
    try:
        where = state_folder() if folder is None else folder
        with tempfile.TemporaryFile(dir=where, buffering=0) as file:
            write = _blocks(lambda: _write_through(file.fileno(), block), nbytes // size, seconds)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache is measured
            read = _blocks(lambda: file.readinto(block), write[0], seconds)
    except (OSError, ValueError):
        return None, None
    return write[0] * size / write[1], read[0] * size / read[1]


def _write_through(file: int, block: memoryview) -> None:
    done = 0
    while done < len(block):
        done += os.write(file, block[done:])
    os.fdatasync(file)


def _blocks(run: Callable[[], object], most: int, seconds: float) -> tuple[int, float]:
    """Call ``run`` for ``seconds``, at least once and at most ``most`` times; return (calls, seconds they took)."""
    begin = time.perf_counter()
    count, taken = 0, 0.0
    while count < most and (not count or taken < seconds):
        run()
        count, taken = count + 1, time.perf_counter() - begin
    return count, taken
