"""A tensor of more elements than 32 bits can count, of which a few pages exist."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import torch

from pagedopt import Sweep
from pagedopt.rules import RULES
from pagedopt.tables.layout import Geometry

#: Elements at its end that are updated.
REACH = 5000


def vast(numel: int) -> torch.Tensor:
    """bfloat16 zeros that take address space, and memory only where they are touched."""
    no_reserve = 0x4000  # of Linux; the module names it from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * numel, flags=flags), dtype=torch.bfloat16)


@contextlib.contextmanager
def doubled_at_the_end(numel: int, geometry: Geometry | None = None) -> Iterator[Sweep]:
    """A sweep of the rule "mul_scalar" over the last elements alone, which the block must double."""
    room = vast(numel)
    room[-REACH:] = 3  # from an even multiple of 8 on, as chunks begin
    sweep = Sweep(RULES["mul_scalar"], [[room[:REACH], room[:0]]], geometry=geometry)
    table = sweep.table.host
    assert table.rows["numel"].tolist() == [REACH, 0]
    table.rows["numel"][0] = numel
    table.chunks["offset"] += numel - REACH
    table.rows_changed()
    yield sweep
    assert (room[-REACH:] == 6).all()
    assert (room[: 2 * REACH] == 0).all()
