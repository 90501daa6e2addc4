"""How much of an update vanishes behind a backward of matrix products on another stream?

Answer (H200, 2026-11): in place on 8 thread blocks 93 to 96 %, on 32 only 72 %: on a few blocks the update keeps the
link busy and leaves the multiprocessors to the products.

All state is on the host.  Hidden is (products alone + update alone - both at once) / update alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.harness.columns import ms, percent
from experiments.harness.rows import Row
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.harness.time import Case
from experiments.works.paged import Problem, adamw

NEEDS_GPU = True
#: The matrix products of a backward: (8192 x 8192)², bf16, 1.1 TFLOP each.
WIDTH, QUICK_WIDTH = 8192, 512
#: The products take this many times as long as the update on the default number of blocks.
LONGER = 2.2
#: (placement, access, numbers of thread blocks; None: all).
WAYS: tuple[tuple[str, str, tuple[int | None, ...]], ...] = (
    ("mapped", "in_place", (8, 4, 16, 32)),
    ("managed", "in_place", (8,)),
    ("mapped", "staged", (None,)),
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

    def last(self, run: Run, microseconds: float) -> None:
        """Queue as many products as take so long."""
        self.count = 10
        one = run.measure([Case("ten products", self)], rounds=5)["ten products"]["best"] / 10
        self.count = max(2, math.ceil(microseconds / one))


def measure(run: Run) -> Iterator[Row]:
    """Rows of (placement, access, blocks) with three times: products, update and both."""
    problem = Problem(run)
    products = Products(run.device, run.size(WIDTH, QUICK_WIDTH))
    products()
    for placement, access, counts in run.each(WAYS):
        with run.attempt(f"{placement}, {access.replace('_', ' ')}"):
            yield from _rows(problem, products, placement, access, counts)


def _rows(
    problem: Problem, products: Products, placement: str, access: str, counts: tuple[int | None, ...]
) -> list[Row]:
    run = problem.run
    optimizer = adamw(
        problem.parameters(), placement=placement, host_access=access, device_budget=0, blocks=counts[0]
    )  # fmt: skip
    rows = []
    for blocks in counts:
        optimizer.blocks = blocks
        optimizer.set_device_budget(0)  # prepares the launches anew, with so many blocks
        optimizer.step()
        alone = run.measure([Case(UPDATE, optimizer.step)], rounds=5)[UPDATE]["best"]
        products.last(run, LONGER * alone)
        cases = [
            Case(PRODUCTS, products), Case(UPDATE, optimizer.step), Case(TOGETHER, beside(products, optimizer.step)),
        ]  # fmt: skip
        times = run.measure(cases, rounds=6, seconds=2.5)
        row = {"placement": placement, "access": access, "blocks": blocks, "products": products.count,
               "width": products.a.shape[0], **_best(times)}  # fmt: skip
        run.say(f"{placement}, {access}, {blocks or 'all'} blocks: {hidden(row):.1f} % of the update hidden")
        rows.append(row)
    return rows


def _best(times: dict[str, Any]) -> dict[str, Any]:
    """Three cells: the GPU's time of each case if there is one, else the wall's."""
    return {case: timing["gpu"] or timing["wall"] for case, timing in times.items()}


def beside(products: Callable[[], None], update: Callable[[], Any]) -> Callable[[], None]:
    """The update on a stream of its own, queued first; the current stream waits for it behind the products."""
    side = torch.cuda.Stream()

    def both() -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            update()
        products()
        here.wait_stream(side)

    return both


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    kept = ("placement", "access", "blocks", "products")
    return [
        {**{name: row[name] for name in kept}, "width": part["width"], **_best(row["times"])} for row in part["rows"]
    ]


def hidden(row: Row) -> float:
    """The share (%) of the update that adds nothing to the time of the products.

    >>> hidden({case: {"median": time} for case, time in ((PRODUCTS, 100.0), (UPDATE, 40.0), (TOGETHER, 104.0))})
    90.0
    """
    products, update, together = (row[case]["median"] for case in (PRODUCTS, UPDATE, TOGETHER))
    return float(100 * ((products + update - together) / update))


def added(row: Row) -> float:
    """What the update adds to the time of the products, in µs."""
    return float(row[TOGETHER]["median"] - row[PRODUCTS]["median"])


TABLES = [
    Table(lambda rows: f"an update behind bf16 products of {rows[0]['width']}²", {
        "way": lambda row: f"{row['placement']}, {row['access'].replace('_', ' ')}",
        "blocks": lambda row: str(row["blocks"] or "all"), "products alone, ms": ms(PRODUCTS),
        "update alone": ms(UPDATE), "together": ms(TOGETHER), "added": ms(added), "hidden": percent(hidden),
    })
]  # fmt: skip
BARS = [
    Bar(f"in place behind matrix products, {placement}, 8 blocks: hidden", lambda rows: hidden(rows[0]),
        at_least=85, unit="%", placement=placement, access="in_place", blocks=8)
    for placement in ("mapped", "managed")
]  # fmt: skip
