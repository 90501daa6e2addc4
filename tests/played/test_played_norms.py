"""Norms on a played card: through every transport the bits of a CPU, and no sum is given back under its reader."""

from __future__ import annotations

from typing import Any

import pytest
from played_runs import Ends, Order, Run, play, some_orders

from pagedopt.foreach_ops import foreach_norm
from pagedopt.transports.choose import TRANSPORTS


@pytest.mark.parametrize("transport", TRANSPORTS)
@some_orders
def test_norms(monkeypatch: pytest.MonkeyPatch, transport: Any, order: Order) -> None:
    """Of tensors that are one chunk each, of chunks whose sums are added in a second launch, and of no elements."""

    def act(run: Run) -> Ends:
        small, large = ([run.numbers(n) for n in sizes] for sizes in ((6,) * 200, (5, 0, 40_001, 3000)))
        found = [foreach_norm(tensors, transport=transport) for tensors in (small, large, large[1:2], small)]
        return [norm.cpu() for norms in found for norm in norms]

    play(monkeypatch, act, order)
