"""The order of a card's events, and its memory: streams as queues, and for all bytes who touched them and behind what.

Each operation has a *clock*: of each stream, how many of its operations have ended before it begins, whatever happens.
Two operations that touch the same bytes, one of them writing, must be ordered by that; ``faults`` names those that are
not.  So one run finds a wait that is missing, in whatever order it happens to play.

Beside it bytes are moved for real, as late as possible: an operation is carried out when somebody waits for it, and of
several that may come next, that of the stream that comes first in ``first``.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: How many operations of each stream have ended.
Clock = dict[int, int]
#: (first byte, last byte + 1).
Range = tuple[int, int]
#: Bytes that an operation has read, and those that it has written.
Touched = tuple[Iterable[Range], Iterable[Range]]
Work = Callable[[], Touched]
#: The host, and what gives memory back, among the streams of a clock.
HOST, FREED = -1, -2
REGION = 1 << 30
_MAP_NORESERVE = 0x4000
#: What memory is full of that nobody has written, or that was given back: as a float it is no number.
NOTHING = 0xFF
#: Bytes of a part of memory, whose accesses are listed together.
_PART = 1 << 16


def join(clock: Clock, other: Clock) -> None:
    """Put a clock behind another one."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def is_behind(clock: Clock, other: Clock, own: int | None = None) -> bool:
    """Whether a clock is behind all that streams have done in another one, but for the last of ``own``."""
    return all(stream < 0 or clock.get(stream, 0) >= number - (stream == own) for stream, number in other.items())


class Operation(NamedTuple):
    """What a stream is to do; ``clock`` counts itself."""

    clock: Clock
    what: str
    work: Work


class Access(NamedTuple):
    """Bytes that an operation has touched."""

    first: int
    end: int
    writes: bool
    stream: int
    number: int
    what: str

    def __str__(self) -> str:
        by = {HOST: "the host", FREED: "torch's allocator"}.get(self.stream, f"stream {self.stream}")
        return f"{self.what} (by {by}) {'writes' if self.writes else 'reads'}"


@dataclass(eq=False)
class Event:
    """What had been given to a stream when it was recorded; in a capture, the graph that it belongs to."""

    clock: Clock = field(default_factory=dict)
    graph: Graph | None = None


@dataclass(eq=False)
class Graph:
    """What was asked of streams during a capture: replays ask for it again, the other streams being new ones.

    A node of a graph that is built has a stream of its own, and an event behind it; ``begun`` comes before all nodes.
    """

    origin: int
    calls: list[tuple[int, str, Any]] = field(default_factory=list)  # stream, what, work or event
    begun: Event | None = None
    nodes: list[Event] = field(default_factory=list)
    last: Event | None = None  # behind its last launch
    lanes: dict[int, int] = field(default_factory=dict)  # its streams in each launch


class Order:
    """All streams of a card, and its host.

    Args:
        first: streams in the order in which they may go on, the others come behind.
        early: carry out everything at once, not as late as possible.
    """

    def __init__(self, first: Sequence[int] = (), early: bool = False) -> None:
        self.first, self.early = {stream: i for i, stream in enumerate(first)}, early
        self.clocks: dict[int, Clock] = defaultdict(dict)  # of what a stream is given next
        self.queues: dict[int, deque[Operation]] = defaultdict(deque)
        self.done: Clock = defaultdict(int)
        self._over: Clock = {}  # what was done when the host last waited for everything
        self.captures: dict[int, Graph] = {}
        self.faults: list[str] = []
        self._streams, self._runs = 0, False
        self._seen: dict[int, list[Access]] = defaultdict(list)  # by part
        self._freed: deque[tuple[Clock, Range, Callable[[], None]]] = deque()

    # --- what the host asks for

    def stream(self) -> int:
        """Return a new stream."""
        self._streams += 1
        return self._streams

    def submit(self, stream: int, what: str, work: Work) -> None:
        """Give work to a stream; into the graph, if it is being captured."""
        if (graph := self.captures.get(stream)) is not None:
            graph.calls.append((stream, what, work))
            return
        clock = self.behind(stream)
        clock[stream] = max(clock.get(stream, 0), self.done[stream]) + 1
        self.queues[stream].append(Operation(dict(clock), what, work))
        if self.early:
            self.run()

    def behind(self, stream: int) -> Clock:
        """Return the clock of a stream, which is behind all that the host has done and waited for."""
        join(clock := self.clocks[stream], self.clocks[HOST])
        return clock

    def record(self, event: Event, stream: int) -> None:
        """Let an event stand for all that the stream was given so far."""
        event.graph = self.captures.get(stream)
        event.clock = dict(self.behind(stream))
        if event.graph is not None:
            event.graph.calls.append((stream, "record", event))

    def hold(self, stream: int, event: Event) -> None:
        """Put what a stream is given from now on behind an event."""
        if event.graph is not None:
            self.captures.setdefault(stream, event.graph)
            event.graph.calls.append((stream, "hold", event))
        elif stream in self.captures:
            self.faults.append("a stream that is being captured waits for work outside of the capture")
        else:
            over = self._over
            join(self.behind(stream), {s: number for s, number in event.clock.items() if number > over.get(s, 0)})

    def wait(self, clock: Clock | None = None) -> None:
        """Let the host wait; None: for everything, and what was done so far then is behind nobody any more."""
        goal = self._all() if clock is None else clock
        self.run(goal)
        join(self.clocks[HOST], goal)
        if clock is None and not any(self.queues.values()):
            self._seen.clear()  # what was freed is not allocated: ``Memory.check`` finds who touches it
            self._over, host = dict(self.done), self.clocks[HOST].get(HOST, 0)
            self.clocks.clear()
            self.clocks[HOST] = {HOST: host}

    def host(self, what: str, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> None:
        """Note what the host does itself."""
        clock = self.clocks[HOST]
        clock[HOST] = clock.get(HOST, 0) + 1
        self._touch(HOST, clock, what, reads, writes)

    def allocate(self, stream: int, memory: Range) -> None:
        """Note that memory comes from torch's allocator: what its stream was given so far may still use it."""
        if stream not in self.captures:
            clock = {stream: 0, **self.behind(stream)}
            self._touch(stream, clock, "an earlier user of this memory", (), [memory])

    def free(self, stream: int, users: Iterable[int], memory: Range, end: Callable[[], None]) -> None:
        """Give memory back once what was given so far to its stream, and to its other users, has ended.

        It happens as early as possible, and counts as a write; ``end`` makes the bytes useless.
        """
        clock = dict(self.behind(stream))
        for user in users:
            join(clock, self.clocks[user])
        clock[FREED] = clock.get(FREED, 0)
        self._freed.append((clock, memory, end))
        self._end_freed()

    def capture(self, stream: int) -> Graph:
        """Begin to capture a stream."""
        graph = self.captures[stream] = Graph(stream)
        return graph

    def end_capture(self, graph: Graph) -> None:
        """End a capture, of all streams that have joined it."""
        self.captures = {stream: other for stream, other in self.captures.items() if other is not graph}

    def add_node(self, graph: Graph, behind: Sequence[Event], what: str, asked: Any) -> Event:
        """Add a node to a graph, ``what`` being "external" for one that records an event; return what is behind it."""
        if graph.begun is None and not behind:
            graph.begun = Event()
            graph.calls.insert(0, (graph.origin, "record", graph.begun))
        lane, node = self.stream(), Event()
        for other in behind or [graph.begun]:
            graph.calls.append((lane, "hold", other))
        graph.calls += [(lane, what, asked), (lane, "record", node)]
        graph.nodes.append(node)
        return node

    def launch(self, graph: Graph, stream: int) -> None:
        """Launch a graph that was built: behind its own launches so far, and before what the stream is given next."""
        if graph.last is not None:
            self.hold(stream, graph.last)
        self.replay(graph, stream, graph.lanes)
        graph.last = Event()
        self.record(graph.last, stream)

    def replay(self, graph: Graph, stream: int, lanes: dict[int, int] | None = None) -> None:
        """Give a stream what was captured, and other streams (``lanes``; None: new ones) what theirs were given."""
        streams, events = {} if lanes is None else lanes, dict[int, Event]()
        streams[graph.origin] = stream
        for captured, what, asked in graph.calls:
            if captured not in streams:
                streams[captured] = self.stream()
            on = streams[captured]
            if what == "record":
                self.record(events.setdefault(id(asked), Event()), on)
            elif what == "hold":
                self.hold(on, events[id(asked)])
            elif what == "external":
                self.record(asked, on)
            else:
                self.submit(on, f"captured {what}", asked)

    # --- what happens

    def run(self, clock: Clock | None = None) -> None:
        """Carry out what a clock is behind, and no more; None: everything."""
        if self._runs:  # garbage may be collected in the middle of some work, and wait for all
            return
        goal = self._all() if clock is None else clock
        while late := [s for s, number in goal.items() if s >= 0 and self.done[s] < number]:
            late.sort(key=lambda s: (self.first.get(s, len(self.first)), s))
            ready = next(s for s in late if is_behind(self.done, self.queues[s][0].clock, s))
            operation = self.queues[ready][0]
            self._runs = True
            try:
                reads, writes = operation.work()
            finally:
                self._runs = False
            self.queues[ready].popleft()
            self._touch(ready, operation.clock, operation.what, reads, writes)
            self.done[ready] += 1
            self._end_freed()

    def _all(self) -> Clock:
        return {stream: clock[stream] for stream, clock in self.clocks.items() if stream >= 0 and stream in clock}

    def _end_freed(self) -> None:
        for _ in range(len(self._freed)):
            clock, memory, end = self._freed.popleft()
            if is_behind(self.done, clock):
                clock[FREED] = self.done[FREED] = self.done[FREED] + 1
                self._touch(FREED, clock, "giving it back to torch", (), [memory])
                end()
            else:
                self._freed.append((clock, memory, end))

    def _touch(self, stream: int, clock: Clock, what: str, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """Compare with all who touched these bytes before; forget those whom this one stands for."""
        number = clock[stream]
        for writing, ranges in ((False, reads), (True, writes)):
            for whole in ranges:
                for part in range(whole[0] // _PART, -(-whole[1] // _PART)):
                    first, end = max(whole[0], part * _PART), min(whole[1], (part + 1) * _PART)
                    kept = [Access(first, end, writing, stream, number, what)]
                    for other in self._seen[part]:
                        if other.first < end and first < other.end:
                            ordered = clock.get(other.stream, 0) >= other.number
                            if not ordered and (writing or other.writes):
                                self._complain(other, kept[0])
                            stands_for_it = ordered and (writing or not other.writes)
                            if stands_for_it and first <= other.first and other.end <= end:
                                continue
                        kept.append(other)
                    self._seen[part] = kept

    def _complain(self, other: Access, this: Access) -> None:
        text = f"{this} what {other}, and nothing orders the two"
        if text not in self.faults:
            self.faults.append(text)


class Memory:
    """The region: what of it is in use, and its bytes."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.region = mmap.mmap(-1, REGION, flags)  # it stays while tensors view it
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.region))
        self._next, self._used, self._sizes = self.base, list[int](), dict[int, int]()
        self.faults: list[str] = []

    def knows(self, address: int) -> bool:
        """Whether an address is the card's."""
        return self.base <= address < self.base + REGION

    def reserve(self, nbytes: int, align: int = 512) -> int:
        """Return an address that was never used."""
        address = -(-self._next // align) * align
        self._next = address + nbytes
        assert self._next <= self.base + REGION, "the played card is full"
        return address

    def use(self, address: int, nbytes: int, fill: int | None = NOTHING) -> int:
        """Let memory be used, full of one byte."""
        bisect.insort(self._used, address)
        self._sizes[address] = nbytes
        if fill is not None:
            ctypes.memset(address, fill, nbytes)
        return address

    def take(self, nbytes: int) -> int:
        """Return the address of new memory."""
        return self.use(self.reserve(max(1, nbytes)), nbytes)

    def drop(self, address: int) -> Range:
        """Let memory be used no more; return what it was."""
        self._used.remove(address)
        return address, address + self._sizes.pop(address)

    def size(self, address: int) -> int:
        """Return the bytes of memory in use that begins at an address."""
        return self._sizes[address]

    def check(self, what: str, *ranges: Range) -> None:
        """Note who touches memory that nobody has allocated, or that was freed."""
        for first, end in ranges:
            at = first
            while at < end and (i := bisect.bisect(self._used, at)):
                until = self._used[i - 1] + self._sizes[self._used[i - 1]]
                if until <= at:
                    break
                at = until
            if at < end:
                self.faults.append(f"{what} touches {end - at:,} bytes that are not allocated")

    def at(self, address: int, nbytes: int) -> Any:
        """Return bytes; they keep the region, and nothing in it."""
        raw: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        raw.region = self.region
        return raw
