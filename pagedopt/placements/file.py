"""State of parameters on a CPU: the first pages in memory, the others in a file, and in memory while in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from ..paging.pages import Layout
from ..paging.visits import Mover
from ..system.files.host import check_disk, check_host, resident_bytes
from ..system.files.state_file import StateFile, state_folder
from ..system.interrupts import Uninterrupted
from .arena import Arena
from .movers import FileMover, Ring


class FileArena(Arena):
    """A memory-mapped file without a name, in whose range resident pages are ordinary memory.

    So what is resident costs no writing, and the disk holds no more than what is away.  A forked process shares what is
    away, and may read it.
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
        self._away = layout, -1, list[tuple[int, int]]()  # the stretches of pages that are away, and when that was so
        if not layout.nbytes:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        folder = state_folder()
        here, away = layout.stretches(0, resident), layout.stretches(resident, layout.pages)
        check_disk(folder, sum(n for _, n in away), "optimizer state")
        check_host(sum(n for _, n in here), "optimizer state")
        with Uninterrupted():
            self._file = StateFile(folder, layout.nbytes)
        try:
            self._file.reserve(away)
            self._bring_in(0, resident, zeros=True)
        except BaseException:
            self._file.close()
            raise
        self.tensor = torch.frombuffer(self._file.memory, dtype=torch.uint8)

    def move(self, resident: int) -> None:
        """Page by page, each at its own address.

        Moving up makes a mapping or two for each section and call, whatever the number of pages; moving down gives
        them back.
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
        self.drop()  # what was read further ahead than asked for, and what others have read

    def check_owner(self) -> None:
        """What is in memory is each process's own.

        Raises:
            RuntimeError: pages are in a file, and this process was forked from the one that made it.
        """
        if self.resident < self.layout.pages:
            self._file.check_owner()

    def prepare(self) -> None:
        """Drop what others have brought into memory: who read or loaded a checkpoint touched every page."""
        if self.resident < self.layout.pages:
            self._file.check_owner()
            self.drop()

    def drop(self) -> None:
        """Write back and drop every page that is away.

        Raises:
            MemoryError, OSError: writing failed.
        """
        if self.resident < self.layout.pages:
            layout, resident, stretches = self._away
            if layout is not self.layout or resident != self.resident:
                layout, resident = self.layout, self.resident
                self._away = layout, resident, (stretches := layout.stretches(resident, layout.pages))
            self._file.drop(stretches, rest=True)

    def mover(self, arenas: Sequence[Arena], ring: Callable[[torch.device], Ring]) -> Mover:
        """From and to the file; no ring is needed."""
        return FileMover(cast(Sequence[FileArena], arenas))

    def fetch(self, page: int) -> None:
        """Begin to read a page that is away."""
        self._file.fetch(self._stretches(page))

    def fetch_bytes(self, offset: int, nbytes: int) -> None:
        """Begin to read a part of one, of whole pages of the operating system."""
        self._file.fetch([(offset, nbytes)])

    def evict_bytes(self, offset: int, nbytes: int) -> None:
        """Write such a part back and drop it, as :meth:`evict` does."""
        self.check_owner()
        self._file.drop([(offset, nbytes)])

    def evict(self, page: int) -> None:
        """Write back and drop a page that is away; waits for the disk.

        Raises:
            MemoryError, OSError: writing failed; the page is in the page cache still, and nowhere else.
        """
        self.check_owner()
        self._file.drop(self._stretches(page))

    def measured(self) -> dict[str, int]:
        """Bytes that are in memory, and that the file takes on its disk (a page in use is in both)."""
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
