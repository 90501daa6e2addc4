"""How much of an update vanishes behind a backward of matrix products on another stream?

Answer (H200, 2026-11): in place on 8 thread blocks 93 to 96 %, on 32 only 72 %: on a few blocks the update keeps the
link busy and leaves the multiprocessors to the products.

All state is on the host.  Hidden is (products alone + update alone - both at once) / update alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from experiments.lab import Case, Column, Page, Row, Rows, Run, ms, on_one_clock, percent
from experiments.works.paged import Problem, adamw

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
#: The matrix products of a backward: (8192 x 8192)², bf16, 1.1 TFLOP each.
WIDTH, QUICK_WIDTH = 8192, 512
#: The products take this many times as long as the update on the default number of blocks.
LONGER = 2.2
#: (placement, access, number of thread blocks; None: all).
WAYS: tuple[tuple[str, str, int | None], ...] = (
    *(("mapped", "in_place", blocks) for blocks in (8, 4, 16, 32)),
    ("managed", "in_place", 8),
    ("mapped", "staged", None),
)
PRODUCTS, UPDATE, TOGETHER = "products alone", "update alone", "together"


class Products:
    """Matrix products as in a backward, one after the other on the current stream: two per layer."""

    def __init__(self, device: torch.device, width: int) -> None:
        scale = 1 / math.sqrt(width)
        self.a, self.b = (torch.randn(width, width, device=device).mul_(scale).bfloat16() for _ in range(2))
        self.out = torch.empty_like(self.a), torch.empty_like(self.a)
        self.count = 2

    def __call__(self) -> None:
        for i in range(self.count):
            torch.mm(self.a, self.b if i % 2 else self.b.T, out=self.out[i % 2])


def measure(run: Run) -> Iterator[Row]:
    """Rows of (placement, access, blocks) with three series: products, update and both."""
    problem = Problem(run)
    products = Products(run.device, run.size(WIDTH, QUICK_WIDTH))
    products()
    for placement, access, blocks in run.each(WAYS):
        about = {"placement": placement, "access": access, "blocks": blocks}
        with run.attempt(way(about)):
            options = {"placement": placement, "host_access": access, "blocks": blocks, "device_budget": 0}
            yield {**about, **_beside_products(problem, products, options)}


def _beside_products(problem: Problem, products: Products, options: dict[str, Any]) -> Row:
    """Three series of an optimizer, and how many products there were."""
    run, update = problem.run, adamw(problem.parameters(), **options).step
    update()
    products.count = 10
    ten, one = (_times(run, [Case("", each)], 5)[""]["median"] for each in (products, update))
    products.count = max(2, math.ceil(10 * LONGER * one / ten))
    side = torch.cuda.Stream()

    def together() -> None:
        """The update on a stream of its own, queued first; the current stream waits for it behind the products."""
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            update()
        products()
        here.wait_stream(side)

    cases = [Case(PRODUCTS, products), Case(UPDATE, update), Case(TOGETHER, together)]
    return {"products": products.count, "width": len(products.a), **_times(run, cases, 6)}


def _times(run: Run, cases: list[Case], rounds: int) -> dict[str, Any]:
    """A series by case, all of one clock."""
    times = run.measure(cases, rounds, seconds=2.5)
    return {row["case"]: row["time"] for row in on_one_clock(Rows({"case": name, **times[name]} for name in times))}


def way(row: Row) -> str:
    """Where the state is, and how the update reaches it."""
    return f"{row['placement']}, {row['access'].replace('_', ' ')}"


def derive(rows: Rows) -> Rows:
    """What the update adds to the time of the products (µs), and the share of it (%) that adds nothing."""
    found = Rows()
    for row in rows:
        products, update, together = (row[name]["median"] for name in (PRODUCTS, UPDATE, TOGETHER))
        hidden = 100 * ((products + update - together) / update)
        found.append({**row, "clock": row[UPDATE]["clock"], "added": together - products, "hidden": hidden})
    return found


COLUMNS: dict[str, Column] = {
    "way": way,
    "blocks": lambda row: str(row["blocks"] or "all"),
    "products alone, ms": ms(PRODUCTS),
    "update alone": ms(UPDATE),
    "together": ms(TOGETHER),
    "added": ms("added"),
    "hidden": percent("hidden"),
}
HIDDEN = "in place behind matrix products, {}, 8 blocks: hidden"


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.table("an update behind bf16 products of {width}²", rows, COLUMNS)
    for placement in ("mapped", "managed"):
        page.bar(HIDDEN.format(placement), rows.where(placement=placement, access="in_place", blocks=8),
            "hidden", at_least=85, unit="%")  # fmt: skip
