"""What a step does, as a value, and the loop that carries it out: replayed on plain values, whatever fails."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedopt.paging import visits
from pagedopt.paging.policy import SLOTS, Move, schedule
from pagedopt.paging.visits import Action, Arrive, Evict, Fetch, Mover, Span, Update, passes, plan

Moves = list[tuple[Move, Span]]
RESIDENT = (0, 7)


class Trace:
    """A mover that moves nothing, remembers all, and refuses what a real one could not carry out.

    ``fails`` names the call that raises, e.g. ``("arrive", 2)`` for page 2.
    """

    def __init__(self, fails: tuple[str, int] | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.slots: dict[int, tuple[Move, str]] = {}
        self.most = 0
        self.open = False
        self.fails = fails

    def begin(self) -> None:
        assert not self.open
        self.open = True
        self._note("begin", -1)

    def fetch(self, move: Move) -> None:
        self._note("fetch", move.page)
        assert self.open
        assert move.slot not in self.slots, f"slot {move.slot} is in use"
        self.slots[move.slot] = (move, "fetched")
        self.most = max(self.most, len(self.slots))

    def arrive(self, move: Move) -> None:
        self._note("arrive", move.page)
        assert self.slots[move.slot] == (move, "fetched")
        self.slots[move.slot] = (move, "here")

    def update(self, span: Span | None) -> None:
        """What launches every span."""
        assert span is not None
        if span == RESIDENT:
            self._note("resident", -1)
            return
        self._note("update", span[0])
        assert [m.page for m, s in self.slots.values() if s == "here"] == [span[0]], "not the page that is here"

    def evict(self, move: Move) -> None:
        self._note("evict", move.page)
        assert self.slots.pop(move.slot) == (move, "here")

    def finish(self) -> None:
        self._note("finish", -1)
        assert self.open
        self.open = False

    def _note(self, verb: str, page: int) -> None:
        self.calls.append((verb, page))
        if self.fails == (verb, page):
            raise OSError(f"{verb} {page}")

    def of(self, verb: str) -> list[int]:
        """The pages of all calls of one kind, in order."""
        return [page for name, page in self.calls if name == verb]


def cyclic(count: int, slots: int = SLOTS) -> Moves:
    """Moves of pages 100 …, whose spans begin with the number of their page."""
    return [(m, (m.page, m.page + 1)) for m in schedule([(0, 100 + i) for i in range(count)], slots)]


@st.composite
def some_moves(draw: st.DrawFn) -> tuple[Moves, int]:
    """Moves of which a part was left out, as for parameters without a gradient, and a number of slots."""
    slots = draw(st.integers(1, 5))
    every = cyclic(draw(st.integers(0, 20)), slots)
    keep = draw(st.lists(st.booleans(), min_size=len(every), max_size=len(every)))
    return [move for move, kept in zip(every, keep, strict=True) if kept], slots


def carry_out(actions: Iterable[Action], launch: Callable[[Span | None], object], mover: Mover | None = None) -> None:
    """Execute a plan, to the end."""
    for _ in passes(actions, launch, mover):
        pass


def run(moves: Moves, slots: int = SLOTS, resident: Span | None = RESIDENT, trace: Trace | None = None) -> Trace:
    trace = trace or Trace()
    carry_out(plan(resident, moves, slots), trace.update, trace)
    return trace


# ---- the plan ----


def test_a_plan_is_a_list_to_read() -> None:
    assert doctest.testmod(visits) == (0, 1)
    (a, x), (b, y), (c, z) = moves = cyclic(3, 2)
    assert plan(RESIDENT, moves, 2) == [
        *(Fetch(a), Fetch(b), Update(RESIDENT)),
        *(Arrive(a), Update(x), Evict(a), Fetch(c)),
        *(Arrive(b), Update(y), Evict(b)),
        *(Arrive(c), Update(z), Evict(c)),
    ]


@given(some_moves())
@example((cyclic(9), SLOTS))
@example(([m for i, m in enumerate(cyclic(9)) if i not in (1, 2)], SLOTS))
def test_every_page_is_updated_once_while_it_is_in_its_slot(case: tuple[Moves, int]) -> None:
    moves, slots = case
    trace = run(moves, slots)
    pages = [move.page for move, _ in moves]
    for verb in ("fetch", "arrive", "update", "evict"):
        assert trace.of(verb) == pages, verb
    assert trace.of("resident") == [-1]
    assert not trace.slots, "a page is left in its slot"
    assert trace.most <= slots
    assert (trace.calls[0][0], trace.calls[-1][0]) == ("begin", "finish")


@given(st.integers(0, 12), st.integers(1, 5))
def test_pages_are_fetched_as_early_as_slots_allow(count: int, slots: int) -> None:
    trace = run(cyclic(count, slots), slots)
    first = [verb for verb, _ in trace.calls[1 : 1 + min(slots, count)]]
    assert first == ["fetch"] * min(slots, count), "the first pages come while the resident part is updated"
    for page in range(100 + slots, 100 + count):
        assert trace.calls[trace.calls.index(("evict", page - slots)) + 1] == ("fetch", page)


def test_never_more_at_a_time_than_slots() -> None:
    trace = run(cyclic(9, 4), 2)
    assert trace.most == 2
    assert trace.of("update") == list(range(100, 109))


@pytest.mark.parametrize("resident", [None, (3, 3)])
def test_no_resident_part_no_launch(resident: Span | None) -> None:
    launches = [step.span for step in plan(resident, cyclic(2)) if isinstance(step, Update)]
    assert launches == [(100, 101), (101, 102)]


def test_nothing_at_all() -> None:
    assert run([], resident=None).calls == [("begin", -1), ("finish", -1)]


def test_no_slots_is_refused_before_anything_happens() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        plan(None, cyclic(1), 0)


# ---- carrying it out ----


def test_without_a_mover_there_are_launches_alone() -> None:
    done: list[Span | None] = []
    carry_out([Update((3, 5)), Update(None)], done.append)
    assert done == [(3, 5), None]
    with pytest.raises(ValueError, match=r"Fetch\(move=.*page=100.*needs a mover"):
        carry_out(plan(RESIDENT, cyclic(1)), done.append)
    assert done == [(3, 5), None]


@given(some_moves(), st.randoms())
def test_any_order_that_has_a_slot_for_every_page_is_carried_out(case: tuple[Moves, int], random) -> None:  # type: ignore[no-untyped-def]
    """As one that fetches under the forward and updates in the backward would have it."""
    moves = cyclic(len(case[0]), max(1, len(case[0])))
    steps: list[Action] = [Fetch(move) for move, _ in moves]
    for move, span in random.sample(moves, len(moves)):
        steps += [Arrive(move), Update(span), Evict(move)]
    trace = Trace()
    carry_out([*steps, Update(RESIDENT)], trace.update, trace)
    assert sorted(trace.of("update")) == sorted(trace.of("evict")) == [move.page for move, _ in moves]
    assert trace.calls[-2:] == [("resident", -1), ("finish", -1)]


class Stop(Exception):
    """What whoever makes the steps, or launches them, may raise."""


def until(steps: list[Action], count: int, trace: Trace, how: str) -> None:
    """Carry out the first ``count`` steps, and then stop in one of three ways."""

    def some() -> Iterator[Action]:
        yield from steps[:count]
        if how == "steps":
            raise Stop
        if how == "launch":
            yield Update((-1, -1))

    def launch(span: Span | None) -> None:
        if span == (-1, -1):
            raise Stop
        trace.update(span)

    carry_out(some(), launch, trace)


@given(some_moves(), st.sampled_from(["steps", "launch", "end"]), st.data())
def test_stopping_early_brings_back_what_was_fetched(case: tuple[Moves, int], how: str, data: st.DataObject) -> None:
    moves, slots = case
    steps, trace = plan(RESIDENT, moves, slots), Trace()
    count = data.draw(st.integers(0, len(steps)))
    away = sum(isinstance(step, Fetch) for step in steps[:count])
    if how != "end":
        with pytest.raises(Stop):
            until(steps, count, trace, how)
    elif away > sum(isinstance(step, Evict) for step in steps[:count]):
        with pytest.raises(ValueError, match="ends with pages in their slots"):
            until(steps, count, trace, how)
    else:
        until(steps, count, trace, how)
    assert not trace.slots
    assert len(trace.of("fetch")) == away
    assert trace.of("fetch") == trace.of("arrive") == trace.of("evict")
    assert trace.of("update") == trace.of("evict")[: len(trace.of("update"))]
    assert trace.of("finish") == [-1]
    assert trace.calls[-1][0] == "finish"


@pytest.mark.parametrize("verb", ["fetch", "arrive", "evict"])
@pytest.mark.parametrize("page", [100, 102, 105, 108])
def test_a_mover_that_fails_is_still_finished_and_the_error_is_its_own(verb: str, page: int) -> None:
    trace = Trace((verb, page))
    with pytest.raises(OSError, match=f"{verb} {page}"):
        run(cyclic(9), trace=trace)
    assert trace.of("finish") == [-1]
    assert trace.calls[-1][0] == "finish"
    assert len(set(trace.of("evict"))) == len(trace.of("evict"))
    assert {move.page for move, _ in trace.slots.values()} <= {page}, "another page is left in its slot"


@pytest.mark.parametrize("page", [100, 102, 105])
def test_a_page_that_came_in_part_is_not_brought_back(page: int) -> None:
    """What is in its slot is partly another page's."""
    trace = Trace(("fetch", page))
    with pytest.raises(OSError, match=f"fetch {page}"):
        run(cyclic(8), trace=trace)
    assert page not in trace.of("arrive")
    assert sorted(trace.of("evict")) == list(range(100, page))
    assert not trace.open


def test_an_error_of_the_last_writes_is_raised() -> None:
    with pytest.raises(OSError, match="finish"):
        run(cyclic(3), trace=Trace(("finish", -1)))


def test_an_error_of_the_last_writes_does_not_hide_the_first() -> None:
    trace = Trace(("finish", -1))
    with pytest.raises(Stop):
        until(plan(RESIDENT, cyclic(3)), 6, trace, "launch")
    assert trace.calls[-1] == ("finish", -1)


def test_a_mover_that_cannot_begin_is_not_finished() -> None:
    trace = Trace(("begin", -1))
    with pytest.raises(OSError, match="begin"):
        run(cyclic(3), trace=trace)
    assert trace.calls == [("begin", -1)]
