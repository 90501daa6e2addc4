"""Which transport hands a list of pointers to a kernel fastest, and what advice does managed memory need for one?

Answer (H200, 2026-11): where the list is rewritten, managed memory with two pieces of advice costs at most 5 % more
than the fastest up to 1,000 tensors, and up to 42 % beyond.  Our copy and one launch beats structs of 4 KB from 10
tensors on, the least that was tried; torch's own copies do at no size.

Advice: preferred on the host, accessed by the device, or both: 1.2 to 1.5 ms to rewrite 65,536 pointers; 2.6 without,
when pages migrate on every rewrite, and 6.2 as read mostly.

Every way first updates its lists of tiny tensors rightly; all step in interleaved rounds, the
list rewritten before every step.  Every update is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from experiments.clock import Case
from experiments.lab import Page, Row, Rows, Run, number
from experiments.pictures import Lines
from pagedopt import Sweep, rule
from pagedopt.system import driver
from pagedopt.system.driver import Advice, Location, capabilities
from pagedopt.tables.layout import HostTable, Span, table_type
from pagedopt.transports.by_value import HybridTransport, StructTransport
from pagedopt.transports.ring import ManagedTransport, MappedTransport, MemcpyTransport, TableBuffer
from pagedopt.transports.transport import TABLE_AT, Argument, Lent, Transport, opaque

#: Elements of a tensor, (2, 3), and from one to the next, as torch's allocator would place them (512 bytes).
SHAPE, STRIDE = (2, 3), 128
ELEMENTS = SHAPE[0] * SHAPE[1]
#: A table in memory, as kernels name it.
TABLE_TYPE = table_type(0)


@rule
def count_one(value, *, by):
    """A table with one list: value + by"""
    return value + by


@rule
def count_four(param, grad, exp_avg, exp_avg_sq, *, by):
    """A table with the four lists of AdamW; what is stored stays a whole number."""
    param = param + by
    exp_avg = exp_avg + by
    exp_avg_sq = exp_avg_sq + by * grad
    return param, exp_avg, exp_avg_sq


RULES = {1: count_one, 4: count_four}


def advised(*advice: tuple[Advice, Location]) -> type[ManagedTransport]:
    """Managed memory with other advice."""
    return type("Advised", (ManagedTransport,), {"advice": advice})


class Prefetched(ManagedTransport):
    """No advice, but a prefetch to the device before each launch over new words."""

    advice = ()

    def publish(self, buffer: TableBuffer, words: int, stream: int) -> None:
        """Prefetch what has changed."""
        driver.prefetch(buffer.source, 8 * words, Location.DEVICE, self.device, stream)


class TorchCopies(Transport):
    """The lecture's words to the letter: in every step a list of numbers becomes a tensor, copied to the device."""

    name = "torch's copies"
    in_memory = True

    def __init__(self, device: int, pinned: bool) -> None:
        super().__init__(device)
        self.pinned = pinned

    def kind(self, table: HostTable) -> str:
        """A table in memory."""
        return TABLE_TYPE

    def lend(self, table: HostTable, stream: int) -> Lent:
        """The table as it is now."""
        copy = self.copied(torch.tensor(table.words.view(np.int64).tolist()))
        self.copied_bytes += table.words.nbytes
        return Copied(table, copy)

    def copied(self, words: torch.Tensor) -> torch.Tensor:
        """On the device; out of page-locked memory without waiting for the copy."""
        return (words.pin_memory() if self.pinned else words).to(f"cuda:{self.device}", non_blocking=self.pinned)


class Copied(Lent):
    """A table in a tensor, which torch gives to nobody else before the launches behind it on this stream are done."""

    kind = TABLE_TYPE

    def __init__(self, table: HostTable, copy: torch.Tensor) -> None:
        self._table, self._copy = table, copy
        self.address = copy.data_ptr()

    def parts(self, span: Span | None = None) -> tuple[tuple[Argument, int], ...]:
        """One launch over everything, or over a span."""
        first, last = span or (0, len(self._table.chunks))
        fields = np.zeros(1, TABLE_AT)
        fields["words"], fields["header"] = self.address, self._table.header(first, last)[0]
        return ((opaque(fields), last - first),) if last > first else ()


Make = Callable[[int], Transport]
TRANSPORTS: dict[str, Make] = {
    "managed": ManagedTransport,
    "mapped": MappedTransport,
    "memcpy": MemcpyTransport,
    "struct 4 KB": lambda device: StructTransport(device, 4096),
    "struct 32 KB": lambda device: StructTransport(device, 32764),
    "hybrid": HybridTransport,
}
#: torch's own calls in place of ours: copies of the whole table in every step, whether it was rewritten or not.
COPIES: dict[str, Make] = {
    "torch.tensor(ptrs).to(cuda)": lambda device: TorchCopies(device, pinned=False),
    "….pin_memory(), non_blocking": lambda device: TorchCopies(device, pinned=True),
}
ADVICE: dict[str, Make] = {
    "none": advised(),  # pages migrate to whoever touched them last
    "preferred host": advised((Advice.PREFERRED, Location.HOST)),  # the device maps them when it first faults
    "accessed by": advised((Advice.ACCESSED_BY, Location.DEVICE)),  # the device has them mapped, wherever they are
    "preferred host, accessed by": ManagedTransport,
    "preferred device": advised((Advice.PREFERRED, Location.DEVICE)),  # they return after every write of the host
    "read mostly": advised((Advice.READ_MOSTLY, Location.DEVICE)),  # a write throws the other side's copy away
    "prefetch": Prefetched,
}


class Lists:
    """``count`` tiny tensors in each of 1 or 4 lists, twice, and one sweep that goes over one or the other."""

    def __init__(self, lists: int, count: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(count)
        shape = (2, lists, count, STRIDE)
        self.start = torch.randint(1, 4, shape, device=device, generator=generator, dtype=torch.float32)
        self.memory = self.start.clone()
        self.tensors = [list(x[:, :ELEMENTS].unflatten(1, SHAPE).unbind()) for x in self.memory[0]]
        self.sweep = Sweep(RULES[lists], self.tensors)
        first = self.sweep.table.host.rows["address"].copy()
        self._addresses = (first, first + np.uint64(self.memory[0].nbytes))
        self._values = [self.sweep.rule.uniforms({"by": 1.0})]
        self.active = 0
        self.total = [0.0, 0.0]

    def rewrite(self) -> None:
        """Let the table name the other set of tensors."""
        self.active = 1 - self.active
        host = self.sweep.table.host
        host.rows["address"] = self._addresses[self.active]
        host.rows_changed()

    def step(self, way: Transport | None = None) -> None:
        """Update the set of tensors that the table names, once."""
        if way is not None:
            self.sweep.transport = way
        self.sweep.run(self._values)
        self.total[self.active] += 1

    def check(self, what: str) -> None:
        """Compare every element with the number of updates it must have had.

        Raises:
            AssertionError: a launch read a stale or half-written table, or none at all.
        """
        for side, due in enumerate(self.total):
            for j, (now, start) in enumerate(zip(self.memory[side], self.start[side], strict=True)):
                grows = due * (self.start[side][1] if len(self.start[side]) == 4 and j == 3 else 1)
                expected = start + grows * (j in self.sweep.rule.writes)
                if not torch.equal(now[:, :ELEMENTS], expected[:, :ELEMENTS]):
                    raise AssertionError(f"{what}: list {j} of set {side} is not what {due:.0f} updates make of it")
                if not torch.equal(now[:, ELEMENTS:], start[:, ELEMENTS:]):
                    raise AssertionError(f"{what}: list {j} of set {side} was written beyond its tensors")


ANSWERS = {"transports": "pointer_transports", "advice": "pointer_transports"}
NEEDS_GPU = ("advice",)
MEASURES = ("kernels", "launch", "tables", "transports")
COUNTS = (10, 100, 1000, 4096, 16384, 65536)
#: Launches that a gated sample may queue; a stream holds about a thousand.
QUEUE = 600
AN_OPTIMIZER = 4
LISTS = {1: "1 list", AN_OPTIMIZER: "4 lists"}
STRUCTS, OURS = "struct 4 KB", "memcpy"


def measure(run: Run) -> Iterator[Row]:
    """A row per number of lists, count, mode and way: times, launches and explicitly copied bytes per step."""
    run.rounds, run.seconds = run.size((100, 1.0), (3, 0.2))
    if run.part == "advice":
        if capabilities(run.device.index).concurrent_managed:
            yield from sweep(run, ADVICE, 1)
        else:
            run.leave_out("this GPU has no concurrent managed access (concurrentManagedAccess = 0)")
        return
    if run.device.type == "cpu":
        run.left_out.append("all of them: need a GPU; the CPU walks the table in place (shown as Numba)")
    for lists in run.each(LISTS):
        yield from sweep(run, TRANSPORTS | COPIES, lists)


def working(run: Run, make: Mapping[str, Make], lists: Lists) -> dict[str, Transport | None]:
    """The transports that work here, each of which has updated ``lists`` rightly once per set."""
    if run.device.type == "cpu":
        return {"Numba": None}
    found: dict[str, Transport | None] = {}
    for name, maker in make.items():
        # The driver refuses, or the table does not fit.
        with run.attempt(f"{name} at {len(lists.tensors[0]):,} tensors", (RuntimeError, MemoryError)):
            way = maker(run.device.index)
            lists.sweep.transport = way
            lists.sweep.prepare()
            for _ in range(3):
                lists.step(way)
                lists.rewrite()
            lists.check(name)
            found[name] = way
    return found


def sweep(run: Run, make: Mapping[str, Make], lists: int) -> Iterator[Row]:
    """Every way and count, the list rewritten before every step: times, launches and explicitly copied bytes."""
    for count in run.each(run.size(COUNTS, (10, 424))):
        work = Lists(lists, count, run.device)
        counters, cases = {}, []
        for name, way in working(run, make, work).items():
            counters[name] = counted(work, way)
            # The ring has four tables, and a fifth rewrite would wait for the gate to open.
            repeats = max(1, min(4, QUEUE // max(1, counters[name]["launches"])))
            cases.append(Case(name, functools.partial(work.step, way), work.rewrite, repeats))
        for name, timing in run.measure(cases).items():
            yield {"lists": lists, "count": count, "mode": "rewritten", "way": name, **counters[name], **timing}
        work.check("after timing")


def counted(work: Lists, way: Transport | None) -> dict[str, int]:
    """Launches and copied bytes of one step in the steady state, in which every table of the ring has been written."""
    if way is None:
        return {"launches": 0, "copied_bytes": 0}
    for _ in range(6):
        launches, copied = work.sweep.launches, way.copied_bytes
        work.rewrite()
        work.step(way)
    return {"launches": work.sweep.launches - launches, "copied_bytes": way.copied_bytes - copied}


def walls(rows: Rows) -> dict[int, dict[str, float]]:
    """Wall times by way (µs), of each number of tensors, the least first."""
    groups = sorted(rows.groups("count"), key=lambda group: group[0]["count"])
    return {group[0]["count"]: {row["way"]: row["wall"]["median"] for row in group} for group in groups}


def managed_over_best(rows: Rows) -> dict[int, float]:
    """For each count, wall time of managed over that of the fastest transport, the list being rewritten."""
    known = walls(rows)
    return {count: wall["managed"] / min(wall.values()) for count, wall in known.items() if "managed" in wall}


def worst(rows: Rows) -> tuple[float, str] | None:
    """The count at which managed memory is the worst choice decides."""
    ratios = managed_over_best(rows)
    if not ratios:
        return None
    count = max(ratios, key=ratios.__getitem__)
    return ratios[count], f" (worst at {count:,} tensors)"


def break_even(rows: Rows, way: str) -> tuple[int | None, int | None]:
    """Of the counts that were measured, the last at which many launches of structs are faster than a copy and one
    launch, and the first from which on they are not; None: there is no such count."""
    known = walls(rows)
    faster = {count: wall[way] < wall[STRUCTS] for count, wall in known.items() if {way, STRUCTS} <= wall.keys()}
    lost = max((count for count in faster if not faster[count]), default=None)
    return lost, min((count for count in faster if count > (lost or 0)), default=None)


def sentences(rows: Rows) -> str:
    """Of an optimizer's four lists."""
    return "\n".join(f"- With {LISTS[AN_OPTIMIZER]}, {said}" for said in worth(rows.where(lists=AN_OPTIMIZER)))


def worth(rows: Rows) -> Iterator[str]:
    """What managed memory costs, and from how many tensors on a copy and one launch beat launches of 4 KB each."""
    if ratios := managed_over_best(rows):
        yield (
            f"rewritten before every step, managed memory costs {number(min(ratios.values()))} to "
            f"{number(max(ratios.values()))} x the fastest transport ({min(ratios):,} to {max(ratios):,} tensors)."
        )
    for way in (OURS, *COPIES):
        lost, won = break_even(rows, way)
        copy = f"{way}, a copy and one launch,"
        if won is not None:
            still = f", not yet at {lost:,}" if lost else ", the least that was measured"
            yield f"{copy} beats structs of 4 KB from {won:,} tensors on{still}."
        elif lost is not None:
            yield f"{copy} takes longer than structs of 4 KB at every size, {lost:,} tensors too."


def by_advice(rows: Rows) -> str | None:
    """Advice in the order of its cost for the longest list."""
    if not (known := walls(rows)):
        return None
    most = max(known)
    order = ", ".join(f"{way} {number(us)} µs" for way, us in sorted(known[most].items(), key=lambda item: item[1]))
    return f"- Rewriting {most:,} pointers in managed memory, by advice: {order}."


#: The host's time is like the wall's.
PANELS = [
    Lines(title=title, x="count", y=clock, each="way", label="tensors", inches=3.8)
    for clock, title in (("wall", "the whole step"), ("gpu", "its time on the GPU"))
]
REWRITTEN = "list rewritten before every step: wall µs"


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    grid = functools.partial(page.grid, down="way", across="count", corner="tensors")
    if page.section == "advice":
        grid(f"managed memory by advice, 1 list, {REWRITTEN}", rows, cell="wall")
        page.say(by_advice(rows), "answer")
        page.picture("advice", rows, PANELS,
            "Managed memory needs advice: a step over N tiny tensors, its list rewritten before it")  # fmt: skip
        return
    grid(f"transports, {LISTS[AN_OPTIMIZER]}, {REWRITTEN}", rows.where(lists=AN_OPTIMIZER), cell="wall")
    page.say(sentences(rows), "answer")
    page.picture("transports", rows.where(lists=AN_OPTIMIZER), PANELS,
        "Packing by torch.tensor costs most: a step over N tiny tensors, four lists rewritten")  # fmt: skip
    for lists, name in LISTS.items():
        title = f"managed ÷ best transport, list rewritten, {name}"
        page.bar(title, rows.where(lists=lists), worst, "≤ 1.15 x")
