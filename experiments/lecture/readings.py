"""What several rows say to a claim: functions of the rows of the question that ``claims.toml`` names.

Each returns the text, its numbers and whether the claim holds; or None where the rows are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from experiments.harness.rows import Row, Rows, number_in
from experiments.lecture.claims import Said

LOOP, FOREACH, FUSED, OURS = "torch loop", "torch foreach", "torch fused", "PagedAdamW"
COMPILED, TRITON = "torch.compile of foreach", "Triton over our table"
DEFAULT, LIST = "torch, by default", "one pointer list (ours)"
SPLIT, COMBINED, POINTERS = "split_stack", "combined", "pointer list"
ADVISED = "preferred host, accessed by"


def counts(rows: Rows, operation: str, rung: str) -> Row | None:
    """The longest list whose kernels were counted."""
    known = [row for row in rows.where(operation=operation, rung=rung) if row.get("kernels") is not None]
    return max(known, key=lambda row: row["count"], default=None)


#: Of what is compared, the part that is no more than how memory is handed out, or how a clock ticks.
MARGIN = 0.01


def beside(rows: Rows, name: str, wanted: Iterable[str], **where: Any) -> list[Row] | None:
    """Rows by the values of one column, all of which have to be there and have times, by one clock."""
    found = [rows.first(**{name: value}, **where) for value in wanted]
    return None if any(row is None or row.get("time", row.get("wall")) is None for row in found) else found  # type: ignore[return-value]


def mib(value: float) -> float:
    """Bytes in MiB."""
    return value / 2**20


# --- optimizer_ladder


def speed_for_memory(rows: Rows) -> Said | None:
    """A1: does the fastest of torch's own ways need more than the slowest, by more than its step counts?"""
    ways = beside(rows, "case", (LOOP, FOREACH, FUSED), key="gpt2")
    if ways is None:
        return None
    slow, fast = max(ways, key=lambda row: row["time"]), min(ways, key=lambda row: row["time"])
    values = {"slow": slow["case"], "slow_ms": slow["time"] / 1e3, "slow_mib": mib(slow["need"]),
              "fast": fast["case"], "fast_ms": fast["time"] / 1e3, "fast_mib": mib(fast["need"]),
              "clock": fast["clock"]}  # fmt: skip
    text = "GPT-2, {clock}: {slow} {slow_ms} ms, {slow_mib} MiB; {fast} {fast_ms} ms, {fast_mib} MiB"
    return Said(text, fast["need"] - slow["need"] > MARGIN * slow["state"], values)


def trips(rows: Rows) -> Said | None:
    """A2."""
    found = [rows.first(way=FOREACH, size=size) for size in (1, 8)]
    if None in found:
        return None
    one, eight = (row for row in found if row)
    values = {
        "one": one["trips"],
        "one_ms": one["time"] / 1e3,
        "eight": eight["trips"],
        "eight_ms": eight["time"] / 1e3,
        "clock": one["clock"],
    }
    text = "{clock}: {one} trips, {one_ms} ms; {eight} trips, {eight_ms} ms"
    return Said(text, (one["trips"], eight["trips"]) == (512, 64) and eight["time"] < one["time"], values)


def bridge(rows: Rows) -> Said | None:
    """A3: does the largest truck of foreach have to stay behind, and who passes?"""
    heavy = rows.where(key="bytes cost")
    if not heavy or not heavy.where(way=FOREACH) or not heavy.where(way=OURS):
        return None
    most = {way: max((r["size"] for r in heavy.where(way=way, passes=True)), default=0) for way in (FOREACH, OURS)}
    values = {"foreach": most[FOREACH], "ours": most[OURS], "all": max(heavy.values("size")),
              "mib": round(mib(heavy[0]["bridge"]))}  # fmt: skip
    text = "a bridge of {mib} MiB: foreach passes with {foreach} of {all} tensors, ours with {ours}"
    return Said(text, most[FOREACH] < values["all"], values)


def sgd(rows: Rows) -> Said | None:
    """A4."""
    if (row := counts(rows, "SGD", LOOP)) is None:
        return None
    return Said("{kernels} kernels for {count} tensors in a loop", row["kernels"] == row["count"], row)


def loop(rows: Rows) -> Said | None:
    """A5: a straight line through the origin?"""
    line, row = rows.first(what="line", operation="AdamW", rung=LOOP), counts(rows, "AdamW", LOOP)
    if line is None or row is None:
        return None
    values = {"each": line["b"], "count": row["count"], "kernels": row["kernels"]}
    text = "{each} kernels a tensor: {kernels} for {count}"
    return Said(text, line["farthest"] < 0.5 and abs(line["a"]) < 0.5, values)


def foreach(rows: Rows) -> Said | None:
    """A6: is it what torch takes by itself?"""
    row, default = counts(rows, "AdamW", FOREACH), counts(rows, "AdamW", DEFAULT)
    if row is None or default is None:
        return None
    values = {
        "kernels": row["kernels"],
        "operators": row["operators"],
        "count": row["count"],
        "default": default["kernels"],
    }
    text = "{operators} operators, {kernels} kernels for {count} tensors; by default {default}"
    return Said(text, row["kernels"] == default["kernels"], values)


def fused(rows: Rows) -> Said | None:
    """A7: one kernel, and no more?"""
    row, mine = counts(rows, "AdamW", FUSED), counts(rows, "AdamW", LIST)
    if row is None or mine is None:
        return None
    values = {"kernels": row["kernels"], "count": row["count"], "ours": mine["kernels"]}
    return Said("{kernels} kernels for {count} tensors; one pointer list {ours}", row["kernels"] == 1, values)


def add(rows: Rows) -> Said | None:
    """A9."""
    each, together = counts(rows, "add", LOOP), counts(rows, "add", FOREACH)
    if each is None or together is None:
        return None
    values = {"each": each["kernels"], "together": together["kernels"], "count": each["count"]}
    text = "{count} tensors: {each} kernels for add, {together} for _foreach_add_"
    return Said(text, together["kernels"] < each["kernels"], values)


def alignment(rows: Rows) -> Said | None:
    """A21: what does it cost whoever does not care?"""
    off = [rows.first(optimizer=name, where="one element off") for name in (FUSED, FOREACH, OURS)]
    if any(row is None or row.get("cost") is None for row in off):
        return None
    values = {name: row["cost"] for name, row in zip(("fused", "foreach", "ours"), off, strict=True) if row}
    text = "one element off 16 bytes: torch fused {fused} x, foreach {foreach} x, ours {ours} x the time"
    return Said(text, values["fused"] > 1.02, values)


def triton(rows: Rows) -> Said | None:
    """A27: is it too limited?"""
    ways = beside(rows, "case", (TRITON, f"{OURS}, device"), key="gpt2")
    if ways is None:
        return None
    found, mine = ways
    values = {"triton": found["time"] / 1e3, "ours": mine["time"] / 1e3, "clock": mine["clock"]}
    return Said("a Triton kernel over our table does GPT-2 in {triton} ms, ours in {ours} ({clock})", False, values)


def quantized(rows: Rows) -> Said | None:
    """C7: is the least state half of float32's, or less?"""
    mine = [row for row in rows.where(key="gpt2") if row["case"].startswith(f"{OURS}, ") and row.get("state")]
    full = rows.first(key="gpt2", case=f"{OURS}, device")
    formats = [row for row in mine if row["case"].endswith(" state")]
    if full is None or not formats:
        return None
    least = min(formats, key=lambda row: row["state"])
    values = {"name": least["case"], "mib": mib(least["state"]), "full": mib(full["state"]), "ms": least["time"] / 1e3,
              "clock": least["clock"]}  # fmt: skip
    text = "GPT-2, {name}: {mib} MiB in place of {full}, {ms} ms ({clock})"
    return Said(text, least["state"] <= (1 + MARGIN) * full["state"] / 2, values)


def effort(rows: Rows) -> Said | None:
    """C1: is what people wrote by hand faster than what is compiled, and in how many lines?"""
    ways = beside(rows, "case", (COMPILED, FUSED, OURS))
    if ways is None or any(row.get("share") is None or row.get("lines") is None for row in ways):
        return None
    values: dict[str, Any] = {}
    for name, row in zip(("compiled", "fused", "ours"), ways, strict=True):
        values |= {f"{name}_lines": row["lines"], f"{name}_share": row["share"]}
    text = (
        "torch.compile {compiled_lines} lines, {compiled_share} % of a copy; torch fused {fused_lines} lines, "
        "{fused_share} %; ours {ours_lines} lines, {ours_share} %"
    )
    return Said(text, values["ours_share"] > values["compiled_share"], values)


def llama(rows: Rows) -> Said | None:
    """C14: do concrete shapes say something else of who is faster, and by how much, than tiny ones?"""
    names = (f"{OURS}, device", FUSED)
    there, tiny = (beside(rows, "case", names, key=key) for key in ("llama", "1000"))
    if there is None or tiny is None or there[0].get("share") is None:
        return None
    row, faster = there[0], [fused["time"] / mine["time"] for mine, fused in (there, tiny)]
    values = {"ms": row["time"] / 1e3, "share": row["share"], "numel": row["numel"], "clock": row["clock"],
              "there": faster[0], "toys": tiny[0]["work"], "tiny": faster[1]}  # fmt: skip
    text = (
        "one layer of a Llama 70B, {numel} parameters: {ms} ms ({clock}), {share} % of a copy; torch fused takes "
        "{there} x that, over {toys} {tiny} x"
    )
    return Said(text, abs(faster[0] / faster[1] - 1) > 10 * MARGIN, values)


# --- pointer_transports


def launches(rows: Rows) -> Said | None:
    """A8: of the same list, in many launches, in some, in one."""
    ways = beside(rows, "way", ("struct 4 KB", "struct 32 KB", "managed"), lists=4, count=1000, mode="rewritten")
    if ways is None:
        return None
    ways.sort(key=lambda row: row["launches"])
    walls = [number_in(row, "wall") or 0.0 for row in ways]
    values = {f"launches{i}": row["launches"] for i, row in enumerate(ways)} | {
        f"us{i}": us for i, us in enumerate(walls)
    }
    values["count"] = ways[0]["count"]
    text = "{count} tensors: {launches0} launch {us0} µs, {launches1} launches {us1}, {launches2} launches {us2}"
    return Said(text, walls == sorted(walls), values)


def failing(rows: Rows) -> Said | None:
    """A10."""
    tried = [row for row in rows if row["name"] in ("vector_nvcc", "vector_nvrtc", "host_list")]
    tried = [row for row in tried if row["outcome"] != "left out"]
    if not tried:
        return None
    failed = sum(row["outcome"] == "fails" for row in tried)
    return Said("{failed} of {tried} fail", failed == len(tried), {"failed": failed, "tried": len(tried)})


def batches(rows: Rows) -> Said | None:
    """A14."""
    known = rows.where(lists=4, way="struct 4 KB", mode="rewritten")
    if not known:
        return None
    most = max(known, key=lambda row: row["count"])
    values = {"count": most["count"], "launches": most["launches"], "ms": (number_in(most, "wall") or 0) / 1e3}
    return Said("{count} tensors in {launches} launches, {ms} ms", most["launches"] > 1, values)


TORCH = ("torch.tensor(ptrs).to(cuda)", "….pin_memory(), non_blocking")


def torch_copies(rows: Rows) -> Said | None:
    """A15: every update was counted before it was timed."""
    ways = beside(rows, "way", (*TORCH, "memcpy"), lists=4, count=1000, mode="rewritten")
    if ways is None:
        return None
    names = ("pageable", "pinned", "ours")
    values = {name: number_in(row, "wall") for name, row in zip(names, ways, strict=True)} | {"count": ways[0]["count"]}
    text = "{count} tensors: torch.tensor(ptrs).to(cuda) {pageable} µs, pinned {pinned} µs; our ring {ours} µs"
    return Said(text, True, values)


def negligible(rows: Rows) -> Said | None:
    """A16: is torch's copy and one launch less than structs in many launches, at every length?"""
    wall = {(row["way"], row["count"]): number_in(row, "wall") or 0.0 for row in rows.where(lists=4, mode="rewritten")}
    lengths = sorted(count for way, count in wall if way == TORCH[0] and ("struct 4 KB", count) in wall)
    if not lengths:
        return None
    won = [count for count in lengths if wall[TORCH[0], count] < wall["struct 4 KB", count]]
    ours = [count for count in lengths if wall["memcpy", count] < wall["struct 4 KB", count]]
    text = "less than the launches it saves at {won} tensors; our ring's at {ours}"
    lists = {"won": ", ".join(map(shown, won)) or "no number of", "ours": ", ".join(map(shown, ours)) or "no number"}
    return Said(text, won == lengths, lists)


def shown(count: int) -> str:
    """A number of tensors."""
    return f"{count:,}"


def advised(rows: Rows) -> Said | None:
    """A19: what pages that migrate cost, and what advice makes of it."""
    known = rows.where(mode="rewritten")
    if not known:
        return None
    most = max(known.values("count"))
    none, both = (known.first(way=way, count=most) for way in ("none", ADVISED))
    if none is None or both is None:
        return None
    values = {"count": most, "none": number_in(none, "wall"), "both": number_in(both, "wall")}
    text = "{count} pointers rewritten: {none} µs without advice, {both} µs with"
    return Said(text, (values["none"] or 0) > 1.5 * (values["both"] or 0), values)


def hybrid(rows: Rows) -> Said | None:
    """A20: by value while it fits, copied from then on, always one launch."""
    known = rows.where(lists=4, way="hybrid", mode="rewritten")
    if not known:
        return None
    by_value = [row["count"] for row in known if not row["copied_bytes"]]
    copied = [row["count"] for row in known if row["copied_bytes"]]
    values = {
        "value": max(by_value, default=0),
        "copied": min(copied, default=0),
        "launches": max(r["launches"] for r in known),
    }
    text = "by value at {value} tensors, copied from {copied} on; launches: {launches}"
    return Said(text, bool(by_value and copied) and values["launches"] == 1, values)


# --- launch_overhead


def eager(rows: Rows) -> Said | None:
    """C2."""
    lines = {row["line"]: row for row in rows if row.get("kernels") is not None}
    printed = next((row for line, row in lines.items() if line.startswith("print")), None)
    work = [row for line, row in lines.items() if any(part in line for part in ("+", "cos", "relu"))]
    if printed is None or len(work) < 3:
        return None
    one = sum(row["kernels"] == 1 for row in work)
    values = {"one": one, "lines": len(work), "kernels": printed["kernels"], "copies": printed["copies"],
              "waits": "waits" if printed["waited"] else "does not wait"}  # fmt: skip
    text = (
        "{one} of {lines} lines of arithmetic are one kernel each; print {waits} ({kernels} kernels, {copies} copies)"
    )
    return Said(text, one == len(work) and bool(printed["waited"]), values)


def saturated(rows: Rows) -> Said | None:
    """D3."""
    row = rows.first(operation="LayerNorm", where="one tensor", rows=16384)
    if row is None or row.get("of_slice") is None:
        return None
    few = rows.first(operation="LayerNorm", where="one tensor", rows=1024)
    times = row["rows"] // few["rows"] if few else 0
    return Said(
        "{times} times the data, {longer} times as long",
        row["of_slice"] < times,
        {"times": times, "longer": row["of_slice"]},
    )


def pointer_list(rows: Rows) -> Said | None:
    """D6."""
    names = (SPLIT, COMBINED, POINTERS)
    ways = beside(rows, "case", names, of="way", batch=1024)
    if ways is None:
        return None
    split, combined, mine = ways
    values = {"kernels": mine["kernels"], "ours": number_in(mine, "wall"), "split": number_in(split, "wall"),
              "combined": number_in(combined, "wall"), "split_kernels": split["kernels"]}  # fmt: skip
    text = (
        "pointer list over separate tensors {kernels} kernels, {ours} µs; stacked {split_kernels} kernels, {split} µs; "
        "of one tensor {combined} µs"
    )
    return Said(text, (values["ours"] or 0) < (values["split"] or 0), values)


def numerics(rows: Rows) -> Said | None:
    """D8."""
    compiled, combined = (rows.first(of="way", case=name) for name in (f"{COMBINED}, compiled", COMBINED))
    if compiled is None or combined is None:
        return None
    values = {
        "compiled": float(compiled["difference"]),
        "combined": float(combined["difference"]),
        "times": compiled["of_eager"],
    }
    text = "compiled {compiled}, combined {combined}; compiled is off from float64 by {times} x what eager is"
    return Said(text, combined["difference"] == 0 and compiled["difference"] < 1e-6, values)


def replayed(rows: Rows) -> Said | None:
    """D10."""
    eager_, replay = (rows.first(work=SPLIT, mode=mode) for mode in ("eager", "replayed"))
    if eager_ is None or replay is None:
        return None
    values = {
        "kernels": replay["kernels"],
        "before": eager_["kernels"],
        **{n: replay[n] for n in ("launches", "operators", "allocations")},
    }
    text = (
        "{kernels} kernels as {before} eagerly, launches {launches}, operators {operators}, allocations {allocations}"
    )
    same = replay["kernels"] == eager_["kernels"] and replay["launches"] == 1
    return Said(text, same and not replay["operators"] and not replay["allocations"], values)


def reasons(rows: Rows) -> Said | None:
    """D11."""
    gone = [row["reason"] for row in rows if not row["holds"]]
    values = {"gone": len(gone), "all": len(rows), "names": f": {', '.join(gone)}" if gone else ""}
    return Said("{gone} of {all} no longer hold{names}", not gone, values) if rows else None


READINGS: dict[str, Callable[[Rows], Said | None]] = {
    "A1": speed_for_memory, "A2": trips, "A3": bridge, "A4": sgd, "A5": loop, "A6": foreach, "A7": fused,
    "A8": launches, "A9": add, "A10": failing, "A14": batches, "A15": torch_copies, "A16": negligible,
    "A19": advised, "A20": hybrid, "A21": alignment, "A27": triton, "C1": effort, "C2": eager,
    "C7": quantized, "C14": llama,
    "D3": saturated, "D6": pointer_list, "D8": numerics, "D10": replayed, "D11": reasons,
}  # fmt: skip
