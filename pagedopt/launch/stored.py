"""Maps the inputs of a rule to the columns in which their formats store them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ..formats.floating import FLOAT32, NUMBERS, of_dtype
from ..formats.format import Column, Format
from ..kernels.source import width
from ..rules import Rule
from ..tables.layout import Geometry


class Stored:
    """The columns and formats of a rule's inputs.

    Args:
        formats: one for each of its inputs; None, for one or for all: plain numbers of the tensors' dtype.

    Attributes:
        given: those formats; None for plain numbers, whose format follows from the tensors' dtype.
        keys: the names of all columns, in the order of the table.
        per: for each column, how many elements share an entry.
        writes: indices of the columns that are overwritten.
        by_position: whether a format needs the index of an element in its tensor.
        per_thread: elements that a thread takes at a time.

    Raises:
        ValueError: the number of formats is not that of inputs, or the formats' block sizes do not fit together.
    """

    def __init__(self, rule: Rule, formats: Sequence[Format | None] | None = None) -> None:
        given = list(formats or [None] * len(rule.inputs))
        if len(given) != len(rule.inputs):
            said = f"rule {rule.name!r} takes {len(rule.inputs)} lists {rule.inputs}"
            raise ValueError(f"{said}, got {len(given)} formats")
        self.given = tuple([None if f in NUMBERS else f for f in given])
        self._inputs = rule.inputs
        for i in rule.between:
            if (form := self.given[i]) is not None and not form.plain:
                raise ValueError(
                    f"rule {rule.name!r} is made of rules of which one takes what another has stored in "
                    f"{rule.inputs[i]!r}; format {form.name!r} stores blocks, or rounds at random: launch them one "
                    "after another"
                )
        columns = [f.columns if f else FLOAT32.columns for f in self.given]
        ends = list(itertools.accumulate(map(len, columns)))
        self.keys = tuple(c.key(name) for name, each in zip(rule.inputs, columns, strict=True) for c in each)
        self.per = tuple([c.per for each in columns for c in each])
        self.writes = tuple(j for i in rule.writes for j in range(ends[i] - len(columns[i]), ends[i]))
        self.by_position = any(f is not None and not f.plain for f in self.given)
        self.per_thread = width([f or FLOAT32 for f in self.given])
        self._of: tuple[list[torch.dtype | None], tuple[Format, ...]] | None = None

    def formats(self, dtypes: Sequence[torch.dtype | None]) -> tuple[Format, ...]:
        """Return the format of each input, by the ``dtypes`` of the columns; None: a column has no tensor so far.

        Raises:
            TypeError: kernels do not support a dtype, or a column has another dtype than its format.
        """
        known = self._of  # read once: another thread may replace it
        if known is None or known[0] != dtypes:
            rest = iter(zip(self.keys, dtypes, strict=True))
            found: list[Format] = []
            for name, form in zip(self._inputs, self.given, strict=True):
                if form is None:
                    _, dtype = next(rest)
                    found.append(of_dtype(dtype or torch.float32, name))
                else:
                    for column, (key, dtype) in zip(form.columns, rest, strict=False):
                        _check_dtype(form, column, key, dtype)
                    found.append(form)
            known = self._of = list(dtypes), tuple(found)
        return known[1]

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise a ValueError if a chunk would end in the middle of a block of a format."""
        for form in filter(None, self.given):
            if geometry.chunk_numel % form.block:
                raise ValueError(
                    f"chunk_numel is {geometry.chunk_numel}; format {form.name!r} needs a multiple of {form.block}"
                )


@functools.lru_cache(maxsize=256)
def stored_of(rule: Rule, formats: tuple[Format | None, ...] | None) -> Stored:
    """Return a cached :class:`Stored`."""
    return Stored(rule, formats)


def _check_dtype(form: Format, column: Column, key: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype is not column.dtype:
        raise TypeError(f"{key} is {dtype}; format {form.name!r} has {column.dtype}")
