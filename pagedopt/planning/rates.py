"""How fast a machine moves bytes: measured in a few seconds, kept in a file, or assumed and labelled so.

Every rate is in bytes a second.  Where one operation both reads and writes (a copy in one memory, an update in place)
both count, as they do in what a step has to move.
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
from ..common.units import text_of_rate
from ..paging.pages import GRANULE
from ..system import machine
from ..system.cuda import driver
from ..system.files import host
from ..system.files.state_file import state_folder

#: Bytes that cross the link in a sample: long enough that starting a copy does not show.
SAMPLE = 256 << 20
#: Bytes of a device copy in a sample, and the share of free device memory that the measurement may take.
DEVICE_SAMPLE, DEVICE_SHARE = 1 << 30, 0.1
#: The most of free host memory that a sample takes.
HOST_SHARE = 1 / 16
#: Bytes written to a file before the disk is asked to have them.
FILE_BLOCK = 32 << 20
#: Samples taken even if the time is over.
LEAST_SAMPLES = 3

Folder = str | os.PathLike[str]


#: What each rate is of.
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
    """Bytes a second of one machine; None: there is no such way here, or it was not measured.

    Attributes:
        device: a copy within device memory, bytes read and bytes written.
        up: from page-locked host memory to the device, alone.
        down: back, alone.
        both: both at once, the sum of the two.
        in_place: a plain kernel that reads and writes page-locked host memory, bytes read and bytes written.
        ram: a pass over host memory that changes it in place, bytes read and bytes written.
        file_read, file_write: a file in the folder for state, past the operating system's cache.
        machine: what they were measured on, or are assumed of.
        versions: of what they were measured with.
        assumed: whether they are another machine's.

    Example:
        >>> rates = Rates.load("rates.json")    # python -m pagedopt doctor --json > rates.json
        >>> rates.both / rates.device           # what the link moves for each byte that device memory moves
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
        """Plain values, as :meth:`save` writes them."""
        values = asdict(self)
        return {"machine": values.pop("machine"), "versions": dict(values.pop("versions")),
                "assumed": values.pop("assumed"), "bytes_per_second": values}  # fmt: skip

    @classmethod
    def from_dict(cls, content: Any, where: str = "rates") -> Rates:
        """The opposite of :meth:`as_dict`.

        Raises:
            ValueError: a rate is missing, unknown or no positive number; the text begins with ``where``.
        """
        given = content.get("bytes_per_second") if isinstance(content, Mapping) else None
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{where}: there are no rates in it; `python -m pagedopt doctor --json` writes such a file"
            )
        if unknown := sorted(set(given) - set(RATE_NAMES)):
            raise ValueError(f"{where}: unknown rates {', '.join(unknown)}; there are {', '.join(RATE_NAMES)}")
        machine = str(content.get("machine", "unknown")).encode(errors="replace").decode()
        versions = content.get("versions") or {}
        if not isinstance(versions, Mapping):
            raise ValueError(f"{where}: versions are a {type(versions).__name__}, not names and texts")
        try:
            return cls(**given, machine=machine, versions=dict(versions), assumed=bool(content.get("assumed")))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def save(self, path: Folder) -> None:
        """Write them as JSON, for :meth:`load` on this or another machine."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Folder) -> Rates:
        """Read what :meth:`save` or ``python -m pagedopt doctor --json`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file holds no rates.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:  # digits without end are a ValueError, too
            raise ValueError(f"{os.fspath(path)}: not JSON ({str(error).partition(';')[0]})") from error
        if isinstance(content, Mapping) and isinstance(content.get("rates"), Mapping):
            content = content["rates"]  # a doctor's report
        return cls.from_dict(content, os.fspath(path))


#: Names of the rates.
RATE_NAMES = tuple(f.name for f in fields(Rates) if f.name not in ("machine", "versions", "assumed"))

#: For a machine nobody has measured and parameters on its GPU: readings on one H200.  (Host memory and disk: guesses.)
ASSUMED = Rates(
    device=4.2e12, up=55.5e9, down=55.4e9, both=101.7e9, in_place=85.0e9, ram=20e9, file_read=2e9, file_write=1e9,
    machine="an NVIDIA H200 on PCIe 5.0 x16, assumed: not measured here", assumed=True,
)  # fmt: skip

#: The same for parameters on a CPU.
ASSUMED_CPU = Rates(
    ram=ASSUMED.ram, file_read=ASSUMED.file_read, file_write=ASSUMED.file_write,
    machine="a round guess, assumed: `pagedopt doctor` measures", assumed=True,
)  # fmt: skip


def measure(device: torch.device | str = "cuda", seconds: float = 2.0, folder: Folder | None = None) -> Rates:
    """Measure this machine, in about ``seconds`` and what it takes to get the memory (well under a second).

    Takes at most a tenth of free device memory, twice 256 MiB of the host and 256 MiB of disk, and gives them
    back, torch's cached blocks included.

    Args:
        device: a CUDA device, whose link is then measured too, or the CPU.
        folder: where state files would lie; None: where they do.  Rates of files are None if they cannot lie there.

    Raises:
        ValueError: ``device`` is neither a CUDA device nor the CPU.
        CudaError: the driver gives no page-locked memory.
        MemoryError: less than 32 MiB of host memory are free.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device is {device}; rates can be measured on cpu and cuda")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": machine.driver_version()}
    share = seconds / (8 if device.type == "cuda" else 3)
    nbytes = min(SAMPLE, int(host.available() * HOST_SHARE)) & -GRANULE
    if not nbytes:
        raise MemoryError(
            f"less than {GRANULE / HOST_SHARE:,.0f} bytes of host memory are free; rates are measured with more"
        )
    found: dict[str, Any] = _link_rates(device, nbytes, share) if device.type == "cuda" else {}
    write, read = file_rates(folder, nbytes, share)
    return Rates(
        **found, ram=_ram_rate(nbytes, share), file_read=read, file_write=write, machine=machine.name(device),
        versions=versions,
    )  # fmt: skip


def _link_rates(device: torch.device, nbytes: int, share: float) -> dict[str, Any]:
    """Device memory and the link, each for ``share`` seconds, with ``nbytes`` of the host."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        clock = _GpuClock(share)
        room = int(torch.cuda.mem_get_info(index)[0] * DEVICE_SHARE)
        sample = min(DEVICE_SAMPLE, room // 2) & -GRANULE
        if not sample:
            raise MemoryError(f"cuda:{index} has only {room / DEVICE_SHARE:,.0f} bytes free; rates need more")
        nbytes = min(nbytes, sample)
        found = {
            "device": _device_rate(sample, index, clock),
            **_copy_rates(nbytes, index, clock),
            "in_place": _in_place_rate(nbytes, index, clock),
        }
        torch.cuda.empty_cache()
    return found


def _device_rate(nbytes: int, index: int, clock: _GpuClock) -> float:
    source, target = _on_device(nbytes, index), _on_device(nbytes, index)
    copies = 4  # in a sample: one alone takes half a millisecond, and starting it would show

    def queue(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        with torch.cuda.stream(one):
            for _ in range(copies):
                target.copy_(source)

    return clock.rate(copies * 2 * nbytes, queue)


def _copy_rates(nbytes: int, index: int, clock: _GpuClock) -> dict[str, float]:
    """Copies over the link: each way alone, and both at once on two streams."""
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

    return {
        "up": clock.rate(nbytes, up),
        "down": clock.rate(nbytes, down),
        "both": clock.rate(2 * nbytes, both),
    }


def _on_device(nbytes: int, index: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{index}")


def _in_place_rate(nbytes: int, index: int, clock: _GpuClock) -> float | None:
    """A plain kernel on page-locked host memory; None where the device cannot reach it."""
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
    """Times work on two streams between events, each kind of work for ``share`` seconds; takes the median."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def rate(self, nbytes: int, queue: Callable[[torch.cuda.Stream, torch.cuda.Stream], object]) -> float:
        """``nbytes`` over the seconds from the start of what ``queue`` puts on the streams to the end of both."""
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
    """The median of samples (in seconds) taken for ``seconds``, the first thrown away."""
    sample()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < LEAST_SAMPLES or time.perf_counter() - begin < seconds:
        taken.append(sample())
    return statistics.median(taken)


def _ram_rate(nbytes: int, share: float) -> float:
    """In place, as a step does it: a copy would also fetch what it overwrites, and look a third slower."""
    numbers = torch.zeros(nbytes // 4, device="cpu")

    def sample() -> float:
        begin = time.perf_counter()
        numbers.add_(1.0)
        return time.perf_counter() - begin

    return 2 * nbytes / _median(sample, share)


def file_rates(folder: Folder | None, nbytes: int, seconds: float) -> tuple[float | None, float | None]:
    """Bytes a second that a file without a name takes and gives: (write, read); None where it cannot be written.

    Args:
        folder: where it lies; None: where state files do.
        nbytes: of the file, at most.
        seconds: for writing, and for reading.
    """
    size = min(FILE_BLOCK, nbytes)
    block = memoryview(bytearray(os.urandom(GRANULE)) * (size // GRANULE))
    try:
        where = state_folder() if folder is None else folder
        with tempfile.TemporaryFile(dir=where, buffering=0) as file:
            write = _blocks(lambda: _write_through(file.fileno(), block), nbytes // size, seconds)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it would come from the cache
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
    """(runs, seconds they took): as many as the time allows, at least one, at most ``most``."""
    begin = time.perf_counter()
    count, taken = 0, 0.0
    while count < most and (not count or taken < seconds):
        run()
        count, taken = count + 1, time.perf_counter() - begin
    return count, taken
