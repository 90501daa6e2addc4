"""Why has a copy an argument for its direction, and what does a wrong one do?

Answer: see notes/copies.md.

Every kind of memory into every other, by each direction, in processes of their own: what ends one is an outcome.  The
documentation calls a direction that does not fit undefined: this is what one driver does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run
from experiments.works.memory_kinds import DEVICE, KINDS, MANAGED, NBYTES, PAGEABLE, PINNED, RANGE, REGISTERED, memory

NEEDS_GPU = True
DIRECTIONS = ("HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice", "Default")
SYNC, ASYNC, NONE = "cudaMemcpy", "cudaMemcpyAsync", "cuMemcpyAsync"
#: The call, and its direction: the driver's has none.
CALLS = [(call, direction) for call in (SYNC, ASYNC) for direction in DIRECTIONS] + [(NONE, "none")]
PAIRS = [(source, target) for source in KINDS for target in KINDS]
RIGHT, CRASH, WRONG = "right", "crash", "wrong data"
LIMIT, PROCESSES, VALUE = 60.0, 6, 7
HOST, ON_DEVICE = (PAGEABLE, PINNED, REGISTERED), (DEVICE,)


def fits(source: str, target: str, direction: str) -> bool:
    """Whether a direction says what the two are; managed memory and ranges are both."""
    if direction in ("Default", "none"):
        return True
    sides = direction.split("To")
    allowed = {"Host": (*HOST, MANAGED), "Device": (*ON_DEVICE, MANAGED, RANGE)}
    return source in allowed[sides[0]] and target in allowed[sides[1]]


def tried(call: str, direction: str, first: int) -> Iterator[Row]:
    """In the child: pair after pair; a context that is broken ends it."""
    import torch
    from cuda.bindings import driver, runtime

    sources, targets = ({kind: memory(kind) for kind in KINDS} for _ in range(2))
    stream = torch.cuda.current_stream().cuda_stream
    kind: Any = getattr(runtime.cudaMemcpyKind, f"cudaMemcpy{direction}", None)
    for source, target in PAIRS[first:]:
        one, other = sources[source], targets[target]
        one.fill(VALUE)
        other.fill(0)
        if call == NONE:
            (code,) = driver.cuMemcpyAsync(other.address, one.address, NBYTES, stream)
        elif call == SYNC:
            (code,) = runtime.cudaMemcpy(other.address, one.address, NBYTES, kind)
        else:
            (code,) = runtime.cudaMemcpyAsync(other.address, one.address, NBYTES, kind, stream)
        (after,) = driver.cuCtxSynchronize()
        bad = code if int(code) else after
        outcome = f"error {int(bad)}" if int(bad) else RIGHT if bool((other.read() == VALUE).all()) else WRONG
        yield {"source": source, "target": target, "outcome": outcome, "said": bad.name if int(bad) else ""}
        if int(after):
            return


def every_pair(call: str, direction: str) -> list[Row]:
    """All pairs by one call; behind one that ended its process the next begins in another, so many times."""
    rows: list[Row] = []
    for _ in range(PROCESSES):
        if len(rows) == len(PAIRS):
            break
        child = Child(tried, call, direction, len(rows), limit=LIMIT)
        rows += child
        if child.ended and child.ended.startswith("ended with 1:"):
            raise RuntimeError(child.ended)
        if child.ended and len(rows) < len(PAIRS):
            source, target = PAIRS[len(rows)]
            rows.append({"source": source, "target": target, "outcome": CRASH, "said": child.ended[:100]})
    about = {"call": call, "direction": direction}
    return [{**about, **row, "fits": fits(row["source"], row["target"], direction)} for row in rows]


def measure(run: Run) -> Iterator[Row]:
    """A row per call, direction and pair of kinds."""
    with ThreadPoolExecutor(min(len(CALLS), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(every_pair, *call) for call in CALLS]
        for (call, direction), future in zip(run.each(CALLS), futures, strict=True):
            with run.attempt(f"{call}, {direction}"):
                rows = future.result()
                if missing := len(PAIRS) - len(rows):
                    run.leave_out(f"{call}, {direction}: the last {missing} pairs, after {PROCESSES} processes")
                yield from rows


def derive(rows: Rows) -> Rows:
    """And sums: of each direction how many pairs it fits, how many others are right all the same, refused, or worse.

    The first of several calls whose sums are alike has the names of all in ``calls``.
    """
    sums = Rows()
    for group in rows.groups("call", "direction"):
        other = group.where(fits=False)
        right = len(other.where(outcome=RIGHT))
        worse = len(other.where(outcome=WRONG)) + len(other.where(outcome=CRASH))
        fitting = group.where(fits=True)
        failed, refused = len(fitting) - len(fitting.where(outcome=RIGHT)), len(other) - right - worse
        about = {"what": "sum", "call": group[0]["call"], "direction": group[0]["direction"], "fitting": len(fitting)}
        sums.append(
            {**about, "failed": failed, "others": len(other), "right": right, "worse": worse, "refused": refused}
        )
    alike: dict[str, list[str]] = {}
    for group in sums.groups("call"):
        alike.setdefault(str([list(row.values())[2:] for row in group]), []).append(group[0]["call"])
    together = {calls[0]: " and ".join(calls) for calls in alike.values()}
    for row in sums:
        row |= {"calls": together.get(row["call"]), "first": row["call"] in together}
    counts = ("fitting", "failed", "others", "right", "worse", "refused")
    whole = {name: sum(row[name] for row in sums) for name in counts}
    default = sum(row["failed"] for row in sums if row["direction"] in ("Default", "none"))
    sums.append({"what": "all", **whole, "default": default})
    return Rows([*({**row, "what": "pair", "pair": f"{row['source']} → {row['target']}"} for row in rows), *sums])


def draw(figure: Any, rows: Rows) -> None:
    """A square for each direction of ``cudaMemcpyAsync``: from down, to across; hatched: the direction does not fit."""
    colors = {RIGHT: "#A8DCC8", WRONG: "#F2B8A0", CRASH: "#C05020"}
    figure.set_size_inches(figure.get_figwidth(), 6.5)
    grid = list(figure.subplots(2, 3).flat)
    for axes, direction in zip(grid, (*DIRECTIONS, "none"), strict=True):
        axes.set_title("no direction (cuMemcpyAsync)" if direction == "none" else direction, fontsize=9)
        for row in rows.where(what="pair", direction=direction, call=NONE if direction == "none" else ASYNC):
            y, x = KINDS.index(row["source"]), KINDS.index(row["target"])
            axes.barh(y, 1, left=x, height=1, color=colors.get(row["outcome"], "#E8E0A0"), edgecolor="white",
                      hatch="" if row["fits"] else "//")  # fmt: skip
            text = row["outcome"].replace("error ", "")
            axes.text(
                x + 0.5, y, "" if text == RIGHT else text.replace(" ", "\n"), ha="center", va="center", fontsize=7
            )
        first = axes in (grid[0], grid[3])
        names = [kind.partition(",")[0] for kind in KINDS]
        axes.set_yticks(range(len(KINDS)), names if first else [""] * len(KINDS), fontsize=7)
        axes.set_xticks([x + 0.5 for x in range(len(KINDS))], names, fontsize=7, rotation=90)
        axes.set_xlim(0, len(KINDS))
        axes.set_ylim(len(KINDS) - 0.5, -0.5)


TITLE = """cudaMemcpyAsync from one kind of memory (down) to another (across), by direction
green: right; yellow: refused, with error 1; red: wrong or a crash; hatched: the direction does not fit"""


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    page.table("{calls}: pairs of six kinds of memory, by direction", rows.where(first=True),
        {"direction": "direction", "pairs that it fits": "fitting", "of these not right": "failed",
        "other pairs": "others", "right all the same": "right", "refused": "refused",
        "wrong data or a crash": "worse"}, by=("calls", ))  # fmt: skip
    page.picture("directions", rows, draw, TITLE)
    page.bar("copies without a direction, or by Default, that are not right", rows.where(what="all"),
        "default", at_most=0)  # fmt: skip
