"""What rows say to a claim: cells, by names, and whether the claim holds; None where rows are not there.

``claims.toml`` declares it where it is rows and columns.  Where there is more to reckon, it is a function here, of the
rows of the question that shows the claim.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.comparing import over
from experiments.lab import Row, Rows, number_in
from experiments.launch.reasons import GONE, by_today
from experiments.pointers.transports import walls
from experiments.works.first_steps import COLD
from experiments.works.models import FOREACH, FUSED, LOOP, OURS
from experiments.works.phases import CACHES, PHASES

SIGNS = {"==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
#: Of what is compared, the part that is no more than how memory is handed out, or how a clock ticks.
MARGIN = 0.01
Found = tuple[bool, dict[str, Any]]


def cells(**rows: Row) -> dict[str, Any]:
    """The cells of named rows by "row.column"; of a series the median."""
    return {
        f"{name}.{column}": number_in(row, column) if isinstance(cell, Mapping) and "median" in cell else cell
        for name, row in rows.items()
        for column, cell in row.items()
    }


def declared(rows: Rows, wanted: Mapping[str, Mapping[str, Any]], holds: Iterable[Sequence[Any]]) -> Found | None:
    """What ``claims.toml`` declares.

    Args:
        wanted: by name, the columns of a row; ``most``: of a column, of which it has the most.
        holds: cell, sign, cell or value.
    """
    found = {}
    for name, columns in wanted.items():
        where = dict(columns)
        most = where.pop("most", None)
        known = [row for row in rows.where(**where) if most is None or row.get(most) is not None]
        if not known:
            return None
        found[name] = max(known, key=lambda row: row[most]) if most else known[0]
    values = cells(**found)
    pairs = [(values[cell], sign, values.get(other, other)) for cell, sign, other in holds]
    if any(None in pair for pair in pairs):
        return None
    return all(SIGNS[sign](one, other) for one, sign, other in pairs), values


def timed(rows: Rows, cases: Iterable[str], **where: Any) -> list[Row] | None:
    """Rows by ``case``, all of which have to be there and have a time."""
    found = [row for case in cases if (row := rows.first(case=case, **where)) and row["time"] is not None]
    return found if len(found) == len(list(cases)) else None


def speed_for_memory(rows: Rows) -> Found | None:
    """Is one of torch's rungs faster than the one below it, and needs more, by more than its step counts?"""
    ways = timed(rows, (LOOP, FOREACH, FUSED), key="gpt2")
    if ways is None:
        return None
    dearer = [
        above["need"] - below["need"] > MARGIN * below["state"]
        for below, above in itertools.pairwise(ways)
        if above["time"]["median"] < below["time"]["median"]
    ]
    return any(dearer), cells(loop=ways[0], foreach=ways[1], fused=ways[2])


def bridge(rows: Rows) -> Found | None:
    """Does the largest truck of foreach have to stay behind, and who passes?"""
    heavy = rows.where(key="bytes cost")
    if not heavy.where(way=FOREACH) or not heavy.where(way=OURS):
        return None
    foreach, ours = (max(heavy.where(way=way, passes=True).values("size"), default=0) for way in (FOREACH, OURS))
    values = {"foreach": foreach, "ours": ours, "all": max(heavy.values("size")), "bridge": heavy[0]["bridge"]}
    return foreach < values["all"], values


def failing(rows: Rows) -> Found | None:
    """Do all fail that could be tried?"""
    ends = [row["outcome"] for row in rows if row["name"] in ("vector_nvcc", "vector_nvrtc", "host_list")]
    tried = [end for end in ends if end != "left out"]
    return (set(tried) == {"fails"}, {"failed": tried.count("fails"), "tried": len(tried)}) if tried else None


def negligible(rows: Rows) -> Found | None:
    """Is there a list, too long for one struct, for which a copy from pinned memory and one launch take less?"""
    pinned, structs, literal = "memcpy", "struct 4 KB", "torch.tensor(ptrs).to(cuda)"
    several = {row["count"] for row in rows.where(lists=4, mode="rewritten", way=structs) if row["launches"] > 1}
    known = {n: wall for n, wall in walls(rows.where(lists=4, mode="rewritten")).items() if n in several}
    known = {n: wall for n, wall in known.items() if {pinned, structs, literal} <= wall.keys()}
    if not known:
        return None
    won, packed = ([n for n, wall in known.items() if wall[way] < wall[structs]] for way in (pinned, literal))
    count = won[0] if won else max(known)
    row = rows.first(lists=4, mode="rewritten", way=structs, count=count) or {}
    values = {
        "count": count,
        "launches": row["launches"],
        "copy": known[count][pinned],
        "structs": known[count][structs],
        "won": f"from {won[0]:,} tensors on" if won else "at no number of tensors",
        "packed": f"from {packed[0]:,} on" if packed else "never",
    }
    return bool(won), values


def migrating(rows: Rows) -> Found | None:
    """What pages that migrate cost, and what advice makes of it."""
    known = rows.where(mode="rewritten")
    known = known.where(count=max(known.values("count"), default=0))
    none, both = known.first(way="none"), known.first(way="preferred host, accessed by")
    if none is None or both is None:
        return None
    return (over(none["wall"], both["wall"]) or 0.0) > 1.5, cells(none=none, both=both)


def hybrid(rows: Rows) -> Found | None:
    """By value while it fits, copied from then on, always one launch?"""
    known = rows.where(lists=4, way="hybrid", mode="rewritten")
    by_value = [row["count"] for row in known if not row["copied_bytes"]]
    copied = [row["count"] for row in known if row["copied_bytes"]]
    launches = max((row["launches"] for row in known), default=None)
    values = {"value": max(by_value, default=0), "copied": min(copied, default=0), "launches": launches}
    return (bool(by_value and copied) and launches == 1, values) if known else None


def eager(rows: Rows) -> Found | None:
    """Is each line of arithmetic one kernel, and does print wait?"""
    counted = [row for row in rows if row.get("kernels") is not None]
    printed = next((row for row in counted if row["line"].startswith("print")), None)
    kernels = [row["kernels"] for row in counted if any(part in row["line"] for part in ("+", "cos", "relu"))]
    if printed is None or len(kernels) < 3:
        return None
    waits = "waits" if printed["waited"] else "does not wait"
    values = {"one": kernels.count(1), "lines": len(kernels), "waits": waits, **cells(print=printed)}
    return set(kernels) == {1} and bool(printed["waited"]), values


def llama(rows: Rows) -> Found | None:
    """Do concrete shapes say something else of who is faster, and by how much, than tiny ones?"""
    there, tiny = (timed(rows, (f"{OURS}, device", FUSED), key=key) for key in ("llama", "1000"))
    if there is None or tiny is None:
        return None
    faster, toys = (over(fused["time"], ours["time"]) or 0.0 for ours, fused in (there, tiny))
    values = {**cells(ours=there[0], tiny=tiny[0]), "there": faster, "toys": toys}
    return abs(faster / toys - 1) > 10 * MARGIN, values


def saturated(rows: Rows) -> Found | None:
    """Does so many times the data take less than so many times as long?"""
    few, many = (rows.first(operation="LayerNorm", where="one tensor", rows=count) for count in (1024, 16384))
    if few is None or many is None or many["of_slice"] is None:
        return None
    times = many["rows"] // few["rows"]
    return many["of_slice"] < times, {"times": times, **cells(many=many)}


def reasons(rows: Rows) -> Found | None:
    """Does each of them still hold, as far as what was tried can tell?"""
    found = by_today(rows)
    values = {word: ", ".join(names) or "none" for word, names in found.items()}
    return (not found[GONE], {**values, "lost": len(found[GONE]), "all": len(rows)}) if rows else None


def spilling(rows: Rows) -> Found | None:
    """Does fusing lose anywhere because its kernel spills?"""
    timed = [row for row in rows if row["of_passes"]]
    if not timed:
        return None
    worst = max(timed, key=lambda row: row["of_passes"]["median"])
    loses = [row for row in timed if row["of_passes"]["median"] > 1]
    values = {"all": len(timed), "loses": len(loses), "spilled": sum(row["spilled"] > 0 for row in timed)}
    return bool(loses) and worst["spilled"] > 0, {**values, **cells(worst=worst)}


def covered(rows: Rows) -> Found | None:
    """Are all but the two compiled?"""
    classes = rows.where(what="class")
    others = [row["name"] for row in classes if row["became"] != "compiled"]
    values = {"compiled": len(classes) - len(others), "all": len(classes), "others": ", ".join(others) or "none"}
    return (set(others) == {"LBFGS", "SparseAdam"}, values) if classes else None


def flow(rows: Rows) -> Found | None:
    """Does a cold first step go through all of the compilers, and how much of it does each take?"""
    known = [row for row in rows.where(way=COLD) if row.get("phases")]
    if not known:
        return None
    longest = max(known, key=lambda row: row["count"])
    phases, count = longest["phases"], longest["count"]
    shares = ", ".join(f"{name} {100 * taken / longest['first_s']:.0f} %" for name, taken in phases.items())
    return all(phases[name] > 0 for name in PHASES if name != CACHES), {"count": count, "phases": shares}


#: By claim.
READINGS: dict[str, Callable[[Rows], Found | None]] = {
    "A1": speed_for_memory,
    "A3": bridge,
    "A10": failing,
    "A16": negligible,
    "A19": migrating,
    "A20": hybrid,
    "A23": covered,
    "C2": eager,
    "C5": spilling,
    "C14": llama,
    "D3": saturated,
    "D9": spilling,
    "D11": reasons,
    "D12": flow,
}
