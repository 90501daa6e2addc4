"""What lower rooms see of a format: its columns, and the text with which kernels load and store elements."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch

from .columns import dense_like

#: Pseudo columns of a table for kernels that know where an element stands: its parameter, and the row's first element.
PLACES = 2


@dataclass(frozen=True)
class Column:
    """One array of those that store a list.

    Attributes:
        name: "" for one that stands under the list's own name.
        dtype: of an entry.
        per: elements that share an entry; they follow each other in memory, and the last entry may have fewer.
    """

    name: str
    dtype: torch.dtype
    per: int = 1

    @property
    def width(self) -> int | Fraction:
        """Bytes of an element."""
        size = self.real.itemsize
        return size if self.per == 1 else Fraction(size, self.per)

    @property
    def real(self) -> torch.dtype:
        """What kernels see of an entry: of complex numbers those of their parts."""
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    def key(self, name: str) -> str:
        """What the column of list ``name`` is called in state dicts and errors."""
        return f"{name}.{self.name}" if self.name else name

    def entries(self, numel: int) -> int:
        """How many entries stand for ``numel`` elements."""
        return -(-numel // self.per)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of the column of a parameter."""
        return tensor.shape if self.per == 1 else torch.Size([self.entries(tensor.numel())])

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor, perhaps without memory, with the shape and strides of the column of a parameter."""
        return dense_like(tensor) if self.per == 1 else torch.empty(self.shape(tensor), device="meta")


class StorageFormat(Protocol):
    """How a list is stored, as kernels see it (:class:`pagedopt.formats.Format` says more).

    It is hashable: compiled kernels are kept by it.

    Attributes:
        name: for people.
        columns: at least one.
        block: elements that are loaded and stored together; a power of two.
        arithmetic: the narrowest dtype in which its elements may be computed with, float32 or float64.
        plain: whether it is one column whose elements are loaded and stored one by one, wherever they stand.
        cuda_type: a plain one: the C++ type of an element, for ``load_as`` and ``store_as``; else the name of a struct
            with ``load`` and ``store`` (see ``kernels/blocks.cu``).
        cuda_text: what of that the kernels' own text does not have.
        numba_load, numba_store: a plain one: expressions with ``{}``; else statements (see ``kernels/cpu.py``).
        numba_type: of a plain one, the NumPy type as which an element is read.
    """

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[Column, ...]: ...

    @property
    def block(self) -> int: ...

    @property
    def arithmetic(self) -> torch.dtype: ...

    @property
    def plain(self) -> bool: ...

    @property
    def cuda_type(self) -> str: ...

    @property
    def cuda_text(self) -> str: ...

    @property
    def numba_load(self) -> str: ...

    @property
    def numba_store(self) -> str: ...

    @property
    def numba_type(self) -> str: ...

    def __hash__(self) -> int: ...
