"""Questions that a process of its own answers, so that what it leaves behind slows nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from experiments.child import Child
from experiments.lab import Row, Run


def rows_of(run: Run, function: Callable[..., Iterator[Row]], *arguments: Any, limit: float) -> Iterator[Row]:
    """Rows of a function in a process of its own, as far as it gets: how it failed is left out.

    Toys stay in this process: another takes seconds to begin.
    """
    if run.quick:
        yield from function(*arguments)
        return
    child = Child(function, *arguments, limit=limit)
    sent = 0
    for row in child:
        yield row
        sent += 1
    if child.ended:
        run.leave_out(f"what comes after {sent} rows of {function.__name__}: {child.ended}")


def counted_apart(
    run: Run, function: Callable[..., Iterator[Row]], *arguments: Any, by: Sequence[str], limit: float = 600.0
) -> dict[tuple[Any, ...], Row]:
    """What a function counts in a process of its own, so that nothing is timed behind a profiler: rows by some columns.

    Where no profiler is used, on a CPU, it is called here.
    """
    rows: Iterable[Row] = function(*arguments)
    if run.device.type == "cuda":
        rows = child = Child(function, *arguments, limit=limit)
    found = {tuple(row[name] for name in by): row for row in rows}
    if run.device.type == "cuda" and child.ended:
        run.leave_out(f"launches behind {len(found)} of them: the process {child.ended}")
    return found
