"""The option ``device_budget`` as a value: bytes, a share of the state, a time, ``"auto"``, or all."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral

from ..common.units import looks_like_seconds, parse_bytes, parse_seconds, text_of_bytes, text_of_seconds

#: Bytes (2000, ``"2GiB"``), a share of the state (``"50%"``, 0.5), ``"auto"``, ``"all"`` (or None), or a time
#: (``"20 ms"``, ``"20 ms by rates.json"``): spill as much as adds at most that much transfer to a step.
Given = int | float | str | None

#: The fewest bytes that a page of any placement has.
MIN_PAGE = 4096

_ALSO = "a share as '50%', 'all' and 'auto' are budgets too, and so is a time as '20 ms'"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of an optimizer's state may stay on each device of its parameters.

    Bytes go to arenas in the order of their creation, until none are left.  A share applies to each arena separately,
    in whole pages, so that never more than this share of all state stays.  In both cases an arena's part does not
    depend on later arenas.  A time is the most that a step may take longer; rates turn it into bytes that may be away
    (:meth:`leaving`), which arenas give in the order of their creation.

    Args:
        said: what the user gave.  Budgets that mean the same in other words are equal.

    Attributes:
        nbytes, share, seconds: the number of bytes, the share (0 to 1) or the time, if it is one.
        auto: whether it is what the device can spare, which has to be measured.
        rates: the name of the file with rates for a time; None: no file is named.
        away: how many bytes may be away, if it says that.

    Raises:
        ValueError, TypeError: it is not a budget; the text begins with the option's name and the value.

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
    away: int | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        said, put = self.said, functools.partial(object.__setattr__, self)  # the class is frozen
        time, by, rates = str(said).partition(" by ")
        if said == "auto":
            put("auto", True)
        elif looks_like_seconds(time):
            put("seconds", parse_seconds(time))
            put("rates", rates.strip() if by else None)
        elif (isinstance(said, str) and "%" in said) or (isinstance(said, float) and (said <= 1 or said % 1 != 0)):
            put("share", _share(said))  # a whole float above 1, as 2e9, is bytes
        elif said is not None and said != "all":
            put("nbytes", _bytes(said))
            if isinstance(said, Integral):
                put("said", self.nbytes)  # a NumPy integer becomes one of Python

    @classmethod
    def parse(cls, value: Given | Budget) -> Budget:
        """Return a budget as it is, and make one of anything else."""
        return value if isinstance(value, Budget) else cls(value)

    @classmethod
    def leaving(cls, nbytes: int) -> Budget:
        """Return a budget that sends up to ``nbytes`` away, however much state there is."""
        return cls(away=nbytes)

    def check_unit(self) -> None:
        """Raise ValueError if its bytes are fewer than any page has, as where a unit was forgotten."""
        nbytes = self.nbytes or 0
        if not 0 < nbytes < MIN_PAGE:
            return
        share = f"'{nbytes}%'" if nbytes > 1 else "1.0 (all)"
        meant = f"{share} or '{nbytes}GiB'" if nbytes <= 100 else f"'{nbytes}MiB'"
        held = f"{nbytes:,} bytes hold" if nbytes > 1 else "1 byte holds"
        raise ValueError(f"device_budget is {self.said!r}: {held} no page; did you mean {meant}?")

    @property
    def everything(self) -> bool:
        """Whether all state stays, however much there is."""
        return self.nbytes is None and self.share is None and not self.measured and self.away is None

    @property
    def measured(self) -> bool:
        """Whether its bytes have to be measured: ``"auto"``, or a time."""
        return self.auto or self.seconds is not None

    @property
    def nothing(self) -> bool:
        """Whether nothing may stay."""
        return self.nbytes == 0 or self.share == 0

    def of(self, total: int) -> int:
        """Return how many of ``total`` bytes may stay; ValueError for ``"auto"`` and times, which must be measured."""
        if self.measured:
            raise ValueError(f"device_budget is {self.said!r}, which no total tells: it is measured")
        if self.away is not None:
            return max(0, total - self.away)
        if self.share is not None:
            return int(self.share * total)
        return total if self.nbytes is None else min(self.nbytes, total)

    def limit(self, total: int) -> int | None:
        """Return the bytes that reports show, even if state is smaller; None for all, and for what is measured."""
        return self.of(total) if self.share is not None or self.away is not None else self.nbytes

    @property
    def shown(self) -> str:
        """What the user gave; numbers get a unit."""
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
        if not 0 <= said <= 1:  # refuses NaN, too
            raise ValueError(
                f"device_budget is {said!r}; a float is a share of the state, from 0 to 1; give bytes as an integer or "
                "a text as '2GiB'"
            )
        return Fraction(str(said))  # by its text: 0.1 is exactly a tenth
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", said)
    if not found or Fraction(found[1]) > 100:
        raise ValueError(f"device_budget is {said!r}; give a share of the state from '0%' to '100%', or bytes")
    return Fraction(found[1]) / 100


def _bytes(said: Given) -> int:
    if isinstance(said, float):
        said = int(said)
    if isinstance(said, bool) or not isinstance(said, Integral | str):
        raise TypeError(f"device_budget is {said!r}; give bytes as an integer or a text as '2GiB'; {_ALSO}")
    if isinstance(said, str) and re.fullmatch(r"\s*\d*\.\d*\s*", said):
        raise ValueError(f"device_budget is {said!r}; bytes are whole: give a unit as in '0.5GiB', or a share as '50%'")
    try:
        return parse_bytes(said)
    except ValueError as error:
        raise ValueError(f"{error}; {_ALSO}") from None


#: All state stays, or none.
ALL, NOTHING = Budget(), Budget(0)

__all__ = ["ALL", "NOTHING", "Budget", "Given"]
