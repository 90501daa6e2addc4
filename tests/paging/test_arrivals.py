"""Pages that visit while gradients arrive one by one, played on a dictionary."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pagedopt.paging.arrivals import PATIENCE, Arrivals, Visit
from pagedopt.paging.policy import SLOTS, Move
from pagedopt.paging.visits import Span, passes


class Pages:
    """A mover; it keeps a log, and knows which page is in which slot."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.log: list[str] = []

    def begin(self) -> None: ...

    def fetch(self, move: Move) -> None:
        assert move.slot not in self.slots, "the slot is in use"
        self.slots[move.slot] = move.page
        self.log.append(f"+{move.page}")

    def arrive(self, move: Move) -> None:
        assert self.slots[move.slot] == move.page

    def evict(self, move: Move) -> None:
        assert self.slots.pop(move.slot) == move.page
        self.log.append(f"-{move.page}")

    def finish(self) -> None:
        assert not self.slots, "pages are left in their slots"


class Step:
    """A step: page i needs the gradients ``needs[i]``, and has the launch (i, i + 1).

    Attributes:
        launched: the first number of each launch so far.
        done: names that were said to be done, in this order.
    """

    def __init__(self, needs: Sequence[tuple[int, ...]], at_hand: dict[int, list[Span]] | None = None) -> None:
        self.needs, self.pages, self.launched, self.arrived = needs, Pages(), list[int](), set[int]()
        visits = [Visit(Move(0, i, i % SLOTS), (i, i + 1), each) for i, each in enumerate(needs)]
        self.arrivals, self.ends = Arrivals(at_hand or {}, visits), False
        self.passes = passes(self.arrivals.actions(), self.launch, self.pages)
        self.go_on()

    @property
    def done(self) -> list[int]:
        return self.arrivals.done  # type: ignore[return-value]

    def go_on(self) -> None:
        while not self.arrivals.waits:
            next(self.passes)

    def launch(self, span: Span | None) -> None:
        assert span is not None
        page, _ = span
        if page < len(self.needs):
            assert page in self.pages.slots.values(), "it is not on the device"
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


def test_in_the_expected_order_pages_are_fetched_ahead() -> None:
    step = Step([(i,) for i in range(6)])
    assert step.pages.log == ["+0", "+1", "+2", "+3"]
    step.arrive(0, 1)
    assert step.pages.log[4:] == ["-0", "+4", "-1", "+5"]
    step.arrive(*range(2, 6))
    step.end()
    assert step.launched == [0, 1, 2, 3, 4, 5]
    assert not step.arrivals.late


def test_a_gradient_of_many_pages() -> None:
    """They pass in their order, two rounds of them."""
    step = Step([(0,)] * 9)
    step.arrive(0)
    assert step.launched == [*range(9)]
    assert step.done == [0]
    assert not step.arrivals.late


def test_what_is_at_hand_is_launched_at_once_and_before_pages() -> None:
    step = Step([(0, 1), (1,)], {0: [(10, 12), (20, 21)], 2: [(30, 31)]})
    step.arrive(0)
    assert step.launched == [10, 20]
    assert step.done == []
    step.arrive(2)
    assert step.launched == [10, 20, 30]
    assert step.done == [2]
    step.arrive(1)
    assert step.launched[3:] == [0, 1]
    assert step.done == [2, 0, 1]


def test_a_gradient_that_never_comes_holds_few_pages_back() -> None:
    """Only pages of its own slot, and these until PATIENCE of them wait."""
    step = Step([(i,) for i in range(4 * SLOTS)])
    step.arrive(*range(1, PATIENCE * SLOTS))
    assert set(range(1, PATIENCE * SLOTS)) - {*step.launched} == {i * SLOTS for i in range(1, PATIENCE)}
    step.arrive(PATIENCE * SLOTS)
    assert {*step.launched} == {*range(1, PATIENCE * SLOTS + 1)}
    assert step.pages.log.count("-0") == 1, "it goes back as it is"
    step.arrive(0)
    assert 0 not in step.launched, "another page is in its slot"
    step.end()
    assert step.launched.count(0) == 1


def test_at_the_end_only_pages_with_a_gradient_are_updated() -> None:
    step = Step([(0, 1), (2,), (3, 4), (5,), (6, 7), (8,), (9, 10)])
    step.arrive(1, 9)
    step.end()
    assert sorted(step.launched) == [0, 6]
    assert "+5" not in step.pages.log


@pytest.mark.parametrize("seed", range(40))
def test_any_order(seed: int) -> None:
    """Every page with a gradient is updated once, and named when all of a parameter is done; none is left behind."""
    draw = random.Random(seed)
    names = [*range(draw.randint(1, 40))]
    needs = [tuple(draw.sample(names, draw.randint(1, min(4, len(names))))) for _ in range(draw.randint(1, 60))]
    at_hand = {name: [(100 + name, 101 + name)] for name in names if draw.random() < 0.3}
    coming = draw.sample(names, draw.randint(0, len(names)))
    step = Step(needs, at_hand)
    for name in coming:
        step.arrive(name)
        launched = [n for n in step.arrived if all(i in step.launched for i, of in enumerate(needs) if n in of)]
        assert sorted(step.done) == sorted(launched)
    step.end()
    pages = [i for i, of in enumerate(needs) if not step.arrived.isdisjoint(of)]
    assert sorted(step.launched) == sorted([*pages, *(100 + name for name in coming if name in at_hand)])
    assert sorted(step.done) == sorted(coming)
