"""What a user says of how much state stays on a device, as one value: bytes, a share, what can be spared, what a step
may take longer, or all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from ..common.units import looks_like_seconds, parse_bytes, parse_seconds, text_of_bytes, text_of_seconds

#: Bytes, as a whole number or a text as ``"2GiB"``; a share of the state, as ``"50%"`` or 0.5; a time, as ``"20 ms"``
#: or ``"20 ms by rates.json"``; ``"auto"``; ``"all"``, for which None stands.
Given = int | float | str | None

_ALSO = "a share as '50%', 'all' and 'auto' are budgets too, and so is a time as '20 ms'"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of an optimizer's state may stay on each device of its parameters.

    Bytes go to arenas in the order in which they are made, until none are left.  A share is each arena's own: of every
    one that share of its bytes stays, in whole pages, so that never more than that share of the whole stays.  Either
    way what an arena keeps depends on none that is made later.  A time is the most that a step may take longer; how
    many bytes may be away then (:meth:`leaving`) is for rates to say, and arenas send theirs in the order in which they
    are made.

    Args:
        said: what the user gave; two that say the same in other words are equal.

    Attributes:
        nbytes: if it is a number of bytes, that number.
        share: if it is a share, that, from 0 to 1.
        auto: whether it is what the device can spare, which has to be measured.
        seconds: if it is a time, that.
        rates: the name of the file with the rates that tell what a time affords; None: none is named.
        away: if it says how many bytes may be away, that number.

    Raises:
        ValueError, TypeError: it is no budget; the text begins with the option's name and the value.

    Example:
        >>> Budget("50%").of(10), Budget("1 kB").of(10), Budget().of(10), str(Budget(0.25))
        (5, 10, 10, '25% of the state')
    """

    said: Given = field(default=None, compare=False)
    nbytes: int | None = field(default=None, init=False, repr=False)
    share: Fraction | None = field(default=None, init=False, repr=False)
    auto: bool = field(default=False, init=False, repr=False)
    seconds: float | None = field(default=None, init=False, repr=False)
    rates: str | None = field(default=None, init=False, repr=False)
    away: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        said = self.said
        if said is None or said == "all":
            return
        if said == "auto":
            object.__setattr__(self, "auto", True)
        elif looks_like_seconds((parts := str(said).split(" by ", 1))[0]):
            object.__setattr__(self, "seconds", parse_seconds(parts[0]))
            object.__setattr__(self, "rates", parts[1].strip() if len(parts) > 1 else None)
        elif (isinstance(said, float) and not (said > 1 and said.is_integer())) or (
            isinstance(said, str) and "%" in said
        ):
            object.__setattr__(self, "share", _share(said))
        else:
            object.__setattr__(self, "nbytes", _bytes(said))

    @classmethod
    def parse(cls, value: Given | Budget) -> Budget:
        """A budget as it is; anything else read as one."""
        if value is None:
            return ALL
        return value if isinstance(value, Budget) else cls(value)

    @classmethod
    def leaving(cls, nbytes: int) -> Budget:
        """One that sends up to ``nbytes`` away and keeps the rest, whatever is made."""
        budget = cls()
        object.__setattr__(budget, "away", nbytes)
        return budget

    @property
    def everything(self) -> bool:
        """Whether it is none: all stays, whatever is made."""
        return self.nbytes is None and self.share is None and not self.measured and self.away is None

    @property
    def measured(self) -> bool:
        """Whether no total tells what it comes to: ``"auto"``, and a time."""
        return self.auto or self.seconds is not None

    @property
    def nothing(self) -> bool:
        """Whether nothing may stay."""
        return self.nbytes == 0 or self.share == 0

    def of(self, total: int) -> int:
        """How many of ``total`` bytes may stay.

        Raises:
            ValueError: it is ``"auto"`` or a time: no total tells.
        """
        if self.measured:
            raise ValueError(f"device_budget is {self.said!r}, which no total tells: it is measured")
        if self.away is not None:
            return max(0, total - self.away)
        if self.share is not None:
            return int(self.share * total)
        return total if self.nbytes is None else min(self.nbytes, total)

    def limit(self, total: int) -> int | None:
        """Bytes as reports have them, for ``total`` bytes of state: what was said, whether there are as many or not;
        None for all and for what is measured."""
        return self.of(total) if self.share is not None or self.away is not None else self.nbytes

    @property
    def shown(self) -> str:
        """What the user gave, a number with its unit."""
        if self.said is None:
            return "all"
        return self.said if isinstance(self.said, str) else str(self)

    def __str__(self) -> str:
        if self.auto:
            return "what the device can spare"
        if self.seconds is not None:
            return f"what a step may take {text_of_seconds(self.seconds)} longer for"
        if self.away is not None:
            return f"all but {text_of_bytes(self.away)}"
        if self.share is not None:
            return f"{float(100 * self.share):g}% of the state"
        return "all of the state" if self.nbytes is None else text_of_bytes(self.nbytes)


def _share(said: float | str) -> Fraction:
    if isinstance(said, float):
        if not 0 <= said <= 1:  # nor NaN
            raise ValueError(
                f"device_budget is {said!r}; a float is a share of the state, from 0 to 1; give bytes as an integer or "
                "a text as '2GiB'"
            )
        return Fraction(str(said))  # as it is written: 0.1 is a tenth
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", said)
    if not found or Fraction(found[1]) > 100:
        raise ValueError(f"device_budget is {said!r}; give a share of the state from '0%' to '100%', or bytes")
    return Fraction(found[1]) / 100


def _bytes(said: Given) -> int:
    if isinstance(said, float):
        said = int(said)  # a whole one, as 2e9
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        raise TypeError(f"device_budget is {said!r}; give bytes as an integer or a text as '2GiB'; {_ALSO}")
    if isinstance(said, str) and re.fullmatch(r"\s*\d*\.\d*\s*", said):
        raise ValueError(f"device_budget is {said!r}; bytes are whole: give a unit as in '0.5GiB', or a share as '50%'")
    try:
        return parse_bytes(said)
    except ValueError as error:
        raise ValueError(f"{error}; {_ALSO}") from None


#: No budget, and none that stays.
ALL, NOTHING = Budget(), Budget(0)

__all__ = ["ALL", "NOTHING", "Budget", "Given"]
