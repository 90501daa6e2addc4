"""What a step does while gradients arrive one by one, in an order that is only expected.  No device and no torch.

:class:`Arrivals` gives actions to :func:`~.visits.passes`, as a plan does: a parameter's rows at hand are launched when
its gradient arrives, and a page when the last of the gradients that it needs arrives.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .policy import Move
from .visits import Action, Arrive, Evict, Fetch, Pause, Span, Update

#: Of a gradient.
Name = int
#: Pages of one slot whose gradients are all there, and that wait for the page in the slot, before it has to make room.
PATIENCE = 2


class Visit(NamedTuple):
    """The visit of a page, the launch that updates it, and the names of the gradients that this launch needs."""

    move: Move
    span: Span
    needs: tuple[Name, ...]


class Arrivals:
    """The actions of one step.  They end with a :class:`Pause` wherever a gradient is missing.

    Each slot serves its visits in the expected order and fetches the next page ahead.  If another page of the slot has
    all its gradients first, it waits until :data:`PATIENCE` of them do.  Then the page in the slot goes back as it is,
    to the end of the slot's line: one gradient that never comes does not keep all others in memory.

    Args:
        at_hand: the launches of rows that need no visit, by name.
        visits: in the order in which their last gradients are expected.

    Attributes:
        waits: whether all that can be done without another gradient has been asked for.
        done: arrived names whose launches have all been given; the caller may take them out.
        late: how often a page had its gradients before the one in its slot.
    """

    def __init__(self, at_hand: Mapping[Name, Sequence[Span]], visits: Sequence[Visit]) -> None:
        self._at_hand, self._visits = at_hand, visits
        self._of: dict[Name, list[int]] = {}  # numbers of the visits that need a name
        self._lines: dict[int, deque[int]] = {}  # by slot: numbers of visits to come
        for i, visit in enumerate(visits):
            self._lines.setdefault(visit.move.slot, deque()).append(i)
            for name in visit.needs:
                self._of.setdefault(name, []).append(i)
        self._blocked: dict[int, list[int]] = {slot: [] for slot in self._lines}  # of the line, with all gradients
        self._inside: dict[int, int] = {}
        self._missing = [len(visit.needs) for visit in visits]
        self._left = {name: len(numbers) for name, numbers in self._of.items()}
        self._launches: deque[Span] = deque()
        self._due: set[int] = set()  # those to be updated
        self._ready: list[int] = []  # a heap of those, but for the blocked
        self._arrived: set[Name] = set()
        self._ends = False
        self.waits, self.done, self.late = False, list[Name](), 0

    def arrive(self, name: Name) -> None:
        """Note that a gradient has arrived, which is asked for once for each name."""
        self.waits = False
        self._arrived.add(name)
        self._launches.extend(self._at_hand.get(name, ()))
        for i in self._of.get(name, ()):
            self._missing[i] -= 1
            if not self._missing[i]:
                self._due.add(i)
                heapq.heappush(self._ready, i)
        if not self._left.get(name):
            self.done.append(name)

    def end(self) -> None:
        """Note that no other gradient arrives: pages of which some have arrived are updated, others stay away."""
        self.waits, self._ends = False, True
        some = [i for i, v in enumerate(self._visits) if 0 < self._missing[i] < len(v.needs)]
        self._due.update(some)
        for slot, blocked in self._blocked.items():
            self._lines[slot] = deque(i for i in self._lines[slot] if i in self._due)
            some += blocked
            blocked.clear()
        self._ready += some
        heapq.heapify(self._ready)

    def actions(self) -> Iterator[Action]:
        """Yield the actions.  In a pause, call :meth:`arrive` or :meth:`end` before the next one is asked for."""
        for slot in self._lines:
            yield from self._fetch(slot)
        while True:
            while self._launches:
                yield Update(self._launches.popleft())
            while self._ready:
                yield from self._serve(heapq.heappop(self._ready))
            if self._ends:
                break
            self.waits = True
            yield Pause()
        for slot in [*self._inside]:
            yield from self._send_back(slot)

    def _fetch(self, slot: int) -> Iterator[Action]:
        """Fetch the next page of a slot: the first that has all its gradients, else the first in line."""
        line, blocked = self._lines[slot], self._blocked[slot]
        if line:
            self._inside[slot] = i = blocked[0] if blocked else line[0]
            line.remove(i)
            if blocked:
                heapq.heappush(self._ready, blocked.pop(0))
            yield Fetch(self._visits[i].move)

    def _serve(self, i: int) -> Iterator[Action]:
        """Update a page whose gradients are there, once it is in its slot."""
        move, span, needs = self._visits[i]
        if self._inside.get(move.slot) == i:
            yield Arrive(move)
            yield Update(span)
            yield Evict(move)
            del self._inside[move.slot]
            for name in needs:
                self._left[name] -= 1
                if not self._left[name] and name in self._arrived:
                    self.done.append(name)
        else:
            self._blocked[move.slot].append(i)
            if self._inside[move.slot] in self._due:
                return
            self.late += not self._ends
            if not self._ends and len(self._blocked[move.slot]) < PATIENCE:
                return
            yield from self._send_back(move.slot)
        yield from self._fetch(move.slot)

    def _send_back(self, slot: int) -> Iterator[Action]:
        """Bring the page in a slot back as it is; unless the step ends, it is fetched again."""
        i = self._inside.pop(slot)
        yield Arrive(self._visits[i].move)
        yield Evict(self._visits[i].move)
        if not self._ends:
            self._lines[slot].append(i)
