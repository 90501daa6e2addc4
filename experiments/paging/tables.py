"""Tables of the parts of ``paged_state``, for a terminal and for the note."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments import report
from experiments.paging import bars
from experiments.paging.link import BOTH, IN_PLACE
from experiments.paging.rivals import OURS
from experiments.paging.sweep import SHARES
from experiments.report import number

Rows = list[tuple[str, ...]]
Shown = tuple[tuple[str, ...], Rows]
Part = Mapping[str, Any]


def ms(microseconds: float | None) -> str:
    """Microseconds in milliseconds."""
    return "-" if microseconds is None else number(microseconds / 1e3)


def gb(nbytes: float) -> str:
    """Bytes in GB; less than half a megabyte is 0."""
    return number(nbytes / 1e9) if abs(nbytes) >= 5e5 else "0"


def percent(share: float | None) -> str:
    """A share in percent."""
    return "-" if share is None else f"{100 * share:.1f} %"


def link(part: Part) -> dict[str, Shown]:
    """Rates of copies and kernels."""
    rows: Rows = []
    for name, rate in part["rates"].items():
        title = f"{name} ({part['blocks']} blocks)" if name == IN_PLACE else name
        rows.append((title, number(rate / 1e9), ms(part["times"][name]["best"])))
    return {f"link and memory, {part['bytes'] / 2**30:.3g} GiB each way": (("what", "GB/s", "ms"), rows)}


def sweep(part: Part) -> dict[str, Shown]:
    """Times by way and share, and for each way what they say."""
    shares = [f"{share:.0%}" for share in SHARES]
    found = part["rows"]
    shown: dict[str, Shown] = {}
    for metric, title in (("best", "GPU time (wall where the host is blocked)"), ("host", "host time of step()")):
        rows: Rows = []
        for way in dict.fromkeys(row["way"] for row in found):
            cells = []
            for share in SHARES:
                row = bars.at(found, way, share)
                value = None if row is None else row["best"] if metric == "best" else row[metric]["median"]
                cells.append(ms(value))
            rows.append((way, *cells))
        shown[f"{title}, ms, by share of state on the device"] = ("way", *shares), rows
    rows = []
    for way in dict.fromkeys(row["way"] for row in found):
        row = bars.at(found, way, 0.0)
        rate = None if row is None or not row["best"] else 2 * row["host_bytes"] / row["best"] / 1e3
        rows.append((
            way, "-" if rate is None else number(rate), percent(bars.share_of_ceiling(found, way, part)),
            number(bars.worst_of_line(found, way)),
            "-" if (over := bars.all_near(found, way)) is None else f"{over:+.1f} %",
            "different" if way in part["different"] else "same",
        ))  # fmt: skip
    headings = ("way", "GB/s, all away", "of the ceiling", "worst ÷ line", "all near, over device", "bits")
    shown["what the times say"] = headings, rows
    return shown


def crossing(part: Part) -> dict[str, Shown]:
    """Bytes counted, and bytes that had to cross."""
    rows: Rows = [
        (f"{row['way']}, {row['share']:.0%} on the device", gb(row["must"]), gb(row["up"]), gb(row["down"]),
         number(row["ratio"]) if row["ratio"] is None else f"{row['ratio']:.4f}")
        for row in part["rows"]
    ]  # fmt: skip
    shown: dict[str, Shown] = {
        "bytes over the link in a step, counted by the card": (
            ("way", "GB each way that had to", "up", "down", "÷ had to"), rows)
    }  # fmt: skip
    rows = [
        (name, *(gb(found[what][direction]) for what in ("moved", "counted") for direction in ("up", "down")))
        for name, found in part["known"].items()
    ]
    headings = ("known traffic", "GB up", "GB down", "counted received", "counted sent")
    shown["what the counters count for known traffic"] = headings, rows
    rows = [(name, gb(nbytes)) for name, nbytes in part["profiler"].items()]
    shown["copies of one staged step, all away, as torch's profiler has them"] = ("copy", "GB"), rows
    return shown


def rivals(part: Part) -> dict[str, Shown]:
    """Steps of others."""
    found = part["rows"]
    ours = next((row["wall"]["median"] for row in found if row["name"] == OURS), None)
    rows: Rows = []
    for row in found:
        wall = row["wall"]
        rows.append((
            row["name"], row["what"], ms(wall["median"]), f"{ms(wall['p10'])} to {ms(wall['p90'])}",
            ms(row["gpu"]["median"] if row["gpu"] else None),
            "-" if ours is None else f"{wall['median'] / ours:.2f} x", f"{row['error']:.1e}" if "error" in row else "",
        ))  # fmt: skip
    headings = ("contender", "what", "wall ms", "p10 to p90", "GPU ms", "÷ ours", "error")
    return {f"a step over {part['numel'] / 1e6:,.0f} M parameters": (headings, rows)}


def driver(part: Part) -> dict[str, Shown]:
    """What the driver's own paging gives."""
    rows: Rows = [
        (row["name"], number(row["rate"] / 1e9), ms(row["wall"]["median"]), ms(row["blocks_host"]["median"]))
        for row in part["rows"]
    ]
    headings = ("managed pages", "GB/s", "ms", "the calls block the host, ms")
    steps: Rows = [
        (name, ms(wall["median"]), f"{ms(wall['p10'])} to {ms(wall['p90'])}") for name, wall in part["step"].items()
    ]
    return {
        f"the driver moves pages, {part['bytes'] / 2**30:.3g} GiB": (headings, rows),
        "placement='managed-driver', all state on the host before": (("what", "wall ms", "p10 to p90"), steps),
    }


def hidden(part: Part) -> dict[str, Shown]:
    """An update behind matrix products."""
    rows: Rows = []
    for row in part["rows"]:
        times = [timing["best"] for timing in row["times"].values()]
        rows.append((
            f"{row['placement']}, {row['access'].replace('_', ' ')}", str(row["blocks"] or "all"),
            *(ms(time) for time in times), ms(times[2] - times[0]), percent(row["hidden"]),
        ))  # fmt: skip
    headings = ("way", "blocks", "products alone, ms", "update alone", "together", "added", "hidden")
    return {f"an update behind bf16 products of {part['width']}²": (headings, rows)}


def memory(part: Part) -> dict[str, Shown]:
    """What a step takes."""
    rows: Rows = [
        (f"{row['way']}, {row['share']:.0%} on the device", gb(row["budget"]), gb(row["ring"]), gb(row["device_extra"]),
         number((row["device_extra"] - row["allowed"]) / 2**20), gb(row["away"]), gb(row["host_extra"]))
        for row in part["rows"]
    ]  # fmt: skip
    headings = ("way", "budget, GB", "ring, GB", "device taken, GB", "beyond, MiB", "state on the host, GB",
                "host taken, GB")  # fmt: skip
    return {"memory that an optimizer and three steps take": (headings, rows)}


#: What is shown of a loop (ms).
SPIKE = ("ordinary_ms", "large_ms", "behind_ms", "spill_ms", "unspill_ms")


def spike(part: Part) -> dict[str, Shown]:
    """A loop with large batches."""
    rows: Rows = [
        (name, *(number(found.get(key)) for key in SPIKE),
         f"{part['slowdown'][name]:.3f} x" if name in part["slowdown"] else "")
        for name, found in part["summary"].items()
    ]  # fmt: skip
    rows.append((f"without spilling: {part['helpless']}", *("-" for _ in SPIKE), ""))
    title = (
        f"every 20th batch is four times as large; card {gb(part['card'])} GB, state {gb(part['state_bytes'])} GB, "
        f"torch holds {gb(part['normal'])} GB in an ordinary step and needs {gb(part['spiked'])} GB in a large one; "
        f"losses {'the same' if part['same'] else 'DIFFERENT'}"
    )
    return {
        title: (
            ("loop", "ordinary step, ms", "large", "the one behind it", "spilling", "taking back", "÷ unpaged"),
            rows,
        )
    }


def cpu(part: Part) -> dict[str, Shown]:
    """State in a file."""
    disk = part["disk"]
    rows: Rows = []
    for row in part["rows"]:
        in_file = row["by_place"].get("file", 0)
        rows.append((
            row["name"], "-" if row["budget"] is None else number(row["budget"] / 2**20),
            number(row["resident"] / 2**20), number(in_file / 2**20), number(row["median_ms"]),
            number(2 * in_file / row["median_ms"] / 1e6) if in_file else "-",
            "different" if row["name"] in part["different"] else "same",
        ))  # fmt: skip
    headings = ("state", "budget, MiB", "resident, MiB", "in the file, MiB", "step, ms", "GB/s to and fro", "bits")
    title = (
        f"CPU, {part['numel'] / 1e6:,.0f} M parameters, {part['state_bytes'] / 2**20:,.0f} MiB of state; the disk "
        f"writes {disk['write'] / 1e9:.2f} GB/s and reads {disk['read'] / 1e9:.2f} GB/s"
    )
    return {title: (headings, rows)}


#: Part → its tables.
TABLES: dict[str, Callable[[Part], dict[str, Shown]]] = {
    "link": link, "sweep": sweep, "rivals": rivals, "driver": driver, "hidden": hidden, "memory": memory,
    "spike": spike, "bytes": crossing, "cpu": cpu,
}  # fmt: skip


def of_part(name: str, part: Part) -> dict[str, Shown]:
    """Tables by title."""
    return TABLES[name](part)


def sections(result: Mapping[str, Any]) -> dict[str, str]:
    """What :func:`experiments.report.fill` puts into the note."""
    known = result["parts"]
    found = {
        name: "\n\n".join(
            f"**{title}**\n\n{report.markdown(*shown)}" for title, shown in of_part(name, known[name]).items()
        )
        if name in known
        else "not measured in this run"
        for name in TABLES
    }
    left_out = "\n".join(f"- {line}" for line in result["left_out"]) or "nothing"
    plain = dict(result)
    return {"machine": report.machine_line(plain), "bars": report.bars_markdown(plain), **found, "left out": left_out,
            "ceilings": ceilings(known)}  # fmt: skip


def ceilings(known: Mapping[str, Any]) -> str:
    """One sentence with the rates that the bars divide by."""
    if "link" not in known:
        return "not measured in this run"
    rates = ", ".join(f"{name} {rate / 1e9:,.1f}" for name, rate in known["link"]["rates"].items())
    return f"GB/s: {rates}. ({BOTH} and in place: the sum of both directions.)"
