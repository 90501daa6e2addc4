"""Elements in 8 bits whose gradient stops, is small or comes rarely."""

from __future__ import annotations

import torch

from experiments.step import rare_rows
from experiments.step.rare_rows import SIZES


def test_the_largest_updates_are_those_of_each_kind() -> None:
    update = torch.arange(12.0) - 5
    ended, small, tied = torch.tensor([[0], [1]]), torch.tensor([[2, 3], [11, 4], [5, 6]]), torch.tensor([[7]])
    found = rare_rows.largest(update, ended, small, tied)
    assert found == {"ended": 5, "tied": 2, **dict(zip((f"small {size:g}" for size in SIZES), (3, 6, 1), strict=True))}
    assert "ended" not in rare_rows.largest(update, None, small, tied)


def test_words_are_numbered_as_they_come() -> None:
    found = rare_rows.words(1000)
    seen = -1
    for number in found.tolist():
        assert number <= seen + 1
        seen = max(seen, number)
    assert 100 < seen < 1000
