"""The interface of formats to tables, pages and kernels: columns, and the text that loads and stores elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from .tensors import dense_like

#: Words of a row, after its addresses, for formats that ask for the position of an element: the index of the
#: parameter, and that of the row's first element in it.
POSITION_WORDS = 2


@dataclass(frozen=True)
class Column:
    """One of the arrays that store a list.

    Attributes:
        name: "" for a column whose key in the state is the list's own name.
        dtype: of an entry.
        per: consecutive elements that share an entry; the last entry may have fewer.
    """

    name: str
    dtype: torch.dtype
    per: int = 1

    @property
    def width(self) -> int | Fraction:
        """Bytes per element."""
        size = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        return size if self.per == 1 else Fraction(size, self.per)

    @property
    def real(self) -> torch.dtype:
        """The dtype that kernels see: for complex numbers that of their parts."""
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    def key(self, name: str) -> str:
        """Return the column's key in state dicts and errors, for the list ``name``."""
        return f"{name}.{self.name}" if self.name else name

    def entries(self, numel: int) -> int:
        """Return the number of entries for ``numel`` elements."""
        return -(-numel // self.per)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return the shape of the column for a parameter."""
        return tensor.shape if self.per == 1 else torch.Size([self.entries(tensor.numel())])

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor (it may be a meta tensor) with the shape and strides of the column for a parameter."""
        return dense_like(tensor) if self.per == 1 else torch.empty(self.shape(tensor), device="meta")


def words_of(counts: Sequence[int]) -> list[list[int]]:
    """Return the words of a row that have the columns of each list, given how many columns each has.

    The columns follow each other list by list; but of the first list, the parameter, only the first column stands in
    front: what else stores it comes last.  So gradients are the second word, however parameters are stored.
    """
    total, behind = sum(counts), counts[0] - 1
    rest = iter(range(1, total))
    return [[0, *range(total - behind, total)], *([next(rest) for _ in range(count)] for count in counts[1:])]


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """A format as kernels see it, which hash it as a key of caches; :class:`pagedopt.formats.Format` has the details.

    Attributes:
        name: for people.
        columns: at least one.
        block: elements that are loaded and stored together; a power of two.
        arithmetic: the narrowest dtype in which kernels may compute, float32 or float64.
        cuda_type: if plain, the C++ type of an element, for ``load_as`` and ``store_as``; else the name of a struct
            with ``load`` and ``store`` (see ``kernels/blocks.cu``).
        cuda_text: definitions of these, unless the kernels have them.
        numba_load, numba_store: if plain, expressions with ``{}``; else statements (see ``kernels/cpu_text.py``).
    """

    name: str
    columns: tuple[Column, ...]
    block: int = 1
    arithmetic: torch.dtype = torch.float32
    cuda_type: str = ""
    cuda_text: str = ""
    numba_load: str = ""
    numba_store: str = ""

    @property
    def at_once(self) -> int:
        """Elements that ``numba_load`` and ``numba_store`` take at a time: a block, or several."""
        return self.block

    @property
    def plain(self) -> bool:
        """Whether it is one column, whose elements are loaded and stored independently."""
        return False

    @property
    def numba_type(self) -> str:
        """The NumPy type of a stored element, if the format is plain."""
        raise NotImplementedError(f"format {self.name!r} is not plain")
