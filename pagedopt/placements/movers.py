"""How pages visit a GPU: copied through a ring of device slots on streams of its own."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from ..paging.pages import Layout
from ..paging.policy import SLOTS, Move
from ..system import driver
from ..system.copies import Copy, joined
from ..system.driver import Call, Calls
from ..system.graphs import Node, Nodes
from ..system.warn import log

#: If an arena has one page, its used elements are copied, rounded up to a multiple of this: sections stay aligned.
COPY_MULTIPLE = 1024


class Staged(Protocol):
    """An arena as :class:`StagedMover` needs it."""

    layout: Layout
    tensor: torch.Tensor


class Slots(Protocol):
    """Device memory for visiting pages."""

    def address(self, slot: int) -> int:
        """Return the address of a slot."""


class SlotsInUse(RuntimeError):
    """A step needs the slots in the middle of another one's queueing, in a finalizer or signal handler."""

    def __init__(self, ring: Ring) -> None:
        super().__init__("the slots are in use by a step that this thread is queueing; try again when it is done")
        self.ring = ring


class GraphSlots:
    """Slots that a captured graph owns: its replays are not ordered against steps that use a ring."""

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.memory = driver.DeviceMemory(SLOTS * slot_bytes, device.index)
        self.nbytes = self.memory.nbytes

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self.memory.address + slot * self.slot_bytes


class _Use:
    """One use of the slots."""


class Ring:
    """Device memory for visiting pages, with a copy stream for each direction.

    Optimizers share it (:func:`ring_for`).  Events order the copies: a slot is filled after the page before it has
    left, even if another optimizer updated that page on another stream.  One thread at a time queues the visits of a
    step, holding :attr:`lock`; what is in :attr:`behind` is called when it has.  :attr:`copied_bytes` counts [to the
    device, to the host].
    """

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.memory = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self.nbytes = self.memory.nbytes
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.up.wait_stream(torch.cuda.current_stream(device))  # earlier users of this memory may still run there
        for stream in (self.up, self.down):
            self.memory.record_stream(stream)
        self.began, self.ended = driver.Event(device.index), driver.Event(device.index)
        self.filled, self.updated, self.emptied = ([driver.Event(device.index) for _ in range(SLOTS)] for _ in range(3))
        self.copied_bytes = [0, 0]
        self.lock = threading.RLock()
        self._user: weakref.ref[object] | None = None
        self.behind: list[Callable[[], object]] = []

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self.memory.data_ptr() + slot * self.slot_bytes

    def acquire(self, user: object) -> None:
        """Take the slots, to queue the visits of one step; wait while another thread has them.

        Args:
            user: whoever gives them back; if it dies before, as by an interrupt, they are free.

        Raises:
            SlotsInUse: this thread has them.
        """
        self.lock.acquire()
        try:
            self.check()
        except BaseException:
            self.lock.release()
            raise
        self._user = weakref.ref(user)

    def check(self) -> None:
        """Raise SlotsInUse if this thread has them; wait while another one has them."""
        with self.lock:
            if self._user is not None and self._user() is not None:
                raise SlotsInUse(self)

    def release(self) -> None:
        """Give the slots back, as all visits are queued; then do what has had to wait for that."""
        behind, self.behind = self.behind, []
        self._user = None
        self.lock.release()
        for act in behind:
            try:
                act()
            except Exception as error:  # it is none of the step that had the slots
                log.warning("the last step of an optimizer that has died was not launched: %s", str(error))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block that has the slots; see :meth:`acquire`."""
        use = _Use()
        self.acquire(use)
        try:
            yield
        finally:
            self.release()

    def launched(self, stream: int, copied_bytes: Sequence[int]) -> None:
        """Note that a graph was launched on a stream, which was behind :attr:`ended`; slots belong to it to its end."""
        try:
            self.ended.record(stream)
        except BaseException:
            self.ended.record(stream)  # once more: another optimizer would come too early at these slots
            raise
        self.ended.hold(self.down.cuda_stream)  # torch gives the slots' memory back behind what `down` was given
        for direction, nbytes in enumerate(copied_bytes):
            self.copied_bytes[direction] += nbytes


_rings: dict[torch.device, weakref.WeakSet[Ring]] = {}
_rings_lock = threading.Lock()


def ring_for(device: torch.device, slot_bytes: int) -> Ring:
    """Return the ring of a device with slots of exactly this size, as estimates expect; optimizers share it.

    Raises:
        torch.OutOfMemoryError: the device has no room for the slots.
    """
    with _rings_lock:
        rings = _rings.setdefault(device, weakref.WeakSet())
        for ring in rings:
            if ring.slot_bytes == slot_bytes:
                return ring
        ring = Ring(device, slot_bytes)
        rings.add(ring)
        return ring


def _visiting_numel(layout: Layout) -> int:
    """Return how many elements of a section are copied with a page; an arena's only page may be far from full."""
    least = max(layout.block, COPY_MULTIPLE)
    return min(layout.page_numel, -(-layout.numel // least) * least) if layout.pages == 1 else layout.page_numel


def slot_bytes(layout: Layout) -> int:
    """Return the bytes of a slot for the pages of a layout."""
    return int(_visiting_numel(layout) * sum(layout.itemsizes))


def slot_offset(layout: Layout, section: int) -> int:
    """Return the byte of a slot at which a section of the page begins."""
    return int(_visiting_numel(layout) * sum(layout.itemsizes[:section]))


class StagedMover:
    """Copies pages through a ring, in stream order, for updates launched on ``stream``; the host never waits."""

    def __init__(self, ring: Ring, arenas: Sequence[Staged], stream: int) -> None:
        self.ring, self.arenas, self.stream = ring, arenas, stream

    def begin(self) -> None:
        """Let fetches wait for work that was queued before: gradients, a loaded state, a step on another stream."""
        self.ring.acquire(self)
        try:
            self.fetch_behind_all()
        except BaseException:
            self.ring.release()
            raise

    def fetch_behind_all(self) -> None:
        """:meth:`begin`, by whoever has the ring."""
        self.ring.began.record(self.stream)
        self.ring.began.hold(self.ring.up.cuda_stream)
        self.ring.ended.hold(self.ring.up.cuda_stream)

    def fetch(self, move: Move) -> None:
        """Copy a page into its slot as soon as the slot is empty."""
        up = self.ring.up.cuda_stream
        self.ring.emptied[move.slot].hold(up)
        self._copy(move, up, to_device=True)
        self.ring.filled[move.slot].record(up)

    def arrive(self, move: Move) -> None:
        """Let the next launches wait for the page."""
        self.ring.filled[move.slot].hold(self.stream)

    def evict(self, move: Move) -> None:
        """Copy a page back after the launches so far."""
        down = self.ring.down.cuda_stream
        self.ring.updated[move.slot].record(self.stream)
        self.ring.updated[move.slot].hold(down)
        self._copy(move, down, to_device=False)
        self.ring.emptied[move.slot].record(down)

    def finish(self) -> None:
        """Let work that is queued next wait until all pages are back."""
        try:
            self.wait_for_all()
        finally:
            self.ring.release()

    def wait_for_all(self) -> None:
        """:meth:`finish`, by whoever keeps the ring."""
        self.ring.ended.record(self.ring.down.cuda_stream)
        self.ring.ended.hold(self.stream)

    def _copy(self, move: Move, stream: int, to_device: bool) -> None:
        for copy in copies_of(self.ring, self.arenas[move.arena], move, to_device):
            copy.queue(stream)
            self.ring.copied_bytes[not to_device] += copy.ranges * copy.nbytes


def copies_of(slots: Slots, arena: Staged, move: Move, to_device: bool) -> list[Copy]:
    """Return the copies that bring a page into its slot, or back: sections of one size are one copy."""
    base, slot, layout = arena.tensor.data_ptr(), slots.address(move.slot), arena.layout
    visiting = _visiting_numel(layout)
    found = []
    for section, (offset, nbytes) in enumerate(layout.extents(move.page)):
        nbytes = min(nbytes, int(visiting * layout.itemsizes[section]))
        found.append(Copy(slot + slot_offset(layout, section), base + offset, nbytes))
    return [copy if to_device else copy.back() for copy in joined(found)]


class NodeMover:
    """Adds the visits of pages to a CUDA graph, as nodes behind each other where :class:`StagedMover` uses events.

    Args:
        nodes: the graph.
        slots: those of a ring, or the graph's own.
        arenas: see :class:`StagedMover`.
        behind: nodes that all others come behind.

    Attributes:
        next_launch_behind: nodes that the next launch comes behind.
        copied_bytes: of one launch of the graph, [to the device, to the host].
    """

    def __init__(self, nodes: Nodes, slots: Slots, arenas: Sequence[Staged], behind: Sequence[Node] = ()) -> None:
        self._nodes, self._slots, self._arenas = nodes, slots, arenas
        self._up = self.next_launch_behind = self._down = tuple(behind)
        self._filled: dict[int, Node] = {}
        self._emptied: dict[int, Node] = {}
        self.copied_bytes = [0, 0]

    def begin(self) -> None:
        """Do nothing: a graph begins where it is launched."""

    def fetch(self, move: Move) -> None:
        """Copy a page into its slot, behind the page before it there."""
        emptied = (self._emptied.pop(move.slot),) if move.slot in self._emptied else ()
        self._up = self._copy(move, (*self._up, *emptied), to_device=True)
        self._filled[move.slot] = self._up[0]

    def arrive(self, move: Move) -> None:
        """Put the next launches behind the page's copy."""
        self.next_launch_behind = (*self.next_launch_behind, self._filled.pop(move.slot))

    def launched(self, node: Node) -> None:
        """Note the launch behind :attr:`next_launch_behind`."""
        self.next_launch_behind = (node,)

    def evict(self, move: Move) -> None:
        """Copy a page back behind the launches so far."""
        self._down = self._copy(move, (*self._down, *self.next_launch_behind), to_device=False)
        self._emptied[move.slot] = self._down[0]

    def finish(self) -> None:
        """Do nothing: what comes behind a graph waits for all of it."""

    @property
    def last(self) -> tuple[Node, ...]:
        """Nodes that all others come before."""
        return self._down

    def _copy(self, move: Move, behind: tuple[Node, ...], to_device: bool) -> tuple[Node, ...]:
        for copy in copies_of(self._slots, self._arenas[move.arena], move, to_device):
            behind = (self._nodes.copy(copy, tuple(dict.fromkeys(behind))),)
            self.copied_bytes[not to_device] += copy.ranges * copy.nbytes
        return behind


class CallsOfVisit(NamedTuple):
    """The calls of one page's visit, and the bytes that are copied in each direction."""

    fetch: Calls
    arrive: Calls
    evict: Calls
    nbytes: int


KnownCalls = dict[Move, CallsOfVisit]


class OwnMover(StagedMover):
    """Copies pages through a ring that no other optimizer uses, by calls that are made once.

    So nobody has to take the ring, and the visits of one step may be queued by two threads, one after the other.

    Args:
        known: kept by the caller while ring, arenas and stream stay; filled here.
    """

    def __init__(self, ring: Ring, arenas: Sequence[Staged], stream: int, known: KnownCalls) -> None:
        super().__init__(ring, arenas, stream)
        self._known = known

    def begin(self) -> None:
        """As of :class:`StagedMover`."""
        self.fetch_behind_all()

    def fetch(self, move: Move) -> None:
        """As of :class:`StagedMover`."""
        calls = self._calls(move)
        calls.fetch()
        self.ring.copied_bytes[0] += calls.nbytes

    def arrive(self, move: Move) -> None:
        """As of :class:`StagedMover`."""
        self._calls(move).arrive()

    def evict(self, move: Move) -> None:
        """As of :class:`StagedMover`."""
        calls = self._calls(move)
        calls.evict()
        self.ring.copied_bytes[1] += calls.nbytes

    def finish(self) -> None:
        """As of :class:`StagedMover`."""
        self.wait_for_all()

    def _calls(self, move: Move) -> CallsOfVisit:
        if (known := self._known.get(move)) is None:
            known = self._known[move] = self._made(move)
        return known

    def _made(self, move: Move) -> CallsOfVisit:
        ring, up, down = self.ring, self.ring.up.cuda_stream, self.ring.down.cuda_stream
        filled, updated, emptied = (int(each[move.slot].handle) for each in (ring.filled, ring.updated, ring.emptied))
        copies = copies_of(ring, self.arenas[move.arena], move, to_device=True)
        fetched = [call for copy in copies for call in copy.calls(up)]
        brought_back = [call for copy in copies for call in copy.back().calls(down)]
        return CallsOfVisit(
            Calls([_wait(up, emptied), *fetched, _record(filled, up)]),
            Calls([_wait(self.stream, filled)]),
            Calls([_record(updated, self.stream), _wait(down, updated), *brought_back, _record(emptied, down)]),
            sum(copy.ranges * copy.nbytes for copy in copies),
        )


def _wait(stream: int, event: int) -> Call:
    return "cuStreamWaitEvent", stream, event, 0


def _record(event: int, stream: int) -> Call:
    return "cuEventRecord", event, stream
