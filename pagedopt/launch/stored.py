"""Maps the inputs of a rule to the columns in which their formats store them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..formats.floating import FLOAT32, NUMBERS, of_dtype
from ..formats.format import Column, Format
from ..kernels.source import width
from ..rules import Rule
from ..tables.layout import Geometry
from ..tables.storage import words_of


class Stored:
    """The columns and formats of a rule's inputs.

    Args:
        formats: one for each of its inputs; None, for one or for all: plain numbers of the tensors' dtype.

    Attributes:
        given: those formats; None for plain numbers, whose format follows from the tensors' dtype.
        keys: the names of all columns, in the order of the table (:func:`~pagedopt.tables.storage.words_of`).
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
        self._words = words_of([*map(len, columns)])
        found = {
            word: (column.key(name), column.per)
            for name, each, words in zip(rule.inputs, columns, self._words, strict=True)
            for column, word in zip(each, words, strict=True)
        }
        self.keys, self.per = zip(*[found[word] for word in range(len(found))], strict=True)
        self.writes = tuple([word for i in rule.writes for word in self._words[i]])
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
            found: list[Format] = []
            for name, form, words in zip(self._inputs, self.given, self._words, strict=True):
                if form is None:
                    found.append(of_dtype(dtypes[words[0]] or torch.float32, name))
                else:
                    for column, word in zip(form.columns, words, strict=True):
                        _check_dtype(form, column, self.keys[word], dtypes[word])
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
