"""What a step does, as a value, and the loop that carries it out: replayed on plain values, whatever fails."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedopt.paging import visits
from pagedopt.paging.arrivals import PATIENCE, Arrivals, Visit
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


@pytest.mark.parametrize("resident", [None, (3, 3)])
def test_no_resident_part_no_launch(resident: Span | None) -> None:
    launches = [step.span for step in plan(resident, cyclic(2)) if isinstance(step, Update)]
    assert launches == [(100, 101), (101, 102)]


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
    if verb == "fetch":
        assert page not in trace.of("arrive"), "what is in its slot is partly another page's"
        assert sorted(trace.of("evict")) == list(range(100, page))


def test_errors_of_the_begin_and_of_the_last_writes() -> None:
    """The first error is raised; a mover that could not begin is not finished."""
    with pytest.raises(OSError, match="finish"):
        run(cyclic(3), trace=Trace(("finish", -1)))
    trace = Trace(("finish", -1))
    with pytest.raises(Stop):
        until(plan(RESIDENT, cyclic(3)), 6, trace, "launch")
    assert trace.calls[-1] == ("finish", -1)
    trace = Trace(("begin", -1))
    with pytest.raises(OSError, match="begin"):
        run(cyclic(3), trace=trace)
    assert trace.calls == [("begin", -1)]


# --- pages that visit while gradients arrive one by one ---------------------------------------------------------------


class Step:
    """A step: page i needs the gradients ``needs[i]``, and has the launch (i, i + 1).

    Attributes:
        launched: the first number of each launch so far.
    """

    def __init__(self, needs: Sequence[tuple[int, ...]], at_hand: dict[int, list[Span]] | None = None) -> None:
        self.needs, self.trace, self.launched, self.arrived = needs, Trace(), list[int](), set[int]()
        visits = [Visit(Move(0, i, i % SLOTS), (i, i + 1), each) for i, each in enumerate(needs)]
        self.arrivals, self.ends = Arrivals(at_hand or {}, visits), False
        self.passes = passes(self.arrivals.actions(), self.launch, self.trace)
        self.go_on()

    def go_on(self) -> None:
        while not self.arrivals.waits:
            next(self.passes)

    def launch(self, span: Span | None) -> None:
        assert span is not None
        page, _ = span
        if page < len(self.needs):
            self.trace.update(span)
            assert self.ends or self.arrived.issuperset(self.needs[page]), "gradients are missing"
        self.launched.append(page)

    def arrive(self, *names: int) -> None:
        for name in names:
            self.arrived.add(name)
            self.arrivals.arrive(name)
            self.go_on()

    def end(self) -> None:
        self.ends = True
        self.arrivals.end()
        for _ in self.passes:
            pass
        assert not self.trace.slots, "pages are left in their slots"


def test_in_the_expected_order_pages_are_fetched_ahead() -> None:
    step = Step([(i,) for i in range(6)])
    assert step.trace.of("fetch") == [0, 1, 2, 3]
    step.arrive(0, 1)
    assert [call for call in step.trace.calls[5:] if call[0] in ("fetch", "evict")] == [
        *(("evict", 0), ("fetch", 4), ("evict", 1), ("fetch", 5)),
    ]
    step.arrive(*range(2, 6))
    step.end()
    assert step.launched == [0, 1, 2, 3, 4, 5]
    assert not step.arrivals.late


def test_what_is_at_hand_is_launched_at_once_and_before_pages() -> None:
    step = Step([(0, 1), (1,)], {0: [(10, 12), (20, 21)], 2: [(30, 31)]})
    step.arrive(0)
    assert step.launched == [10, 20]
    assert step.arrivals.done == []
    step.arrive(2)
    assert step.launched == [10, 20, 30]
    assert step.arrivals.done == [2]
    step.arrive(1)
    assert step.launched[3:] == [0, 1]
    assert step.arrivals.done == [2, 0, 1]


def test_a_gradient_that_never_comes_holds_few_pages_back() -> None:
    """Only pages of its own slot, and these until PATIENCE of them wait."""
    step = Step([(i,) for i in range(4 * SLOTS)])
    step.arrive(*range(1, PATIENCE * SLOTS))
    assert set(range(1, PATIENCE * SLOTS)) - {*step.launched} == {i * SLOTS for i in range(1, PATIENCE)}
    step.arrive(PATIENCE * SLOTS)
    assert {*step.launched} == {*range(1, PATIENCE * SLOTS + 1)}
    assert step.trace.of("evict").count(0) == 1, "it goes back as it is"
    step.arrive(0)
    assert 0 not in step.launched, "another page is in its slot"
    step.end()
    assert step.launched.count(0) == 1


def test_at_the_end_only_pages_with_a_gradient_are_updated() -> None:
    step = Step([(0, 1), (2,), (3, 4), (5,), (6, 7), (8,), (9, 10)])
    step.arrive(1, 9)
    step.end()
    assert sorted(step.launched) == [0, 6]
    assert 5 not in step.trace.of("fetch")


@given(st.randoms())
def test_any_order(draw: Random) -> None:
    """Every page with a gradient is updated once, and named when all of a parameter is done; none is left behind."""
    names = [*range(draw.randint(1, 40))]
    needs = [tuple(draw.sample(names, draw.randint(1, min(4, len(names))))) for _ in range(draw.randint(1, 60))]
    at_hand = {name: [(100 + name, 101 + name)] for name in names if draw.random() < 0.3}
    coming = draw.sample(names, draw.randint(0, len(names)))
    step = Step(needs, at_hand)
    for name in coming:
        step.arrive(name)
        launched = [n for n in step.arrived if all(i in step.launched for i, of in enumerate(needs) if n in of)]
        assert sorted(step.arrivals.done) == sorted(launched)
    step.end()
    pages = [i for i, of in enumerate(needs) if not step.arrived.isdisjoint(of)]
    assert sorted(step.launched) == sorted([*pages, *(100 + name for name in coming if name in at_hand)])
    assert sorted(step.arrivals.done) == sorted(coming)
