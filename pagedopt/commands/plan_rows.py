"""Rows of a plan, for people (a table) and for programs (JSON values)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common.units import text_of_bytes, text_of_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from ..planning.estimate import Estimate


def far(row: Estimate) -> str:
    """Return where state lies that has left the parameters' device: ``file`` beside a CPU, else ``host``."""
    return "file" if row.device == "cpu" else "host"


def short(row: Estimate, room: dict[str, int]) -> dict[str, int]:
    """Return how many bytes are missing in ``device``, ``host`` or ``file``, for those that have too few."""
    needed = {row.near: row.near_bytes, far(row): row.away_bytes}
    return {where: n - room[where] for where, n in needed.items() if n > room.get(where, n)}


def row_dict(row: Estimate, room: dict[str, int]) -> dict[str, Any]:
    """Return a row as JSON values. ``fits`` is None if ``room`` is empty, that is, if it is not known."""
    missing = short(row, room)
    values = {name: value for name, value in row.as_dict().items() if name != "rates"}
    return {**values, "fits": not missing if room else None, "short": missing}


def table(rows: list[Estimate], room: dict[str, int], own: int | None, whole: float | None = None) -> Table:
    """Return a table with a line for each budget.

    Args:
        rows: estimates; the last has all state near.
        room: free bytes by where state can be; empty if they are not known.
        own: the budget in bytes that the user asked for, which is printed in bold.
        whole: seconds of the user's training step, to which a column compares each budget.
    """
    from .tables import FittingTable, numbers

    headings = ["budget", f"on {rows[0].near}", f"on {far(rows[0])}", "in all", "moved", "step"]
    shown = FittingTable(*numbers([*headings, *(["slower"] if whole else []), *(["fits"] if room else [])]))
    for row in rows:
        sizes = (row.by_place.get(row.near, 0), row.away_bytes, row.near_bytes, row.moved)
        cells = ["none" if row.budget is None else text_of_bytes(row.budget), *map(text_of_bytes, sizes)]
        cells.append(text_of_seconds(row.seconds))
        if whole:
            cells.append(slower(row, rows[-1], whole))
        if room:
            missing = short(row, room)
            cells.append(f"no: {' '.join(missing)}" if missing else "yes")
        shown.add_row(*cells, style="bold" if own is not None and row.budget == own else None)
    return shown


def slower(row: Estimate, best: Estimate, whole: float) -> str:
    """Return how much longer a training step of ``whole`` seconds becomes if ``row`` replaces ``best``."""
    if row.seconds is None or best.seconds is None:
        return "unknown"
    percent = 100 * (row.seconds - best.seconds) / whole
    if percent >= 1000:
        return f"×{1 + percent / 100:,.0f}"
    return f"+{percent:.0f} %" if percent >= 10 else f"+{percent:.2g} %"


def text_of_fitting(found: tuple[int, int] | None, state_bytes: int) -> str:
    """Return a range of budgets, rounded inwards to MiB so that what it says fits as well."""
    if found is None:
        return "none"
    least, most = -(-found[0] >> 20), found[1] >> 20
    return f"from {f'{least}MiB' if least else '0 B'} to {'all' if found[1] >= state_bytes else f'{most}MiB'}"
