"""What does a step do whose list names memory that was freed, moved or handed to somebody else, and who notices?

Answer: see notes/pointer_lifetime.md.

Each hazard (:mod:`experiments.works.mishaps`) in a process of its own, once for each way to hold the list.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.child import ROOT, Child
from experiments.lab import Page, Row, Rows, Run
from experiments.works import mishaps
from experiments.works.held_lists import BARE, OURS, OURS_GRAPH, TORCH, TORCH_GRAPH, WAYS
from experiments.works.mishaps import BAD, CRASH, HAZARDS, REFUSED

MEASURES = ("launch", "tables", "optim")
NAMED, NOTHING = "named", "nothing"
#: Who else might notice, and what is set for it: every allocation the driver's own.
WITNESSES = {"memcheck": (), "memcheck, no cache": ("PYTORCH_NO_CUDA_MEMORY_CACHING=1",)}
LIMIT = 60.0
COUNTED = {"harms": mishaps.HARMS, "wrong": mishaps.WRONG, "crashes": CRASH, "silent": mishaps.SILENT}


def in_child(hazard: str, way: str, device: str) -> Row:
    """One hazard, one way: a process that dies is an outcome.

    Raises:
        RuntimeError: Python ended it, with an error that is none of the hazard's.
    """
    child = Child(mishaps.played, hazard, way, device, limit=LIMIT, environment=mishaps.SAME_AGAIN)
    rows = list(child)
    if child.ended and child.ended.startswith("ended with 1:"):
        raise RuntimeError(child.ended)
    found = rows[0] if rows else {"outcome": CRASH, "elements": 0, "said": str(child.ended)[:300]}
    return {"hazard": hazard, "way": way, **found}


def under(witness: str, hazard: str, device: str) -> Row:
    """What a checker of memory says of bare addresses.

    Raises:
        RuntimeError: it is not here, or did not end, or did not count.
    """
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(tool):
        raise RuntimeError("compute-sanitizer is not here")
    code = f"from experiments.works.mishaps import played; print(*played({hazard!r}, {BARE!r}, {device!r}))"
    command = [
        "timeout", "--signal=KILL", f"{LIMIT:g}", "env", *WITNESSES[witness],
        tool, "--tool", "memcheck", "--report-api-errors", "no", sys.executable, "-c", code,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    return {"hazard": hazard, "way": witness, **judged(done.stdout)}


def judged(text: str) -> Row:
    """What a report of memcheck says.

    Raises:
        RuntimeError: it has no summary, or what it checked came to no end without an error of memory.
    """
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    errors = int(summary[1]) if summary else 0
    if summary is None or not (errors or "'outcome'" in text):
        raise RuntimeError(f"memcheck has checked nothing: {text.strip()[-200:]}")
    first = re.search(r"=+ (Invalid .*)", text)
    return {"outcome": NAMED if errors else NOTHING, "elements": 0, "said": first[1] if first else ""}


def measure(run: Run) -> Iterator[Row]:
    """A row per hazard and way, and per hazard and witness: outcome, elements that are wrong, what was said."""
    cuda, device = run.device.type == "cuda", str(run.device)
    asked = [name for name, hazard in HAZARDS.items() if (cuda or not hazard.late) and (hazard.quick or not run.quick)]
    jobs: list[tuple[Callable[..., Row], str, str]] = []
    if cuda:
        jobs += [(under, witness, name) for witness in WITNESSES for name in asked if not HAZARDS[name].late]
    else:
        run.left_out.append("other streams, graphs, memcheck: need a GPU")
    ways = [way for way in WAYS if cuda or "graph" not in way]
    jobs += [(in_child, name, way) for name in asked for way in run.size(ways, [BARE, OURS])]
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(function, one, other, device) for function, one, other in jobs]
        for (_, one, other), future in zip(run.each(jobs), futures, strict=True):
            with run.attempt(f"{one}, {other}"):
                yield {"what": "hazard", "device": run.device.type, **future.result()}


def derive(rows: Rows) -> Rows:
    """In the order of hazards, and a row per way: how often each outcome came; ``missed``: of those that ours names."""
    rows = Rows(sorted(rows, key=lambda row: list(HAZARDS).index(row["hazard"])))
    sums = Rows()
    for group in rows.groups("way"):
        counts = {name: len(group.where(outcome=outcome)) for name, outcome in COUNTED.items()}
        bad = sum(row["outcome"] in BAD for row in group)
        named = [row["hazard"] for row in rows.where(outcome=REFUSED) if row["way"] in (OURS, OURS_GRAPH)]
        missed = len([row for row in group.where(outcome=NOTHING) if row["hazard"] in named])
        about = {"what": "sum", "way": group[0]["way"], "device": group[0]["device"], "hazards": len(group)}
        sums.append({**about, **counts, "bad": bad, "missed": missed})
    return Rows([*rows, *sums])


def shown(row: Row) -> str:
    """The outcome, and of how many elements."""
    return row["outcome"] + (f" ({row['elements']:,})" if row["elements"] else "")


def unnoticed(rows: Rows) -> tuple[float, str] | None:
    """Hazards that ours lets through where torch does not, eager and in graphs, and those that get through both."""
    known = rows.where(what="hazard")
    bad = {way: {row["hazard"] for row in known.where(way=way) if row["outcome"] in BAD} for way in WAYS}
    both = [*sorted(bad[OURS] & bad[TORCH]), *sorted(bad[OURS_GRAPH] & bad[TORCH_GRAPH])]
    ours = len(bad[OURS] - bad[TORCH]) + len(bad[OURS_GRAPH] - bad[TORCH_GRAPH])
    return (ours, f" (both let through: {'; '.join(both)})" if both else "") if known.where(way=OURS) else None


def missed(rows: Rows) -> float | None:
    """Hazards that ours refuses by name, and of which memcheck says nothing."""
    return rows.number("missed", what="sum", way="memcheck")


def draw(figure: Any, rows: Rows) -> None:
    """The matrix: red what goes wrong, green what does not."""
    rows = rows.where(what="hazard")
    hazards, ways = rows.values("hazard"), [way for way in (*WAYS, *WITNESSES) if rows.where(way=way)]
    axes = figure.subplots()
    figure.set_size_inches(figure.get_figwidth(), 1.2 + 0.5 * len(hazards))
    for i, hazard in enumerate(hazards):
        for j, way in enumerate(ways):
            if row := rows.first(hazard=hazard, way=way):
                color = "#F2B8A0" if row["outcome"] in (*BAD, NOTHING) else "#A8DCC8"
                axes.barh(i, 1, left=j, height=1, color=color, edgecolor="white")
                axes.text(
                    j + 0.5,
                    i,
                    textwrap.fill(row["outcome"], 14),
                    ha="center",
                    va="center",
                    fontsize=7 if len(ways) > 4 else 8,
                )
    axes.set_xticks([j + 0.5 for j in range(len(ways))], [way.replace(", ", ",\n") for way in ways], fontsize=8)
    axes.set_yticks(range(len(hazards)), [hazard.replace(", ", ",\n") for hazard in hazards], fontsize=8)
    axes.set_xlim(0, len(ways))
    axes.set_ylim(len(hazards) - 0.5, -0.5)
    axes.xaxis.tick_top()


def quoted(rows: Rows) -> str | None:
    """What refusals and memcheck say."""
    said: dict[str, list[str]] = {}
    for row in rows.where(what="hazard"):
        if row["said"] and row["outcome"] != CRASH:
            said.setdefault(row["said"], []).append(f"{row['hazard']}, {row['way']}")
    return "\n".join(f"- {'; '.join(where)}: {text}" for text, where in said.items()) or None


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    page.grid("what a step does on {device}", rows.where(what="hazard"), "hazard", "way", shown, "hazard", str)
    page.detail.say(quoted(rows))
    page.picture("hazards", rows, draw, "What happens to a list whose tensors are no longer where they were")
    page.bar("hazards that pagedopt lets through, and torch does not", rows, unnoticed, at_most=0)
    page.bar("hazards that pagedopt names and memcheck does not", rows, missed, at_least=1)
