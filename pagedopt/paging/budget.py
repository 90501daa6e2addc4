"""The option ``device_budget`` as a value: bytes, a share of the state, ``"auto"``, or all."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral

from ..common.units import SECONDS_TEXT, parse_bytes, text_of_bytes

#: Bytes (2000, ``"2GiB"``), a share of the state (``"50%"``, 0.5), ``"auto"``, or ``"all"`` (or None).
Given = int | float | str | None

#: The fewest bytes that a page of any placement has.
MIN_PAGE = 4096

_ALSO = "a share as '50%', 'all' and 'auto' are budgets too"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of an optimizer's state may stay on each device of its parameters.

    Bytes go to arenas in the order of their creation, until none are left.  A share applies to each arena separately,
    in whole pages, so that never more than this share of all state stays.  In both cases an arena's part does not
    depend on later arenas.

    Args:
        said: what the user gave.  Budgets that mean the same in other words are equal.

    Attributes:
        nbytes, share: the number of bytes, or the share (0 to 1), if it is one.
        auto: whether it is what the device can spare, which has to be measured.

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

    def __post_init__(self) -> None:
        said, put = self.said, functools.partial(object.__setattr__, self)  # the class is frozen
        if isinstance(said, str):
            _refuse_time(said)
        if said == "auto":
            put("auto", True)
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
        return self.nbytes is None and self.share is None and not self.auto

    @property
    def nothing(self) -> bool:
        """Whether nothing may stay."""
        return self.nbytes == 0 or self.share == 0

    def of(self, total: int) -> int:
        """Return how many of ``total`` bytes may stay; ValueError for ``"auto"``, which must be measured."""
        if self.auto:
            raise ValueError(f"device_budget is {self.said!r}, which does not follow from a total: it is measured")
        if self.share is not None:
            return int(self.share * total)
        return total if self.nbytes is None else min(self.nbytes, total)

    def limit(self, total: int) -> int | None:
        """Return the bytes that reports show, even if state is smaller; None for all, and for ``"auto"``."""
        return self.nbytes if self.share is None else self.of(total)

    @property
    def shown(self) -> str:
        """What the user gave; numbers get a unit."""
        if self.said is None:
            return "all"
        return self.said if isinstance(self.said, str) else str(self)

    def __str__(self) -> str:
        if self.auto:
            return "what the device can spare"
        if self.share is not None:
            return f"{float(100 * self.share):g}% of the state"
        return "all of the state" if self.nbytes is None else text_of_bytes(self.nbytes)


def _refuse_time(said: str) -> None:
    """Raise ValueError for a time, as ``"20 ms"`` or ``"20 ms by rates.json"``."""
    time, _, rates = said.partition(" by ")
    if found := SECONDS_TEXT.fullmatch(time):
        by = f" --rates {shlex.quote(rates.strip())}" if rates else ""
        command = f"pagedopt plan --time {found[1]}{found[2]} --params N{by}"
        raise ValueError(f"device_budget is {said!r}, a time; `{command}` prints the bytes to write instead")


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
