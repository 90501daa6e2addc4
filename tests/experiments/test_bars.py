"""Every bar flips where one contender's series crosses its threshold, and into the right direction."""

from __future__ import annotations

import pytest

from experiments.harness.question import Experiment, Question
from experiments.harness.show import Bar, Verdict
from tests.experiments.bar_knobs import COUNT, KNOBS, REAL, bars, knob, measured, names

EVERY = [pytest.param(*each, id=f"{each[1].name}: {each[2].title}") for each in bars()]
#: Halvings of a knob until it is at the threshold; a count that is not there by so many is never there.
HALVINGS, MOST = 17, 10


@pytest.mark.parametrize(("experiment", "asked", "bar"), EVERY)
def test_a_bar_flips_at_its_threshold(experiment: Experiment, asked: Question, bar: Bar) -> None:
    rows, turn = measured(experiment, asked, bar), knob(asked, bar)
    assert rows is not None, "no results that are kept measure it: put rows into bar_knobs.MADE"

    def verdict(far: float) -> Verdict:
        return bar.verdict(asked.derive(turn.turned(rows, bar, far)))

    met, missed = 0.0, 1.0
    if turn.kind == COUNT:
        missed = next((far for far in range(MOST) if verdict(far).met is False), MOST)
        met = missed - 1
    assert (verdict(met).met, verdict(missed).met) == (True, False), "name in bar_knobs.KNOBS what the bar hangs on"
    if turn.kind == COUNT:
        assert (verdict(met).measured, verdict(missed).measured) == (bar.limit, bar.limit + 1)
    if turn.kind == REAL:
        for _ in range(HALVINGS):
            middle = (met + missed) / 2
            met, missed = (middle, missed) if verdict(middle).met else (met, middle)
        for far in (met, missed):
            assert verdict(far).measured == pytest.approx(bar.limit, rel=1e-2, abs=1e-7)


def test_no_knob_is_of_a_bar_that_is_gone() -> None:
    known = {name for _, asked, bar in bars() for name in names(asked, bar)}
    assert KNOBS.keys() <= known
