"""What a piece of code takes of a machine that is not its own alone."""

from __future__ import annotations

from collections.abc import Callable


def least(taken: Callable[[], int], enough: int, attempts: int = 4) -> int:
    """The least number of bytes that ``taken`` reports, asked again while it is above ``enough``.

    Free memory of a card or of a machine says nothing of who took it: another program's context is half a gigabyte.
    That comes now and then; what the code under test leaks, it leaks in every attempt.
    """
    found = []
    for _ in range(attempts):
        found.append(taken())
        if found[-1] <= enough:
            break
    return min(found)
