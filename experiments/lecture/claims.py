"""The claims of ``experiments/claims.toml``, and what is said of them."""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness.rows import Rows, number_in
from experiments.harness.show import number

CLAIMS = Path(__file__).resolve().parents[1] / "claims.toml"
TRUE, CHANGED, SLIP = "true", "changed since", "was a slip"
LATER, NOT_YET, NOT_HERE = "shown in a later part", "not measured yet", "not shown here"
VERDICTS = (TRUE, CHANGED, SLIP, LATER, NOT_YET, NOT_HERE)
#: Reasons for which a claim need not be shown at all.
REASONS = ("logistics", "months of work", "apex")
SIGNS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
#: Digits that are part of a name; all others in a text have to come from rows.
NAMES = re.compile(r"GPT-2|Llama 70B|float32|float64|16 bytes|(4|32) KB")


@dataclass(frozen=True)
class Said:
    """What rows say.

    Args:
        text: with the names of values in braces.
        holds: whether the claim does.
        values: from rows: numbers, or texts.

    Raises:
        ValueError: the text has a number of its own, which no row holds.
    """

    text: str
    holds: bool
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if re.search(r"\d", NAMES.sub("", re.sub(r"\{[^}]*\}", "", self.text))):
            raise ValueError(f"{self.text!r} has a number that comes from no row")

    @property
    def words(self) -> str:
        """The text with its numbers in three digits; counts in full."""
        return self.text.format_map({name: shown(value) for name, value in self.values.items()})


def shown(value: Any) -> str:
    """A value in a text: numbers in three digits, counts in full, of a message the first line."""
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else (str(value).strip().splitlines() or [""])[0][:200]


@dataclass(frozen=True)
class Reading:
    """What one row says: ``where`` finds it, ``ours`` shows its cells, ``holds`` is (column, sign, value)."""

    where: Mapping[str, Any]
    ours: str
    holds: tuple[str, str, Any]

    def __call__(self, rows: Rows) -> Said | None:
        """None if there is no such row, or nothing in its cell."""
        row = rows.first(**self.where)
        column, sign, value = self.holds
        if row is None or row.get(column) is None:
            return None
        cells = {name: number_in(row, name) if isinstance(cell, Mapping) else cell for name, cell in row.items()}
        found: Any = cells[column]
        return Said(self.ours, bool(SIGNS[sign](found, value)), cells)


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        shown: experiment and question that show it, "" if none does here.
        later: the experiment that will.
        not_here: why none ever does.
        verdicts: if it holds, and if not.
    """

    id: str
    claim: str
    number: str
    source: str
    shown: str = ""
    later: str = ""
    not_here: str = ""
    today: str = ""
    reading: Reading | None = None
    verdicts: Sequence[str] = (TRUE, CHANGED)

    def __post_init__(self) -> None:
        if sum(map(bool, (self.shown, self.later, self.not_here))) != 1:
            raise ValueError(f"{self.id}: give one of shown, later and not_here")
        if self.not_here and not any(reason in self.not_here for reason in REASONS):
            raise ValueError(f"{self.id}: not_here is {self.not_here!r}; the reasons are {', '.join(REASONS)}")
        if len(self.verdicts) != 2 or not set(self.verdicts) <= {TRUE, CHANGED, SLIP}:
            raise ValueError(f"{self.id}: verdicts are two of {TRUE!r}, {CHANGED!r} and {SLIP!r}")

    @property
    def experiment(self) -> str:
        """That shows it, or will."""
        return self.shown.partition(".")[0] or self.later


def claims(path: Path = CLAIMS) -> list[Claim]:
    """All of them, in the order of the file.

    Raises:
        ValueError: a claim does not say where it is shown, or what its verdicts are.
    """
    found = []
    for name, entry in tomllib.loads(path.read_text()).items():
        if reading := entry.pop("reading", None):
            column, sign, value = reading.pop("holds")
            entry["reading"] = Reading(**reading, holds=(column, sign, value))
        found.append(Claim(name, **entry))
    return found
