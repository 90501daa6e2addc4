"""Is there a limit to the size of a copy?

Answer: see notes/copies.md.

Copies around 2^31 and 2^32 bytes, where a 32-bit count would end, and of 8 and 16 GiB; every byte is compared, and so
are 64 bytes on both sides of the target.  The one limit that is documented is that of a pitch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from experiments.lab import Page, Row, Rows, Run
from experiments.works import list_copy

MEASURES = ("launch", "tables")
GUARD, MARK, STEP = 64, 0xA5, 1 << 24
EDGES = tuple(2**power + off for power in (31, 32) for off in (-1, 1))
Way = Callable[[torch.Tensor, torch.Tensor], object]


def by_torch(source: torch.Tensor, target: torch.Tensor) -> None:
    """``copy_``, whichever way it has to go."""
    target.copy_(source)


def by_call(source: torch.Tensor, target: torch.Tensor) -> None:
    """One call of the driver, or of the C library."""
    list_copy.one_by_one([source], [target])()


def by_list(source: torch.Tensor, target: torch.Tensor) -> None:
    """One launch over a list of pieces, and up to three bytes that it does not take."""
    whole = len(source) // 4 * 4
    list_copy.over_a_list([source[:whole]], [target[:whole]])()
    target[whole:] = source[whole:]


WAYS: dict[str, Way] = {"copy call": by_call, "torch copy_": by_torch, "a list of pieces": by_list}


def filled(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes that differ from those 2^31 and 2^32 before them."""
    found = torch.empty(nbytes, dtype=torch.uint8, device=device)
    pattern = torch.arange(STEP, device=device).remainder_(251).to(torch.uint8)
    for begin in range(0, nbytes, STEP):
        part = found[begin : begin + STEP]
        torch.add(pattern[: len(part)], begin // STEP % 249, out=part)
    return found


def copied(way: Way, nbytes: int, source_on: torch.device, device: torch.device) -> tuple[bool, bool]:
    """Whether every byte arrived, and whether nothing beside them was written."""
    source = filled(nbytes, source_on)
    whole = torch.full((nbytes + 2 * GUARD,), MARK, dtype=torch.uint8, device=device)
    target = whole[GUARD:-GUARD]
    way(source, target)
    parts = zip(source.split(STEP), target.split(STEP), strict=True)
    right = all(torch.equal(one.to(device), other) for one, other in parts)
    return right, bool((whole[:GUARD] == MARK).all() and (whole[-GUARD:] == MARK).all())


def measure(run: Run) -> Iterator[Row]:
    """A row per way and size; and per pitch."""
    cuda, host = run.device.type == "cuda", torch.device("cpu")
    ways: list[tuple[str, Way, torch.device, int]] = [
        (name, way, run.device, nbytes)
        for name, way in WAYS.items()
        if cuda or way is not by_list
        for nbytes in run.size((*EDGES, *((1 << 34,) if cuda else ())), (1 << 12, 4097))
    ]
    if cuda:
        ways.append(("torch copy_, up from pageable memory", by_torch, host, run.size(1 << 33, 1 << 12)))
    for name, way, source_on, nbytes in run.each(ways):
        with run.attempt(f"{name}, {nbytes:,} bytes", (Exception,)):
            right, guards = copied(way, nbytes, source_on, run.device)
            about = {"way": name, "device": run.device.type, "bytes": nbytes, "said": ""}
            yield {**about, "right": right, "guards": guards}
    if cuda:
        yield from pitches(run)


def pitches(run: Run) -> Iterator[Row]:
    """Two rows of 16 bytes, so far apart as is allowed, and one byte more."""
    from cuda.bindings import runtime

    limit = int(runtime.cudaGetDeviceProperties(run.device.index)[1].memPitch)
    memory = [torch.zeros(limit + 64, dtype=torch.uint8, device=run.device) for _ in range(2)]
    for pitch in (limit, limit + 1):
        memory[0].fill_(7)
        memory[1].zero_()
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        (code,) = runtime.cudaMemcpy2D(memory[1].data_ptr(), pitch, memory[0].data_ptr(), pitch, 16, 2, kind)
        torch.cuda.synchronize()
        right = int(memory[1].count_nonzero()) == 32 and bool(memory[1][pitch : pitch + 16].all())
        about = {"device": "cuda", "bytes": pitch, "guards": True, "said": "" if int(code) == 0 else code.name}
        yield {"way": "cudaMemcpy2D, a pitch of", "right": right, **about}


def derive(rows: Rows) -> Rows:
    """And a row for each way, and one of sums without pitches: the largest that arrived, and how many are spoiled."""
    known = [row for row in rows if "pitch" not in row["way"]]
    right = [row["bytes"] for row in known if row["right"] and row["guards"]]
    sums = {"what": "sum", "copies": len(known), "spoiled": len(known) - len(right), "bytes": max(right, default=0)}
    ways = map(of_way, rows.groups("way"))
    return Rows([*({**row, "what": "copy"} for row in rows), *ways, *([sums] if known else [])])


def of_way(rows: Rows) -> Row:
    """What became of all its copies."""
    return {
        "what": "way",
        "way": rows[0]["way"],
        "device": rows[0]["device"],
        "sizes": "; ".join(f"{row['bytes']:,}" for row in rows),
        "right": all(row["right"] for row in rows),
        "guards": all(row["guards"] for row in rows),
        "said": "; ".join(filter(None, rows.values("said"))),
    }


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("copies on {device}", rows.where(what="way"),
        {"by": "way", "bytes": "sizes", "error": "said", "every byte arrived, none beside changed":
        lambda row: ("no", "yes")[row["right"] and row["guards"]]})  # fmt: skip
    page.bar("copies of any size that are spoiled", rows.where(what="sum"), "spoiled", "≤ 0")
