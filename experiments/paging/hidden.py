"""Part ``hidden``: how much of an update vanishes behind a backward of matrix products on another stream.

All state is on the host.  In place on a few thread blocks, the update keeps the link busy and leaves the
multiprocessors to the products.  Hidden is (products alone + update alone - both at once) / update alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from experiments.bench import Case
from experiments.paging.problem import Run, adamw

#: The matrix products of a backward: (8192 x 8192)², bf16, 1.1 TFLOP each.
WIDTH, QUICK_WIDTH = 8192, 512
#: The products take this many times as long as the update on the default number of blocks.
LONGER = 2.2
IN_PLACE = {"mapped": (8, 4, 16, 32), "managed": (8,)}
PRODUCTS, UPDATE, TOGETHER = "products alone", "update alone", "together"


def hidden_share(products: float, update: float, together: float) -> float:
    """The share of the update that adds nothing to the time of the products.

    >>> hidden_share(100.0, 40.0, 104.0)
    0.9
    """
    return (products + update - together) / update


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


def part(run: Run) -> dict[str, Any]:
    """Rows of (placement, way, blocks): three times and the share hidden."""
    products = Products(run.device, QUICK_WIDTH if run.quick else WIDTH)
    products()
    rows: list[dict[str, Any]] = []
    for placement, counts in IN_PLACE.items():
        with run.attempt(f"{placement}, in place"):
            rows += _rows(run, products, placement, "in_place", counts)
    with run.attempt("mapped, staged"):
        rows += _rows(run, products, "mapped", "staged", (None,))
    return {"width": products.a.shape[0], "products": products.count, "rows": rows}


def _rows(
    run: Run, products: Products, placement: str, access: str, counts: tuple[int | None, ...]
) -> list[dict[str, Any]]:  # fmt: skip
    optimizer = adamw(
        run.parameters(), placement=placement, host_access=access, device_budget=0, blocks=counts[0]
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
        share = hidden_share(*(times[name]["best"] for name in (PRODUCTS, UPDATE, TOGETHER)))
        run.say(f"{placement}, {access}, {blocks or 'all'} blocks: {share:.1%} of the update hidden")
        rows.append({"placement": placement, "access": access, "blocks": blocks, "products": products.count,
                     "times": times, "hidden": share})  # fmt: skip
    return rows


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
