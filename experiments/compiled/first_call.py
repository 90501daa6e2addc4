"""How long is the first step of a compiled optimizer by the number of tensors, and after how many steps has it paid?

Answer: see notes/compiled_optimizer.md.

AdamW over N tensors of 64 x 64, each step the first of a process of its own.  *Cold*: compilers' caches are empty;
*warm*: they are as the cold process left them; *portable*: they are empty, and what ``save_cache_artifacts`` gave is
loaded.  The clock starts once torch is
imported and an optimizer of torch was constructed, which loads Dynamo, and stops when the device is idle.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import BLUE, GRAY, GREEN, ORANGE, RED, Lines
from experiments.works.first_steps import (
    COLD,
    FOREACH,
    FUSED,
    OURS_COLD,
    OURS_WARM,
    PORTABLE,
    TRACED,
    WARM,
    WHOLE,
    first_step,
)
from experiments.works.fresh import empty_caches, fresh

MEASURES = ("kernels", "launch", "tables", "optim", "system")
#: Ways whose processes use the same caches one after the other, and the numbers of tensors of each.
Plan = Sequence[tuple[tuple[str, ...], Sequence[int]]]
#: What it costs beside some 8 s for each of the 27 processes is reckoned from a first reading on an H200: cold 3, 7 and
#: 20 s at 1, 10 and 100 tensors, and more than 200 s at 300, which are not compiled again.
ON_GPU: Plan = (
    ((COLD, WARM), (1, 10, 30)),  # 3, 7 and 10 s cold, 5 s warm
    ((COLD, WARM, PORTABLE), (110,)),  # 23 s cold, 4 s each of the others
    ((COLD,), (148,)),  # GPT-2's number: 40 to 60 s
    ((OURS_COLD, OURS_WARM), (1, 110, 1000)),  # less than 2 s each
    ((FOREACH,), (1, 10, 30, 110, 148)),
    ((FUSED,), (1, 10, 30, 110, 148)),
)
#: Compiled C++ says nothing of a GPU's kernels: on a CPU the list is traced, no more.
TOYS: Plan = (((TRACED, OURS_COLD), (2,)),)
#: Seconds after which a process is given up.
LIMIT = 120
RIVALS = (FOREACH, FUSED)


def measure(run: Run) -> Iterator[Row]:
    """A row per way and N: the first step, its phases (s), later steps (µs), kernels."""
    plan = TOYS if run.quick or run.device.type == "cpu" else ON_GPU
    for ways, count in run.each([(ways, count) for ways, counts in plan for count in counts]):
        with empty_caches() as caches, tempfile.TemporaryDirectory() as folder:
            for way in ways:
                about = {"way": way, "count": count, "device": run.device.type, "clock": "wall"}
                arguments = (str(run.device), way, count, f"{folder}/artifacts")
                if run.quick:  # a process takes seconds to begin
                    yield {**about, **next(first_step(*arguments))}
                    continue
                found = fresh(first_step, *arguments, limit=LIMIT, caches=None if way == PORTABLE else caches)
                if found.ended:
                    run.leave_out(f"{count} tensors, {way}: {found.ended}; nor what would use its caches")
                    break
                yield {**about, **found.row}


def derive(rows: Rows) -> Rows:
    """What no phase explains, the steps after which a rival has taken longer, and powers of N."""
    found = Rows()
    for row in rows:
        first, phases = row["first"]["median"], row["phases"]
        paid = {f"paid, {way}": paid_after(row, rows.first(way=way, count=row["count"])) for way in RIVALS}
        off = abs(1 - math.fsum(phases.values()) / first) if phases else None
        found.append({**row, "what": "step", "first_s": first, "off": off, "phased": off is not None, **paid})
    return Rows([*found, *powers(found)])


def paid_after(row: Row, rival: Row | None) -> int | str | None:
    """The first step by which a rival has taken longer in all, first steps included; None: no rival was measured."""
    if rival is None or row["way"] == rival["way"]:
        return None
    ahead = row["first"]["median"] - rival["first"]["median"]
    gain = (rival["later"]["median"] - row["later"]["median"]) / 1e6
    if ahead <= 0:
        return 1
    return 1 + math.ceil(ahead / gain) if gain > 0 else "never"


def powers(steps: Rows) -> Iterator[Row]:
    """Exponents of N: through all points, and between the last two."""
    for way in WHOLE:
        known = sorted((row["count"], row["first_s"]) for row in steps.where(way=way))
        if len(known) > 2:
            across, up = np.log(np.array(known, float)).T
            last = (up[-1] - up[-2]) / (across[-1] - across[-2])
            exponents = {"exponent": float(np.polyfit(across, up, 1)[0]), "last": float(last)}
            yield {"what": "power", "way": way, "clock": "wall", "counts": [count for count, _ in known], **exponents}


def phase(name: str) -> Column:
    """A column of seconds of a phase."""
    return lambda row: row["phases"][name]


COLORS = {COLD: ORANGE, WARM: RED, PORTABLE: GREEN, OURS_COLD: BLUE, OURS_WARM: "black"}
PANEL = Lines(
    title="A compiled first step grows with the number of tensors, ours does not (AdamW, 64 x 64)",
    colors=lambda name: COLORS.get(name, GRAY),
    unit="s",
    x="count",
    y="first_s",
    each="way",
    label="tensors",
    inches=4.5,
)


def report(page: Page, rows: Rows) -> None:
    """Tables, a picture, and what is held to a limit."""
    steps, title = (rows.where(what="step"),
        "AdamW over N tensors of 64 x 64 on {device}: first step of a process, {clock}")  # fmt: skip
    columns: dict[str, Column] = {"step": "way", "N": "count", "first, s": "first", "later, µs": "later",
        "kernels": "kernels", **{f"paid against {way}, steps": f"paid, {way}" for way in RIVALS}}  # fmt: skip
    page.table(title, Rows(row for row in steps if row["count"] >= min(110, max(steps.values("count")))), columns)
    page.picture("first-step", rows.where(what="step", device="cuda"), [PANEL])
    page.bar("ours, cold, one tensor", rows.where(way=OURS_COLD, count=1, device="cuda"), "first_s", "≤ 0.5 s")
    page.bar("ours, cold, 1,000 tensors", rows.where(way=OURS_COLD, count=1000, device="cuda"), "first_s", "≤ 2.0 s")
    page.bar("ours, warm", rows.where(way=OURS_WARM, device="cuda"), "first_s", "≤ 0.3 s")
    page.bar("compiled: of the first step, what no phase explains", rows.where(device="cuda"), "off", "≤ 0.05")
