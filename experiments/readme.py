"""What ``README.md`` says in numbers, and its picture, made of results of a GPU that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.harness.main import KEPT
from experiments.harness.note import fill, markdown
from experiments.harness.panels import BLUE, GRAY, LETTERS
from experiments.harness.plot import PAGE, save
from experiments.harness.revision import ROOT
from experiments.harness.rows import Rows, best
from experiments.harness.show import number
from experiments.lecture.page import Results
from experiments.paging.rivals import FUSED, RIVAL, RIVAL_8BIT, SAME
from experiments.paging.sweep import BOTH, STEP, TIME
from pagedopt.commands.results import new_figure

README, PICTURE = ROOT / "README.md", KEPT / "readme.png"
STAGED = "mapped, staged"
OFFLOAD = "torchao CPUOffloadOptimizer"
HERE = {1.0: "pagedopt, all on the device", 0.0: "pagedopt, none on the device"}
RIVALS = {FUSED: "torch fused", OFFLOAD: OFFLOAD, RIVAL: RIVAL, RIVAL_8BIT: f"{RIVAL_8BIT}, 8-bit state"}
#: Works of ``fused_step`` by what the table calls them.
WORKS = {
    "gpt2": "GPT-2, 124 M, float32",
    "gpt2-bf16": "GPT-2, 124 M, bfloat16 with state in float32",
    "1b": "1 B in 60 tensors, float32",
    "1000": "1,000 tensors of 2 x 3",
}
CASES = {"pagedopt": "PagedAdamW", "torch fused": "torch fused", "a copy of its bytes": "copy of its bytes"}


def main() -> int:
    """Fill the page and draw its picture."""
    results = Results()
    fill(README, blocks(results))
    drawn = draw(budgets(results), gpu(results), PICTURE)
    print(f"filled: {README}" + (f"; drawn: {drawn}" if drawn else "; no picture: pip install matplotlib"))
    return 0


def asked(results: Results, shown: str) -> Rows:
    """Rows of ``experiment.question``.

    Raises:
        LookupError: none are kept.
    """
    if not (rows := results.rows(shown)):
        raise LookupError(f"no results of {shown} are kept in {results.folder}")
    return rows


def budgets(results: Results) -> Rows:
    """A row per budget and per rival, the fastest first: bytes of state on the device and on the host between steps."""
    sweep, rivals = asked(results, "paged_state.sweep"), asked(results, "paged_state.rivals")
    state = sweep[0]["state_bytes"]
    found = [
        {"name": HERE.get(row["share"], f"pagedopt, {100 * row['share']:.0f} % on the device"), "share": row["share"],
         "here": state - row["host_bytes"], "away": row["host_bytes"], "ms": best(row)["median"] / 1e3}
        for row in sweep.where(kind=TIME, case=STEP, way=STAGED)
    ]  # fmt: skip
    for row in rivals:
        if row["name"] in (FUSED, OFFLOAD) or row["what"] == SAME:
            here, away = (state, 0) if row["name"] == FUSED else (0, row.get("paged_bytes", state))
            ms = best(row)["median"] / 1e3
            found.append({"name": RIVALS[row["name"]], "share": None, "here": here, "away": away, "ms": ms})
    return Rows(sorted(found, key=lambda row: row["ms"]))


def blocks(results: Results) -> dict[str, str]:
    """Name → what stands between its markers."""
    return {"memory and time": memory_and_time(results), "resident": resident(results), "link": link(results)}


def memory_and_time(results: Results) -> str:
    """All, half and none of the state on the device, and rivals."""
    rivals = asked(results, "paged_state.rivals")
    over = rivals.number("over", name=RIVAL, what=SAME)
    ring = asked(results, "paged_state.memory").number("ring", way=STAGED, share=0.0)
    assert over is not None
    assert ring is not None
    lines = [
        (row["name"], number(row["here"] / 2**30), number(row["away"] / 2**30), number(row["ms"]))
        for row in budgets(results)
        if row["share"] in (None, 0.0, 0.5, 1.0)
    ]
    title = f"AdamW, {rivals[0]['numel'] / 1e6:,.0f} M float32 parameters"
    said = (
        f"{gpu(results)}; GPU time, or wall time where the host waits. State lies there before and after every step; "
        f"what is away passes through {ring / 2**20:.0f} MiB more on the device.\nBeside ours in one run, the 32-bit "
        f"one of bitsandbytes took {over:.2f} times as long (wall time); its 8-bit one moves a quarter of the bytes, "
        "for other numbers."
    )
    return markdown((title, "GiB of state on the device", "on the host", "ms a step"), lines) + f"\n\n{said}"


def resident(results: Results) -> str:
    """Steps whose state is on the device."""
    rows = asked(results, "fused_step.close_to_a_copy").where(device="cuda")
    lines = []
    for key, name in WORKS.items():
        found = [[rows.number(clock, key=key, case=case) for clock in ("gpu", "wall")] for case in CASES.values()]
        lines.append((name, *(" / ".join(map(number, times)) if all(times) else "" for times in found)))
    return markdown(("AdamW, all state on the device: GPU / wall, µs", *CASES), lines)


def link(results: Results) -> str:
    """What is between device and host, and what the device has."""
    rates = {row["what"]: row["moved"] / best(row)["median"] / 1e3 for row in asked(results, "paged_state.link")}
    return (
        f"On that {gpu(results)} the link moves {number(rates[BOTH])} GB/s, both ways together, and the memory of the "
        f"device {number(rates['HBM copy'])}."
    )


def gpu(results: Results) -> str:
    """The card's name."""
    result = results.of("paged_state")
    assert result is not None
    return str(result["machine"]["gpu"])


def draw(rows: Rows, card: str, target: Path) -> Path | None:
    """Bars for budgets and for rivals: GiB of state on the device, and ms a step; None without matplotlib."""
    if (figure := new_figure(PAGE, 0.9 + 0.3 * len(rows))) is None:
        return None
    figure.suptitle(
        f"A step of AdamW with {(rows[0]['here'] + rows[0]['away']) / 2**30:.0f} GiB of state, {card}",
        fontsize=LETTERS + 2,
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 3])
    panel(left, rows, [row["here"] / 2**30 for row in rows], "GiB of state on the device")
    panel(right, rows, [row["ms"] for row in rows], "ms a step")
    left.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=LETTERS)
    left.set_ylim(len(rows) - 0.4, -0.6)
    return save(figure, target, rows)


def panel(axes: Any, rows: Rows, values: list[float], label: str) -> None:
    """A bar per row, ours in another colour, each with its number inside the frame."""
    for at, (row, value) in enumerate(zip(rows, values, strict=True)):
        axes.barh(at, value, color=GRAY if row["share"] is None else BLUE)
        axes.annotate(number(value), (value, at), (7, 0), textcoords="offset points", va="center", fontsize=LETTERS)
    axes.set_xlim(0, 1.2 * max(values))
    axes.set_xlabel(label)
