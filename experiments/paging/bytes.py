"""How many bytes cross the link in a step, and how many had to?

Answer (H200, 2026-11): 1.0004 to 1.0014 times as many, in every way at every share; with nothing away one megabyte
goes up.

Counted by the card: known traffic of the same kind first, copies both ways for the
staged way and the plain kernel for those in place; for the staged way torch's profiler is a second witness.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from experiments.lab import Column, Page, Row, Rows, Run, gb, number
from experiments.works.link import BOTH, IN_PLACE, MOVES, Link
from experiments.works.paged import PAGED, WAY_AND_SHARE, Problem, adamw, away_bytes
from experiments.works.trace import trace_events
from pagedopt.system.driver import bindings, check

# --- bytes over the link, counted by the card: NVML's PCIe byte counters, and what they count per byte that is moved

#: To the device and from it: (received by the card, sent by it).
Bytes = np.ndarray[Any, Any]
#: ``NVML_FI_DEV_PCIE_COUNT_TX_BYTES`` and ``…_RX_BYTES`` (nvml.h): sent by the card, received by it.
SENT, RECEIVED = 197, 198
#: The counters have 32 bits.
MODULUS = 1 << 32
#: More raw bytes than this in one reading and a wrap could be missed.
MOST = 3_500_000_000
#: The most raw bytes per byte seen so far (in place, sent: requests travel with what is written).
OVERHEAD = 1.45
#: Seconds until the counters have everything.
SETTLE = 0.1


def difference(before: Bytes, after: Bytes) -> Bytes:
    """What counters have counted from one reading to the next, if that is less than their range."""
    return (after - before) % MODULUS


def fits(moved: int) -> bool:
    """Whether so many bytes, and what comes with them, are counted without a wrap too many."""
    return OVERHEAD * moved < MOST


class LinkCounters:
    """The PCIe byte counters of one card.

    Raises:
        RuntimeError: NVML is not here, or has no such counters.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import nvml
        except ImportError as error:
            raise RuntimeError(f"NVML is not here: {error}; cuda-bindings has it from 12.9.6 and 13.2 on") from None
        self._nvml: Any = nvml
        try:
            nvml.init_v2()
        except (nvml.NvmlError, RuntimeError) as error:  # the latter where there is no driver
            raise RuntimeError(f"NVML is not here: {error}") from None
        d = bindings()
        handle = check("cuDeviceGet", d.cuDeviceGet(device.index))
        address = check("cuDeviceGetPCIBusId", d.cuDeviceGetPCIBusId(32, handle)).split(b"\0")[0].decode()
        self._card = nvml.device_get_handle_by_pci_bus_id_v2(address)
        self.read()

    def read(self) -> Bytes:
        """The counters now."""
        values = self._nvml.FieldValue(2)
        values.field_id, values.scope_id = (RECEIVED, SENT), (0, 0)  # what is not set may be rubbish
        values = self._nvml.device_get_field_values(self._card, values)
        for field, code in zip(values.field_id, values.nvml_return, strict=True):
            if code:
                raise RuntimeError(f"field {field} failed with {code}: {self._nvml.error_string(int(code))}")
        return np.array([int(value) % MODULUS for value in values.value["ull_val"]])

    def count(self, run: Callable[[], object], times: int = 4) -> Bytes:
        """What is counted during one run (which may be asynchronous), the median of ``times``."""
        counts = []
        for _ in range(times):
            before = self._settled()
            run()
            counts.append(difference(before, self._settled()))
        return np.median(counts, axis=0)

    def _settled(self) -> Bytes:
        torch.cuda.synchronize()
        time.sleep(SETTLE)
        return self.read()


# --- the question

NEEDS_GPU = True
MEASURES = ("launch", "tables", "paging", "placements")
#: Shares of state on the device.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Kinds of rows: counts of nothing and of known traffic, of steps, and the profiler's copies.
IDLE, KNOWN, STEP, PROFILER = "idle", "known", "step", "profiler"


def measure(run: Run) -> Iterator[Row]:
    """Bytes counted for known traffic, then by way and share, beside those that had to cross."""
    problem, counters = Problem(run), LinkCounters(run.device)
    idle = counters.count(lambda: None)
    yield {"kind": IDLE, **up_and_down("counted_", idle)}
    per_byte = {}
    for name, (moved, counted) in _known(run, counters, idle).items():
        per_byte[name] = counted / np.maximum(moved, 1)
        run.say(f"{name}: counted {per_byte[name][0]:.4f} up, {per_byte[name][1]:.4f} down per byte")
        yield {"kind": KNOWN, "what": name, **up_and_down("moved_", moved), **up_and_down("counted_", counted)}
    run.free()
    for name, options in run.each(PAGED.items()):
        with run.attempt(name):
            known = per_byte[BOTH if options["host_access"] == "staged" else IN_PLACE]
            for row, counted in _steps(problem, name, counters):
                row |= up_and_down("", (counted - idle) / known)
                run.say(f"{WAY_AND_SHARE(row)}: {row['up']:,.0f} up, {row['down']:,.0f} down of {row['must']:,}")
                yield row
    with run.attempt("torch.profiler as a second witness"):
        for name, nbytes in copied(_profiled(problem)).items():
            yield {"kind": PROFILER, "what": name, "bytes": nbytes}


def up_and_down(name: str, nbytes: Bytes) -> Row:
    """Two columns."""
    return {f"{name}up": nbytes[0].item(), f"{name}down": nbytes[1].item()}


def _known(run: Run, counters: LinkCounters, idle: Bytes) -> dict[str, tuple[Bytes, Bytes]]:
    """What is moved, and what is counted for it, in traffic whose bytes are known."""
    link = Link.of(run)
    cases = link.cases(link.best_blocks(run)[0])
    for case in cases:
        case.run()
    return {case.name: (np.array(MOVES[case.name]) * link.nbytes, counters.count(case.run) - idle) for case in cases}


def _steps(problem: Problem, name: str, counters: LinkCounters) -> Iterator[tuple[Row, Bytes]]:
    """Bytes that had to cross in a step of a way at every share, and what is counted."""
    optimizer = adamw(problem.parameters(), device_budget=0, **PAGED[name])
    optimizer.step()
    for share in SHARES:
        optimizer.set_device_budget(int(share * problem.state_bytes))
        optimizer.step()
        must = away_bytes(optimizer.memory_report())
        if fits(must):
            yield {"kind": STEP, "way": name, "share": share, "must": must}, counters.count(optimizer.step)
        else:
            problem.run.leave_out(f"{name}: {must:,} bytes could wrap the counters twice")


def _profiled(problem: Problem) -> Sequence[dict[str, Any]]:
    """The profiler's events of one staged step with all state on the host."""
    step = adamw(problem.parameters(), placement="mapped", host_access="staged", device_budget=0).step
    for _ in range(3):  # a first step loads things, and a first trace wakes the profiler up
        events = trace_events(step)
    return events


def copied(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Bytes of the copies in a Chrome trace, by their name.

    >>> copied([{"cat": "gpu_memcpy", "name": "HtoD", "args": {"bytes": 3}}, {"cat": "kernel"}])
    Counter({'HtoD': 3})
    """
    found: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            found[event["name"]] += int(event["args"]["bytes"])
    return found


def derive(rows: Rows) -> Rows:
    """Bytes that crossed over those that had to, both directions together; nothing where none had to."""
    found = Rows(rows)
    for i, row in enumerate(rows):
        if row["kind"] == STEP and row["must"]:
            found[i] = {**row, "of_must": (row["up"] + row["down"]) / (2 * row["must"])}
    return found


def crossing(row: Row) -> str:
    """How many times as many as had to; where none had to, how many."""
    return f"{row['of_must']:.4f}" if row["must"] else f"{number((row['up'] + row['down']) / 1e6)} MB"


COUNTING: dict[str, Column] = {
    "known traffic": "what",
    "GB up": gb("moved_up"),
    "GB down": gb("moved_down"),
    "counted received": gb("counted_up"),
    "counted sent": gb("counted_down"),
}
COPIES: dict[str, Column] = {"copy": "what", "GB": gb("bytes")}
CROSSED = "bytes over the link in a step, by the card, ÷ those that had to (none: how many), by share on the device"
WORST = "bytes that crossed ÷ bytes that had to, worst share"


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    page.grid(CROSSED, rows.where(kind=STEP), "way", "share", crossing, "way", "{:.0%}".format)
    page.detail.table("what the counters count for known traffic", rows.where(kind=KNOWN), COUNTING)
    page.detail.table("copies of one staged step, all away, as torch's profiler has them",
        rows.where(kind=PROFILER), COPIES)  # fmt: skip
    for way in PAGED:
        page.bar(f"{way}: {WORST}", rows.where(kind=STEP, way=way), "of_must", at_most=1.01, unit="x")
