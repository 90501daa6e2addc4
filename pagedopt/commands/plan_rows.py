"""Rows of a plan as people and programs read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ..planning.estimate import Estimate


def short(row: Estimate, room: dict[str, int]) -> dict[str, int]:
    """Bytes that each place lacks, by place; those that have enough are left out."""
    needed = {row.near: row.near_bytes, "file" if row.device == "cpu" else "host": row.away_bytes}
    return {place: n - room[place] for place, n in needed.items() if n > room.get(place, n)}


def row_dict(row: Estimate, room: dict[str, int]) -> dict[str, Any]:
    """A row of the table as plain values; ``fits`` is None if the machine is not this one."""
    values = row.as_dict()
    values.pop("rates")
    return {**values, "fits": not short(row, room) if room else None, "short": short(row, room)}


def table(rows: list[Estimate], room: dict[str, int], own: int | None, whole: float | None = None) -> Table:
    """One line for each budget, the one that was asked for in bold.

    Args:
        whole: seconds of a training step with which the cost of each budget is compared.
    """
    from ..common.units import text_of_bytes, text_of_seconds
    from .tables import FittingTable

    first = rows[0]
    away = "file" if first.device == "cpu" else "host"
    headings = ["budget", f"on {first.near}", f"on {away}", "in all", "moved", "step"]
    headings += [*(["slower"] if whole else []), *(["fits"] if room else [])]
    shown = FittingTable()
    for text in headings:
        shown.add_column(text, justify="right")
    for row in rows:
        cells = [
            "none" if row.budget is None else text_of_bytes(row.budget),
            text_of_bytes(row.by_place.get(row.near, 0)),
            text_of_bytes(row.away_bytes),
            text_of_bytes(row.near_bytes),
            text_of_bytes(row.moved),
            text_of_seconds(row.seconds),
        ]
        bold = "bold" if own is not None and row.budget == own else None
        missing = short(row, room)
        verdict = f"no: {' '.join(missing)}" if missing else "yes"
        shown.add_row(
            *cells, *([slower(row, rows[-1], whole)] if whole else []), *([verdict] if room else []), style=bold
        )
    return shown


def slower(row: Estimate, best: Estimate, whole: float) -> str:
    """How much longer than ``whole`` seconds a training step becomes, beside one whose state is all near."""
    if row.seconds is None or best.seconds is None:
        return "unknown"
    percent = 100 * (row.seconds - best.seconds) / whole
    if percent >= 1000:
        return f"×{1 + percent / 100:,.0f}"
    return f"+{percent:.0f} %" if percent >= 10 else f"+{percent:.2g} %"


def text_of_fitting(found: tuple[int, int] | None, state_bytes: int) -> str:
    """Budgets from the smallest to the largest, rounded to what fits as well."""
    if found is None:
        return "none"
    least, most = -(-found[0] >> 20), found[1] >> 20
    return f"from {f'{least}MiB' if least else '0 B'} to {'all' if found[1] >= state_bytes else f'{most}MiB'}"
