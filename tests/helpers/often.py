"""Marks of many tests: cases that `make test-long` alone runs, and both ways in which a staged step goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

#: The mark of a case that is run often (none), and of one that is not.
MARKS: dict[bool, list[pytest.MarkDecorator]] = {True: [], False: [pytest.mark.long]}


def long_but(cases: Iterable[Any], often: Callable[[Any], bool]) -> list[Any]:
    """Values of one argument, those that are not run ``often`` marked as long ones."""
    return [pytest.param(case, marks=MARKS[bool(often(case))]) for case in cases]


#: Runs each test as a CUDA graph, once a staged step repeats, and call by call; see the fixture ``staged``.
both_ways = pytest.mark.parametrize("staged", ["graph", "calls"], indirect=True)
#: Runs each test call by call alone: what it hits are the calls.
call_by_call = pytest.mark.parametrize("staged", ["calls"], indirect=True)
