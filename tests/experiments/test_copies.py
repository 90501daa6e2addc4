"""Copies: every way copies every byte, and faults are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ladder_rows import CPU

from experiments.copies import direction, on_device, size
from experiments.works import list_copy
from experiments.works.memory_kinds import DEVICE, MANAGED, PAGEABLE, PINNED, RANGE

# --- a list of pieces


def some(sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sources = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in sizes]
    return sources, [torch.zeros_like(t) for t in sources]


SIZES = (4, 24, 16384, 16388, 100_000)


@pytest.mark.parametrize("make", [list_copy.over_a_list, list_copy.one_by_one, list_copy.in_torch, list_copy.foreach])
def test_every_way_copies_every_byte(make: Any) -> None:
    sources, targets = some(SIZES)
    make(sources, targets)()
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


def test_pieces_are_cut_and_none_is_lost() -> None:
    sources, targets = some(SIZES)
    rows = list_copy.pieces(sources, targets)
    assert rows[:, 2].sum() == sum(SIZES)
    assert rows[:, 2].max() == list_copy.CUT
    assert len(rows) == 1 + 1 + 1 + 2 + 7


def test_a_way_that_leaves_an_element_out_is_seen() -> None:
    source, target = torch.rand(100), torch.empty(100)
    with pytest.raises(AssertionError, match="wrong"):
        on_device.checked(lambda: target[:-1].copy_(source[:-1]), [source], [target])


# --- sizes


def truncating(source: torch.Tensor, target: torch.Tensor) -> None:
    """A planted fault: a count of 12 bits, where 32 would need gigabytes."""
    count = len(source) % 4096
    target[:count] = source[:count]


def overrunning(source: torch.Tensor, target: torch.Tensor) -> None:
    """A planted fault: one byte more."""
    target.as_strided((len(target) + 1,), (1,)).fill_(3)
    target.copy_(source)


@pytest.mark.parametrize(
    ("way", "found"),
    [(size.by_torch, (True, True)), (truncating, (False, True)), (overrunning, (True, False))],
)
def test_what_is_cut_and_what_is_written_beside_is_seen(way: Any, found: tuple[bool, bool]) -> None:
    assert size.copied(way, 4100, CPU, CPU) == found


def test_the_pattern_is_another_where_a_short_count_would_begin_again() -> None:
    step = size.STEP
    assert len({(begin // step) % 249 for begin in (0, 1 << 31, 1 << 32)}) == 3
    assert not torch.equal(*size.filled(2 * step, CPU).split(step))


# --- directions and addresses


def test_a_direction_fits_where_it_says_what_is_so() -> None:
    assert direction.fits(PAGEABLE, DEVICE, "HostToDevice")
    assert not direction.fits(PAGEABLE, DEVICE, "DeviceToHost")
    assert not direction.fits(RANGE, PINNED, "HostToHost")
    assert all(direction.fits(MANAGED, MANAGED, name) for name in direction.DIRECTIONS)
    assert all(direction.fits(*pair, "Default") for pair in direction.PAIRS)


class Dying:
    """A child that sends two rows and then dies, again and again."""

    def __init__(self, function: Any, call: str, name: str, first: int, limit: float) -> None:
        self.first, self.ended = first, None

    def __iter__(self) -> Any:
        for source, target in direction.PAIRS[self.first : self.first + 2]:
            yield {"source": source, "target": target, "outcome": direction.RIGHT, "said": ""}
        self.ended = "ended with -11: " if self.first + 2 < len(direction.PAIRS) else None  # type: ignore[assignment]


def test_behind_a_pair_that_ends_a_process_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direction, "Child", Dying)
    monkeypatch.setattr(direction, "PROCESSES", 100)
    rows = direction.every_pair(direction.SYNC, "Default")
    assert [(row["source"], row["target"]) for row in rows] == direction.PAIRS
    assert [i for i, row in enumerate(rows) if row["outcome"] == direction.CRASH] == list(range(2, 36, 3))
    monkeypatch.setattr(direction, "PROCESSES", 2)
    assert len(direction.every_pair(direction.SYNC, "Default")) == 6


def test_a_child_that_python_ends_is_no_outcome() -> None:
    if torch.cuda.is_available():
        pytest.skip("memory can be had here")
    with pytest.raises(RuntimeError, match="ended with 1: "):
        direction.every_pair(direction.SYNC, "Default")
