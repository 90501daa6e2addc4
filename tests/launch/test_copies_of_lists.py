"""A deep copy of a list of addresses names the tensors of the copy, with the numbers that it is given from then on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import NEEDED

import pagedopt
from pagedopt import DeviceTable, Sweep
from pagedopt.transports.choose import TRANSPORTS


@pagedopt.rule
def less(x: float, *, rate: float) -> float:
    return x - rate


HOW: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}
DEVICES = [
    pytest.param("cpu", "managed", id="cpu"),
    *(pytest.param("cuda", name, id=f"cuda-{name}", marks=NEEDED) for name in TRANSPORTS),
]


def total(tensors: list[torch.Tensor]) -> float:
    return float(sum(t.sum() for t in tensors))


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize(("device", "transport"), DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_a_copied_sweep_updates_the_copies(how: str, device: str, transport: str, has_run: bool) -> None:
    tensors = [torch.ones(3, device=device), torch.ones(5, device=device)]
    sweep = Sweep(less, [tensors], transport=transport)  # type: ignore[arg-type]
    if has_run:
        sweep.run({"rate": 0.0})
    other, others = HOW[how]((sweep, tensors))
    other.run({"rate": 1.0})
    assert (total(tensors), total(others)) == (8.0, 0.0)
    sweep.run({"rate": 2.0})
    del sweep
    other.run({"rate": 3.0})
    assert (total(tensors), total(others)) == (-8.0, -24.0)


@pytest.mark.parametrize("how", HOW)
def test_rows_of_a_copied_table_are_those_that_are_sent(how: str) -> None:
    tensors = [torch.ones(3), torch.ones(5)]
    table, others = HOW[how]((DeviceTable([tensors]), tensors))
    assert table.rows[:, 0].tolist() == [t.data_ptr() for t in others]
    words = table.host.words[table.host.rows_at :].view("int64").reshape(2, -1)
    assert (words == table.rows).all()
