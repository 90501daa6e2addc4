"""The claims of ``experiments/claims.toml``, and what rows say to them."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.lab import Rows, number
from experiments.lecture.readings import READINGS, declared

CLAIMS = Path(__file__).resolve().parents[1] / "claims.toml"
TRUE, CHANGED, SLIP, NOT_SEEN = "true", "changed since", "was a slip", "not seen here"
NOT_YET, NOT_HERE = "not measured yet", "not shown here"
VERDICTS = (TRUE, CHANGED, SLIP, NOT_SEEN, NOT_YET, NOT_HERE)
UNITS = {"": 1, "ms": 1e3, "MiB": 2**20}


class Cells(string.Formatter):
    """Texts with cells in braces, in a unit behind a colon: numbers in three digits, counts in full."""

    def get_field(self, name: str, _: Sequence[Any], values: Mapping[str, Any]) -> tuple[Any, str]:
        """A cell by its whole name, as "row.column"."""
        return values[name], name

    def format_field(self, value: Any, unit: str) -> str:
        """Of a message the first line."""
        if isinstance(value, str):
            return (value.strip().splitlines() or [""])[0][:200]
        return number(value / UNITS[unit] if unit else value)


@dataclass(frozen=True)
class Said:
    """What rows say: a text, whether what must be so of them is, and the cells that the text shows."""

    words: str
    holds: bool
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """One claim, with the fields of its entry in ``claims.toml``."""

    id: str
    claim: str
    number: str = ""
    source: str = ""
    shown: str = ""
    not_here: str = ""
    today: str = ""
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ours: str = ""
    holds: Sequence[Sequence[Any]] = ()
    verdicts: Sequence[str] = (TRUE, CHANGED)

    @property
    def experiment(self) -> str:
        """That shows it."""
        return self.shown.partition(".")[0]

    def said(self, rows: Rows) -> Said | None:
        """What rows of the question that shows it say; None if the rows are not there, or nothing in their cells."""
        found = declared(rows, self.rows, self.holds) if self.rows else READINGS[self.id](rows)
        if found is None:
            return None
        holds, values = found
        shown = {name: values[name] for _, name, _, _ in Cells().parse(self.ours) if name}
        return None if None in shown.values() else Said(Cells().vformat(self.ours, (), shown), holds, shown)


def claims(path: Path = CLAIMS) -> list[Claim]:
    """All of them, in the order of the file."""
    return [Claim(name, **entry) for name, entry in tomllib.loads(path.read_text()).items()]
