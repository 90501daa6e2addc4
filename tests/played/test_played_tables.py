"""Tables for kernels of a user's own, on a played card: no row is rewritten, or given back, under a kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from played_order import Touched
from played_runs import Ends, Order, Run, play, some_orders

from pagedopt import DeviceTable
from pagedopt.system import internals
from pagedopt.transports.ring import RING_SIZE


def scale(run: Run, rows: int, count: int) -> None:
    """Multiply the tensors of a table by two: a kernel that reads its rows when its turn comes."""

    def work() -> Touched:
        words = np.frombuffer((ctypes.c_int64 * (3 * count)).from_address(rows), np.int64).reshape(count, 3)
        tensors = [(at, at + 4 * numel) for at, numel, _ in words.tolist()]
        for first, end in tensors:
            values = np.frombuffer((ctypes.c_float * ((end - first) // 4)).from_address(first), np.float32)
            values *= 2
        return [(rows, rows + words.nbytes), *tensors], tensors

    if run.card is None:
        work()
    else:
        run.card.order.submit(internals.current_stream(0), "scaling", work)


@pytest.mark.parametrize("transport", ["managed", "mapped", "memcpy"])
@some_orders
def test_a_kernel_reads_the_rows_of_its_own_launch(
    monkeypatch: pytest.MonkeyPatch, transport: Any, order: Order
) -> None:
    """More launches, on two streams, than there are buffers; the table ends before the last has run."""

    def act(run: Run) -> Ends:
        tensors, streams = [run.numbers(n) for n in (3, 700)], [None, run.stream()]
        kept = [tensors]  # torch would give them back in the order of one stream
        table = DeviceTable([tensors], writes=[0], transport=transport)
        for number in range(2 * RING_SIZE + 2):
            run.wait(streams[number % 2], streams[(number + 1) % 2])
            with run.on(streams[number % 2]):
                if number % 3:
                    tensors = [t.clone() for t in tensors]
                    kept.append(tensors)
                    table.refresh([tensors])
                with table.rows_on_device() as rows:
                    scale(run, rows, len(table))
        del table
        run.wait(None, streams[1])
        return [t.cpu() for t in tensors]

    play(monkeypatch, act, order)
