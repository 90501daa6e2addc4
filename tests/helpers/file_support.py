"""State in files, as several test files need it, and what they run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from children import python

from pagedopt.paging.budget import Budget
from pagedopt.paging.pages import lay_out
from pagedopt.paging.policy import resident_pages, schedule
from pagedopt.paging.visits import Span, passes, plan
from pagedopt.placements.file import FileArena, FileMover
from pagedopt.system.state_file import FOLDER_VARIABLE, state_folder

MIB = 1 << 20
CPU = torch.device("cpu")
SMALL = 64 << 10  # bytes of a page in each section
NUMEL = 10 * SMALL // 4 - 77  # ten pages, the last one not full


def arena(numel: int, budget: int | None = 0, sections: int = 2, stretch: int = FileArena.stretch) -> FileArena:
    """State of one parameter of ``numel`` 32-bit numbers, of which ``budget`` bytes stay in memory."""
    layout = lay_out([numel], [4] * sections, FileArena.granule, stretch)
    return FileArena(layout, CPU, resident_pages([layout.page_bytes()], Budget(budget))[0])


def sections_of(memory: FileArena) -> list[torch.Tensor]:
    """What belongs to the parameter in each section, as int32."""
    nbytes = memory.layout.numel * 4
    return [memory.tensor[begin : begin + nbytes].view(torch.int32) for begin in memory.layout.sections]


def step(memory: FileArena) -> None:
    """Add 1 to every number, and the section's number to each, page by page as an optimizer would."""
    numel, sections = memory.layout.page_numel, sections_of(memory)
    moves = schedule([(0, page) for page in range(memory.resident, memory.layout.pages)])
    visits = [(move, (move.page * numel, (move.page + 1) * numel)) for move in moves]

    def launch(span: Span | None) -> None:
        assert span is not None
        for number, section in enumerate(sections):
            section[span[0] : span[1]] += 1 + number

    memory.prepare()
    for _ in passes(plan((0, memory.resident * numel), visits), launch, FileMover([memory])):
        pass


def process_bytes(name: str) -> int:
    """A field of /proc/self/status, e.g. ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


@contextlib.contextmanager
def folder_for_state() -> Iterator[Path]:
    """An empty folder on a disk, where state files go."""
    with contextlib.ExitStack() as stack:
        try:
            parent = state_folder()
        except ValueError as error:
            pytest.skip(str(error))
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(FOLDER_VARIABLE, str(path))
        yield path


def small(resident: int = 0, sections: int = 2) -> FileArena:
    memory = arena(NUMEL, resident * sections * SMALL, sections, SMALL)
    assert (memory.resident, memory.layout.pages) == (resident, 10)
    return memory


def fill(memory: FileArena) -> list[torch.Tensor]:
    """Numbers that say where they are; returns copies."""
    for i, section in enumerate(sections_of(memory)):
        section.copy_(torch.arange(section.numel(), dtype=torch.int32) * 7 + i)
    return [section.clone() for section in sections_of(memory)]


def assert_holds(memory: FileArena, want: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(sections_of(memory), want, strict=True))


def assert_measured(memory: FileArena) -> None:
    """Exactly what was planned is in memory; the disk adds a block or two for its own records."""
    planned, measured = memory.planned(), memory.measured()
    assert measured["host"] == planned["host"]
    assert 0 <= measured["file"] - planned["file"] <= 16384


def assert_whole(memory: FileArena, want: list[torch.Tensor]) -> None:
    """It holds that, where it was planned."""
    assert_measured(memory)
    assert_holds(memory, want)


def descriptors() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))


def _files_in(folder: Path) -> list[os.stat_result]:
    """Of every descriptor of this process that is of a file in ``folder``, named or not."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [link.stat() for link in links if link.is_symlink() and os.readlink(link).startswith(str(folder))]


def open_files(folder: Path) -> int:
    """How many descriptors of this process are of files in ``folder``."""
    return len(_files_in(folder))


def disk_bytes(folder: Path) -> int:
    """What open files in ``folder`` take."""
    return sum({file.st_ino: file.st_blocks * 512 for file in _files_in(folder)}.values())


def mapped(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


def run_apart(*arguments: object) -> str:
    """What ``file_support.py`` prints in a process of its own."""
    return python(__file__, *arguments)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def peak_of_steps(megabytes: int, share: float, steps: int) -> None:
    """Print by how many bytes steps raise the resident size above what it was with the budget in use."""
    nbytes = megabytes * MIB
    memory = arena(nbytes // 8, int(nbytes * share))
    step(memory)  # modules and threads are there from now on
    before = process_bytes("VmRSS") - memory.planned()["host"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(steps):
        step(memory)
    peak = process_bytes("VmHWM") - before
    after, measured = process_bytes("VmRSS") - before, memory.measured()
    right = all(s.unique().tolist() == [(1 + i) * (steps + 1)] for i, s in enumerate(sections_of(memory)))
    print(peak, after, measured["host"], measured["file"], right)


def wait_to_be_killed() -> None:
    """Hold state in a file, half of it used, until the end."""
    memory = arena(2 * MIB, 4 * MIB)
    step(memory)
    print("ready", flush=True)
    sys.stdin.read()


def shortage(limit: int) -> None:
    """Ask for more than a file may have, and print what came of it."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    before = descriptors()
    try:
        arena(limit)
    except MemoryError as error:
        print(descriptors() - before, Path("/proc/self/maps").read_text().count("(deleted)"), error)


def mapping_rss(address: int, nbytes: int) -> int:
    """Resident bytes of this process's mappings that overlap a range, each counted whole."""
    with open("/proc/self/smaps") as lines:
        return sum(rss for begin, end, rss in mappings(lines) if begin < address + nbytes and end > address)


def mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """(begin, end, resident bytes) of each mapping in the lines of a ``smaps``."""
    begin = end = 0
    for line in smaps:
        head, _, rest = line.partition(" ")
        if head == "Rss:":
            yield begin, end, int(rest.split()[0]) * 1024
        elif not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {"peak": peak_of_steps, "wait": wait_to_be_killed, "shortage": shortage}
    programs[sys.argv[1]](*map(json.loads, sys.argv[2:]))
