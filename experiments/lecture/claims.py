"""The claims of ``experiments/claims.toml``, and what rows say to them."""

from __future__ import annotations

import re
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
LATER, NOT_YET, NOT_HERE = "shown in a later part", "not measured yet", "not shown here"
#: What rows may say, and all verdicts.
JUDGED = (TRUE, CHANGED, SLIP, NOT_SEEN)
VERDICTS = (*JUDGED, LATER, NOT_YET, NOT_HERE)
#: Reasons for which a claim need not be shown at all.
REASONS = ("logistics", "was not run", "compilers refuse")
#: What each part of the page was read from, by the letter of its ids.
SOURCES = {"A": ("000", "001"), "C": ("002",), "D": ("003",)}
#: Digits that are part of a name; all others in a text have to come from rows.
NAMES = re.compile(r"GPT-2|Llama 70B|float32|float64|int8|16 bytes|(4|32) KB")
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
    """One claim, with the fields of its entry in ``claims.toml``.

    Attributes:
        on_a_cpu: whether a CPU's results judge it while no GPU's are kept.
    """

    id: str
    claim: str
    number: str = ""
    source: str = ""
    shown: str = ""
    later: str = ""
    not_here: str = ""
    today: str = ""
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ours: str = ""
    holds: Sequence[Sequence[Any]] = ()
    verdicts: Sequence[str] = (TRUE, CHANGED)
    on_a_cpu: bool = False

    def __post_init__(self) -> None:
        if sum(map(bool, (self.shown, self.later, self.not_here))) != 1:
            raise ValueError(f"{self.id}: give one of shown, later and not_here")
        if self.not_here and not any(reason in self.not_here for reason in REASONS):
            raise ValueError(f"{self.id}: not_here is {self.not_here!r}; the reasons are {', '.join(REASONS)}")
        if len(set(self.verdicts)) != 2 or not set(self.verdicts) <= set(JUDGED):
            raise ValueError(f"{self.id}: verdicts are two of {', '.join(JUDGED)}")
        if bool(self.rows) is (self.id in READINGS) and self.shown:
            raise ValueError(f"{self.id}: give either rows or a function in readings.py")
        if bool(self.rows) is not bool(self.holds):
            raise ValueError(f"{self.id}: rows need holds, and holds rows: a verdict has to be able to turn")
        if not set(self.sources) <= set(SOURCES.get(self.id[0], self.sources)):
            raise ValueError(f"{self.id}: source {self.source!r} is none of {', '.join(SOURCES[self.id[0]])}")
        if re.search(r"\d", NAMES.sub("", re.sub(r"\{[^}]*\}", "", self.ours))):
            raise ValueError(f"{self.id}: {self.ours!r} has a number that comes from no row")

    @property
    def sources(self) -> Sequence[str]:
        """Where it was read: what it names, or all sources of its part."""
        return (self.source,) if self.source else SOURCES.get(self.id[0], ())

    @property
    def experiment(self) -> str:
        """That shows it, or will."""
        return self.shown.partition(".")[0] or self.later

    def said(self, rows: Rows) -> Said | None:
        """What rows of the question that shows it say; None if the rows are not there, or nothing in their cells."""
        found = declared(rows, self.rows, self.holds) if self.rows else READINGS[self.id](rows)
        if found is None:
            return None
        holds, values = found
        shown = {name: values[name] for _, name, _, _ in Cells().parse(self.ours) if name}
        return None if None in shown.values() else Said(Cells().vformat(self.ours, (), shown), holds, shown)


def claims(path: Path = CLAIMS) -> list[Claim]:
    """All of them, in the order of the file.

    Raises:
        ValueError: a claim does not say where it is shown, or what its verdicts are; or it has a number of its own.
    """
    return [Claim(name, **entry) for name, entry in tomllib.loads(path.read_text()).items()]
