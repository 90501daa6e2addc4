"""Cases of which `make test` runs those that cover most, and `make test-long` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

#: The mark of a case that is run often (none), and of one that is not.
MARKS: dict[bool, list[pytest.MarkDecorator]] = {True: [], False: [pytest.mark.long]}


def long_but(cases: Iterable[Any], often: Callable[[Any], bool]) -> list[Any]:
    """Values of one argument, those that are not run ``often`` marked as long ones."""
    return [pytest.param(case, marks=MARKS[bool(often(case))]) for case in cases]
