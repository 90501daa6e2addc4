"""Which copy within a device is fastest: a call, a kernel, or one launch over a list; in one piece and in many?

Answer: see notes/copies.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.lab import Case, Page, Row, Rows, Run, in_units, number, on_one_clock, over
from experiments.pictures import Lines
from experiments.works import list_copy
from experiments.works.list_copy import Call, Tensors

MEASURES = ("launch", "tables")
ENGINE, TORCH, FOREACH = "a call for each (cuMemcpyAsync; memcpy)", "torch copy_", "torch _foreach_copy_"
KERNEL, OURS, BATCH = "one kernel over a list of pieces", "one pointer list (ours)", "cuMemcpyBatchAsync"
WAYS = {
    ENGINE: list_copy.one_by_one, TORCH: list_copy.in_torch, FOREACH: list_copy.foreach,
    KERNEL: list_copy.over_a_list, OURS: list_copy.ours, BATCH: list_copy.batch,
}  # fmt: skip
ONE, MANY = "one piece", "pieces of 24 B"
SIZES, COUNTS = (512, 1 << 16, 1 << 22, 1 << 26, 1 << 30), (10, 100, 1000, 4096, 65536)
#: Calls for each piece that a sample may wait for.
MOST_CALLS, ELEMENTS = 4096, 6


def works(run: Run) -> Iterator[tuple[str, int, Tensors]]:
    """What is copied: its kind, bytes or pieces, and the tensors."""
    cuda = run.device.type == "cuda"
    for nbytes in run.each(run.size(SIZES if cuda else SIZES[:-1], SIZES[:2])):
        yield ONE, nbytes, [torch.rand(nbytes // 4, device=run.device)]
    for count in run.each(run.size(COUNTS if cuda else COUNTS[:-1], COUNTS[:2])):
        yield MANY, count, list(torch.rand(count, 8, device=run.device)[:, :ELEMENTS].unbind())


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way, after every byte was compared: times."""
    run.rounds, run.seconds = run.size((30, 0.5), (3, 0.05))
    for what, size, sources in works(run):
        targets = [torch.full_like(t, -1.0) for t in sources]
        cases = []
        for name, make in WAYS.items():
            if (name == BATCH and run.device.type == "cpu") or (len(sources) > MOST_CALLS and name in (ENGINE, TORCH)):
                continue
            with run.attempt(f"{name}, {size:,} {what}", (Exception,)):
                cases.append(Case(name, checked(make(sources, targets), sources, targets)))
        nbytes = sum(t.nbytes for t in sources)
        yield from run.time(cases, what=what, size=size, bytes=nbytes, device=run.device.type)


def checked(call: Call, sources: Tensors, targets: Tensors) -> Call:
    """A way that has copied everything once; what lies on two devices is compared on the host.

    Raises:
        AssertionError: it has not.
    """
    for target in targets:
        target.fill_(-1.0)
    waited(targets)
    call()
    waited((*sources, *targets))
    apart = len({t.device for t in (*sources, *targets)}) > 1
    found = [torch.cat([t.cpu() if apart else t for t in tensors]) for tensors in (sources, targets)]
    assert torch.equal(*found), "wrong"
    return call


def waited(tensors: Tensors) -> None:
    """Until every GPU that one lies on is idle."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)


def derive(rows: Rows) -> Rows:
    """GB/s of bytes that are copied (each is read and written); how much faster than calls, than torch's foreach."""
    found = Rows()
    for group in rows.groups("what", "size"):
        # of many pieces some calls are too many to queue: those have no GPU time, and lines of two clocks mislead
        known = on_one_clock(group) if group[0]["what"] == ONE else by_wall(group)
        calls, torchs = ((known.first(case=name) or {}).get("time") for name in (ENGINE, FOREACH))
        for row in known:
            rate = row["bytes"] / row["time"]["median"] / 1e3
            found.append(
                {**row, "rate": rate, "of_calls": over(calls, row["time"]), "of_foreach": over(torchs, row["time"])}
            )
    return found


def by_wall(rows: Rows) -> Rows:
    """Rows with the series ``time`` by the wall's clock."""
    return Rows({**row, "time": row["wall"], "clock": "wall"} for row in rows)


def shown(row: Row) -> str:
    """µs, GB/s."""
    return f"{number(row['time']['median'])} µs, {number(row['rate'])} GB/s"


def report(page: Page, rows: Rows) -> None:
    """Tables, a picture, and what is held to a limit."""
    page.grid(f"{ONE}, of so many bytes: µs, GB/s, {{clock}}", rows.where(what=ONE), "case", "size", shown, "bytes")
    page.detail.grid(f"{MANY}, so many: µs, {{clock}}", rows.where(what=MANY), "case", "size", "time", "pieces")
    page.detail.grid("of these the GPU's µs, where all calls can be queued", rows.where(what=MANY), "case",
        "size", "gpu", "pieces")  # fmt: skip
    page.picture("rates", rows.where(what=ONE), [Lines(title="A copy of one piece", unit="GB/s",
        x=in_units("size", 1 << 20), y="rate", each="case", label="MiB")])  # fmt: skip
    page.bar("1 GiB by one pointer list, of the copy call",
        rows.where(what=ONE, size=1 << 30, device="cuda", case=OURS), "of_calls", at_least=0.95, unit="x")  # fmt: skip
    page.bar("4,096 pieces by one pointer list, of _foreach_copy_",
        rows.where(what=MANY, size=4096, device="cuda", case=OURS), "of_foreach", at_least=5, unit="x")  # fmt: skip
