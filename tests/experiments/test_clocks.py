"""Every time and every ratio of times says its clock, in rows that are kept and in those that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from experiments.harness import question
from experiments.harness.main import KEPT
from experiments.harness.rows import CLOCKS, Row, Rows, of_questions, on_one_clock, on_own_clock, over, read
from experiments.harness.time import series

#: Columns that are neither times nor ratios of times: counts and bytes, shares of them, errors, rates of a disk.
UNTIMED = {
    "a", "aligned", "away", "b", "beyond", "bytes", "counted_down", "counted_up", "difference", "disk_read",
    "disk_write", "down", "error", "farthest", "losses", "moved", "number", "of_eager", "of_must", "rms", "share", "up",
}  # fmt: skip
#: What measures errors, and nothing else.
NO_TIMES = ("codes", "rare_rows")


def every_row() -> Iterator[tuple[str, Row]]:
    """Each row of each file that is kept, as measured and as derived, with where it stands."""
    for path in sorted(KEPT.glob("*.json")):
        if found := question.find(path.name.partition("-")[0]):
            result = read(path, found[0])
            for name, rows in of_questions(result, found[0]).items():
                for row in [*result["parts"][name]["rows"], *rows]:
                    yield f"{path.name}, {name}", row


def cells(value: Any) -> Iterator[Mapping[str, Any]]:
    """The series in a cell, and in what it holds."""
    if isinstance(value, Mapping):
        if "median" in value or "clock" in value:
            yield value
        for inner in value.values():
            yield from cells(inner)


def test_every_series_has_a_clock() -> None:
    known = [(where, found) for where, row in every_row() for found in cells(row)]
    assert len(known) > 2000
    assert {found.get("clock") for _, found in known} <= set(CLOCKS), [
        w for w, f in known if f.get("clock") not in CLOCKS
    ]


def test_a_plain_time_or_ratio_stands_in_a_row_with_its_clock() -> None:
    timed = ((where, row) for where, row in every_row() if not where.endswith(NO_TIMES))
    plain = {(where, name) for where, row in timed if row.get("clock") not in CLOCKS
             for name, value in row.items() if isinstance(value, float) and name not in UNTIMED}  # fmt: skip
    assert not plain


def test_a_ratio_of_two_clocks_is_refused() -> None:
    wall, gpu = series([8.0], "wall"), series([2.0], "GPU")
    assert over(wall, series([4.0], "wall")) == 2.0
    assert over(wall, None) is over(None, gpu) is None
    with pytest.raises(ValueError, match="of the clock wall over one of GPU"):
        over(wall, gpu)


def test_rows_are_compared_by_the_clock_that_all_have() -> None:
    both = {"wall": series([8.0], "wall"), "gpu": series([2.0], "GPU")}
    loop, missing = {**both, "gpu": None}, {"wall": None, "gpu": None}
    assert [row["clock"] for row in on_one_clock(Rows([both, missing]))] == ["GPU", "GPU"]
    assert [row["clock"] for row in on_one_clock(Rows([both, loop]))] == ["wall", "wall"]
    assert [row["time"] for row in on_own_clock(Rows([both, loop]))] == [both["gpu"], both["wall"]]
