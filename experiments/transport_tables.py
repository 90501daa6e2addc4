"""Tables, plots and sentences made from the results of :mod:`experiments.pointer_transports`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments import report
from experiments.report import number

Rows = Sequence[dict[str, Any]]
Shown = tuple[tuple[str, ...], list[tuple[str, ...]]]
MODES = {
    "rewritten": "list rewritten before every step",
    "new scalars": "list unchanged, hyperparameters new (every step of AdamW)",
    "unchanged": "nothing changed",
}


def managed_over_best(rows: Rows, lists: int) -> dict[int, float]:
    """For each count, wall time of managed over that of the fastest transport, the list being rewritten."""
    wall: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["lists"] == lists and row["mode"] == "rewritten":
            wall.setdefault(row["count"], {})[row["way"]] = row["wall"]["median"]
    return {count: ways["managed"] / min(ways.values()) for count, ways in wall.items() if "managed" in ways}


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _grid(rows: Rows, cell: Callable[[dict[str, Any]], str]) -> Shown:
    """Ways down, counts across."""
    counts = sorted({row["count"] for row in rows})
    known = {(row["way"], row["count"]): row for row in rows}
    body = [
        (way, *(cell(known[way, n]) if (way, n) in known else "-" for n in counts))
        for way in _unique(row["way"] for row in rows)
    ]
    return ("tensors", *(f"{n:,}" for n in counts)), body


def times(row: dict[str, Any]) -> str:
    """host / GPU / wall, in µs."""
    gpu = row["gpu"]["median"] if row["gpu"] else None
    return f"{number(row['host']['median'])} / {number(gpu)} / {number(row['wall']['median'])}"


def traffic(row: dict[str, Any]) -> str:
    """launches, and kilobytes copied by an explicit call."""
    copied = row["copied_bytes"]
    return f"{row['launches']:,}" + (f", {number(copied / 1000)} kB" if copied else "")


def tables(result: dict[str, Any]) -> dict[str, Shown]:
    """Every table by its title."""
    shown: dict[str, Shown] = {"attempts": _attempts(result)}
    for lists in (1, 4):
        rows = [row for row in result["transports"] if row["lists"] == lists]
        name = f"{lists} list{'s' * (lists > 1)}"
        for mode, words in MODES.items():
            chosen = [row for row in rows if row["mode"] == mode]
            shown[f"transports, {name}, {words}: host / GPU / wall µs"] = _grid(chosen, times)
        chosen = [row for row in rows if row["mode"] == "rewritten"]
        shown[f"transports, {name}, rewritten: launches, bytes copied explicitly"] = _grid(chosen, traffic)
    for mode, words in MODES.items():
        chosen = [row for row in result["advice"] if row["mode"] == mode]
        shown[f"managed memory by advice, 1 list, {words}: host / GPU / wall µs"] = _grid(chosen, times)
    refresh = [{**row, "way": "µs"} for row in result["refresh"]]
    shown["comparing the addresses of one list in Python (refresh)"] = _grid(
        refresh, lambda row: number(row["host"]["median"])
    )
    shown["norms of N tensors: host / GPU / wall µs"] = _grid(result["norms"], times)
    launches = [row for row in result["norms"] if row["launches"]]
    shown["kernels that torch._foreach_norm launches"] = _grid(launches, lambda row: str(row["launches"]))
    shown["replay of a CUDA graph with one step: host / GPU / wall µs"] = _grid(result["graphs"], times)
    return shown


def _attempts(result: dict[str, Any]) -> Shown:
    rows: list[tuple[str, ...]] = [
        (a["title"], a["outcome"] + ("" if a["as_expected"] else " (not as expected)"), _short(a["message"]))
        for a in result["attempts"]
    ]
    return ("attempt", "outcome", "message"), rows


def _short(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return "\n".join(lines[:3])[:400]


def sentences(result: dict[str, Any]) -> str:
    """What the numbers say, one line each."""
    found = []
    for lists in (1, 4):
        if ratios := managed_over_best(result["transports"], lists):
            low, high = min(ratios.values()), max(ratios.values())
            found.append(
                f"- With {lists} list{'s' * (lists > 1)}, rewritten before every step, managed memory costs "
                f"{number(low)} to {number(high)} x the fastest transport ({min(ratios):,} to {max(ratios):,} tensors)."
            )
    rewritten = [row for row in result["advice"] if row["mode"] == "rewritten"]
    if rewritten:
        most = max(row["count"] for row in rewritten)
        wall = {row["way"]: row["wall"]["median"] for row in rewritten if row["count"] == most}
        order = sorted(wall.items(), key=lambda item: item[1])
        found.append(f"- Rewriting {most:,} pointers in managed memory, by advice: " + ", ".join(
            f"{way} {number(us)} µs" for way, us in order) + ".")  # fmt: skip
    for count in (423, 424):
        wall = {row["way"]: row["wall"]["median"] for row in result["norms"] if row["count"] == count}
        if wall:
            ours = number(wall["pagedopt"])
            found.append(f"- Norms of {count} tensors: torch {number(wall['torch'])} µs, ours {ours} µs.")
    return "\n".join(found)


def sections(result: dict[str, Any]) -> dict[str, str]:
    """What :func:`experiments.report.fill` puts into the note."""
    shown = {title: report.markdown(*table) for title, table in tables(result).items() if table[1]}

    def titled(start: str) -> str:
        return "\n\n".join(f"**{title}**\n\n{text}" for title, text in shown.items() if title.startswith(start))

    refusals = _unique(g[key] for g in result["graphs"] for key in ("rewritten", "moved"))
    quoted = "\n".join(f"> {text}" for text in refusals[:2])
    left_out = "\n".join(f"- {line}" for line in result["left_out"]) or "nothing"
    return {
        "machine": report.machine_line(result),
        "bars": report.bars_markdown(result),
        "answer": sentences(result),
        "attempts": titled("attempts"),
        "transports": titled("transports"),
        "advice": titled("managed"),
        "refresh": titled("comparing"),
        "norms": titled("norms") + "\n\n" + titled("kernels"),
        "graphs": titled("replay") + (f"\n\nRefused replays say:\n\n{quoted}" if quoted else ""),
        "left out": left_out,
    }


def _panel(axes: Any, rows: Rows, metric: str, title: str) -> None:
    """One log-log panel: a line per way."""
    for way in _unique(row["way"] for row in rows):
        points = sorted((r["count"], r[metric]) for r in rows if r["way"] == way and r[metric])
        if points:
            counts = [n for n, _ in points]
            low, middle, high = ([stats[k] for _, stats in points] for k in ("p10", "median", "p90"))
            line = axes.plot(counts, middle, marker="o", markersize=3, label=way)[0]
            axes.fill_between(counts, low, high, alpha=0.15, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="tensors", ylabel="µs")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend(fontsize="small")


def _panels(figure: Any, rows: Rows) -> None:
    axes = figure.subplots(2, 2)
    wanted = (("wall", "rewritten"), ("host", "rewritten"), ("gpu", "rewritten"), ("wall", "new scalars"))
    for place, (metric, mode) in zip(axes.flat, wanted, strict=True):
        _panel(place, [row for row in rows if row["mode"] == mode], metric, f"{metric}, {MODES[mode]}")


def plot_transports(figure: Any, result: dict[str, Any]) -> None:
    """Times of the transports for tables of four lists."""
    figure.suptitle("A step over N tiny tensors, four lists of pointers")
    _panels(figure, [row for row in result["transports"] if row["lists"] == 4])


def plot_advice(figure: Any, result: dict[str, Any]) -> None:
    """Times of managed memory by advice."""
    figure.suptitle("A step over N tiny tensors, one list of pointers in managed memory, by advice")
    _panels(figure, result["advice"])


def plot_norms(figure: Any, result: dict[str, Any]) -> None:
    """Norms, ours and torch's."""
    for place, metric in zip(figure.subplots(1, 2), ("host", "wall"), strict=True):
        _panel(place, result["norms"], metric, f"norms of N tensors, {metric}")


PLOTS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "transports": plot_transports, "advice": plot_advice, "norms": plot_norms,
}  # fmt: skip
