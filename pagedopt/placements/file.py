"""The placement ``file``, for parameters on a CPU: resident pages are in memory; a thread reads the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NoReturn

import torch

from ..paging.pages import Layout
from ..paging.policy import Move
from ..paging.visits import Mover
from ..system.host import check_disk, check_host, resident_bytes
from ..system.interrupts import Uninterrupted
from ..system.state_file import StateFile, state_folder
from .arena import Arena
from .movers import Ring


class FileArena(Arena):
    """A memory-mapped file without a name.  Resident pages are ordinary memory, mapped into the same range.

    So a step over resident pages writes nothing to disk, and the disk holds only pages that are away.  A forked process
    shares the pages that are away, and may read them as long as the other one keeps its state.
    """

    name = "file"
    devices = ("cpu",)
    away = "file"
    paged = True
    granule = 64 << 10
    stretch = 4 << 20
    ways = ("staged",)

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, resident)
        self._away = layout, -1, list[tuple[int, int]]()  # stretches of pages that are away, with their cache key
        if not layout.nbytes:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        folder, (near, away) = state_folder(), layout.divided(resident)
        check_disk(folder, away, "optimizer state")
        check_host(near, "optimizer state")
        with Uninterrupted():
            self._file = StateFile(folder, layout.nbytes)
        try:
            self._file.reserve(layout.stretches(resident, layout.pages))
            self._bring_in(0, resident, zeros=True)
        except BaseException:
            self._file.close()
            raise
        self.tensor = torch.frombuffer(self._file.memory, dtype=torch.uint8)

    def move(self, resident: int) -> None:
        """Move page by page, each at its own address.

        Bringing pages in makes one or two mappings per section and call, however many pages move; sending them out
        gives these back.
        """
        if resident != self.resident:
            self._file.check_owner()
        nbytes = sum(n for _, n in self.layout.stretches(*sorted((resident, self.resident))))
        if resident > self.resident:
            check_host(nbytes, "optimizer state")
            self._bring_in(self.resident, resident)
        elif resident < self.resident:
            check_disk(self._file.folder, nbytes, "optimizer state")
            while self.resident > resident:
                page = self.resident - 1
                with Uninterrupted():
                    self._file.send_out(self._stretches(page), self.layout.stretches(page, self.layout.pages))
                    self.resident = page
        self.drop()  # read-ahead went beyond what was asked for, and others may have read pages

    def check_owner(self) -> None:
        """Allow a forked process to write if all pages are in memory, which is its own then.

        Raises:
            RuntimeError: pages are in a file, and this process was forked from the one that made it.
        """
        if self.resident < self.layout.pages:
            self._file.check_owner()

    def prepare(self) -> None:
        """Drop what others have brought into memory: reading or loading a checkpoint touches every page."""
        if self.resident < self.layout.pages:
            self._file.check_owner()
            self.drop()

    def drop(self) -> None:
        """Write back and drop every page that is away.

        Raises:
            MemoryError, OSError: writing failed.
        """
        layout, resident = self.layout, self.resident
        if resident < layout.pages:
            if self._away[0] is not layout or self._away[1] != resident:
                self._away = layout, resident, layout.stretches(resident, layout.pages)
            self._file.drop(self._away[2], rest=True)

    def mover(self, arenas: Sequence[Arena], ring: Callable[[torch.device], Ring]) -> Mover:
        """Return the mover of pages from and to the file; no ring is needed."""
        return FileMover(arenas)  # type: ignore[arg-type]  # all are of this class

    def fetch(self, page: int) -> None:
        """Begin to read a page that is away."""
        self._file.fetch(self._stretches(page))

    def evict(self, page: int) -> None:
        """Write back and drop a page that is away; waits for the disk.

        Raises:
            MemoryError, OSError: writing failed; the only copy of the page is still in the page cache.
        """
        self.check_owner()
        self._file.drop(self._stretches(page))

    def measured(self) -> dict[str, int]:
        """Return bytes in memory, and bytes that the file takes on its disk; a page in use counts in both."""
        if not self.layout.nbytes:
            return self.planned()
        here = resident_bytes(self._file.address, self.layout.nbytes)
        return {self.near: here, "file": self._file.disk_bytes()}

    def _bring_in(self, first: int, last: int, zeros: bool = False) -> None:
        with self._file.fresh(self.layout.stretches(first, last)) as fresh:
            for page in range(first, last):
                if not zeros and page + 1 < last:
                    self.fetch(page + 1)
                with Uninterrupted():
                    self._file.bring_in(self._stretches(page), fresh, zeros)
                    self.resident = page + 1
                    self._file.release(self._stretches(page))

    def _stretches(self, page: int) -> list[tuple[int, int]]:
        return self.layout.stretches(page, page + 1)


_Task = tuple[Future[None], Callable[[int], None], int]


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    """Carry out tasks until there is None."""
    while (task := tasks.get()) is not None:
        future, act, page = task
        try:
            act(page)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)


class FileMover:
    """Reads and writes pages of a file on a thread of its own, in the order of the calls.

    So a slot is emptied before it is filled again, and memory holds at most as many visiting pages as there are slots.

    No ``ThreadPoolExecutor``: all of them share a lock, which a finalizer must not wait for.  The garbage collector may
    run in the middle of any pool's ``submit()``, and carry out the queued step of an optimizer that has died.
    """

    def __init__(self, arenas: Sequence[FileArena]) -> None:
        self._arenas = arenas

    def begin(self) -> None:
        """Start the thread."""
        self._owner = os.getpid()
        self._fetches: dict[int, Future[None]] = {}  # by slot
        self._evictions: list[Future[None]] = []
        self._visited: set[int] = set()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._tasks,), name="pagedopt-file", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt: nobody will call finish()
            self._tasks.put(None)
            raise

    def fetch(self, move: Move) -> None:
        """Read a page ahead, after the evictions so far."""
        self._visited.add(move.arena)
        read = Future[None]()
        self._tasks.put((read, self._arenas[move.arena].fetch, move.page))
        self._fetches[move.slot] = read

    def arrive(self, move: Move) -> None:
        """Wait until reading has begun; touching a byte that is not there yet waits for the disk."""
        if os.getpid() != self._owner:
            self._refuse()
        self._fetches.pop(move.slot).result()

    def evict(self, move: Move) -> None:
        """Write a page back and drop it, in the background."""
        written = Future[None]()
        self._tasks.put((written, self._arenas[move.arena].evict, move.page))
        self._evictions.append(written)  # not before: an interrupt between would leave finish() waiting for ever

    def finish(self) -> None:
        """Wait for the disk, and drop what the operating system has read ahead around the pages.

        Raises:
            MemoryError, OSError: writing a page failed; its only copy is still in the page cache.
            RuntimeError: this process was forked in the middle of the step.
        """
        if os.getpid() != self._owner:
            self._refuse()
        self._tasks.put(None)
        self._thread.join()
        for eviction in self._evictions:
            eviction.result()
        for number in self._visited:
            self._arenas[number].drop()

    def _refuse(self) -> NoReturn:
        """A forked process would wait for a thread that only its parent has."""
        raise RuntimeError(
            "this process was forked in the middle of a step of its parent, which ends it; fork before the backward"
        )
