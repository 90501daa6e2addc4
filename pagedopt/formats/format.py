"""What a format is: how one list of tensors is stored, as an object."""

from __future__ import annotations

import dataclasses
import keyword
from dataclasses import dataclass

import torch

from ..tables.storage import Column
from .text import check_text

#: The most elements of a block, and bytes of an entry: chunks of work and parameters in pages begin at multiples.
MOST = 1024
ENTRY = 8
#: What the statements for Numba have besides their columns.
TAKEN = frozenset({"x", "live", "row", "index", "seed", "np", "S", "elements", "float_of", "bits_of"})


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one list of tensors is stored: columns of entries, and how kernels load and store elements.

    Rules never see it: they get and give numbers, of float32 (of float64 where a list asks for it).  Kernels are made
    for a rule and a format of each list, and kept by them, so a format is hashable: a frozen dataclass.  What is stored
    as zeros must load as zero: that is how state begins.

    A format of blocks, or one that asks where an element stands, gives as ``cuda_text`` a struct ``cuda_type``::

        struct Name {
            static constexpr int columns = 2;
            template <class S, int WIDTH> static __device__ void load(S (&x)[WIDTH], const Spot& spot);
            template <class S, int WIDTH> static __device__ void store(const S (&x)[WIDTH], const Spot& spot);
        };

    A thread loads or stores ``spot.live`` of WIDTH elements, beginning with number ``spot.at`` of the row whose columns
    are ``spot.column<T>(i)``; what is behind them is 0.  ``block_max<BLOCK, WIDTH>(x)`` and ``block_sum`` speak for all
    threads of a block.  ``spot.row`` is the number of the parameter, ``spot.index`` that of the first element in it,
    ``spot.seed`` another one in each step.

    ``numba_load`` and ``numba_store`` are statements on a block: they fill ``x``, or store it, ``live`` elements that
    begin at number ``index`` of parameter ``row``.  Columns are arrays under their names (``elements`` for one without
    a name; floats of 16 bits as their bits, uint16), cut so that they begin with the block.  There are ``np``, the
    arithmetic type ``S``, ``seed``, the functions ``float_of`` (uint32 bits) and ``bits_of`` (a float32), those of
    rules (``element_sqrt``, ``element_abs``, …), and what Python has built in: no other names.

    Attributes:
        name: for people.
        columns: what it keeps; the first one may have no name, and stands under the name of the state then.
        block: elements that are loaded and stored together: a power of two up to 1,024.
        arithmetic: in which its elements must be computed with at least, float32 or float64.
        cuda_type, cuda_text, numba_load, numba_store: see above.

    Raises:
        ValueError: an attribute has a value that kernels or pages could not follow.

    Example:
        :class:`tests.outside.format.Int8Blocks`, and CONTRIBUTING.md.
    """

    name: str
    columns: tuple[Column, ...]
    block: int = 1
    arithmetic: torch.dtype = torch.float32
    cuda_type: str = ""
    cuda_text: str = ""
    numba_load: str = ""
    numba_store: str = ""

    def __post_init__(self) -> None:
        what = f"format {self.name!r}"
        if not 1 <= self.block <= MOST or self.block & (self.block - 1):
            raise ValueError(f"{what}: block is {self.block}; it must be a power of two up to {MOST}")
        if not self.columns:
            raise ValueError(f"{what} has no columns; it needs at least one")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or "" in names[1:]:
            raise ValueError(f"{what}: its columns are called {names}; names must differ, and only the first may be ''")
        if self.arithmetic not in (torch.float32, torch.float64):
            raise ValueError(f"{what}: arithmetic is {self.arithmetic}; it must be torch.float32 or torch.float64")
        for column in self.columns:
            self._check_column(column)
        self._check_texts()

    def _check_texts(self) -> None:
        names = {"x", "live", "row", "index", "seed", "np", "S", *(c.name or "elements" for c in self.columns)}
        for name in ("numba_load", "numba_store"):
            check_text(f"format {self.name!r}: {name}", getattr(self, name), names, "exec")

    def _check_column(self, column: Column) -> None:
        what = f"column {column.name!r} of format {self.name!r}"
        if column.name and (not column.name.isidentifier() or keyword.iskeyword(column.name) or column.name in TAKEN):
            raise ValueError(f"{what}: give it a name that a variable may have, and none of {', '.join(sorted(TAKEN))}")
        if column.per < 1 or self.block % column.per:
            raise ValueError(f"{what} has an entry per {column.per} elements; a block has {self.block}")
        if column.dtype.itemsize > ENTRY or column.dtype.is_complex:
            raise ValueError(f"{what} is {column.dtype}; an entry has up to {ENTRY} bytes and is real")

    def check_zeros(self) -> None:
        """See that what is stored as zeros stands for zero.

        Raises:
            ValueError: it does not.
        """
        zeros = (torch.zeros(c.entries(self.block), dtype=c.dtype, device="cpu") for c in self.columns)
        if (loaded := self.decode(*zeros, numel=self.block)).any():
            raise ValueError(
                f"format {self.name!r}: zeros in all columns stand for {float(loaded[0])!r}; state begins as such, and "
                "they must stand for 0"
            )

    @property
    def plain(self) -> bool:
        """Whether it is one column, whose elements are loaded and stored one by one."""
        return False

    @property
    def numba_type(self) -> str:
        """Of a plain one: the NumPy type as which an element is read."""
        raise NotImplementedError(f"format {self.name!r} is not plain")

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Columns for ``values``, as kernels would store them.

        Args:
            values: (n,), floating point, on any device; it begins with a block.

        Returns:
            one tensor (entries,) for each column, on the same device.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode")

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """The opposite of :meth:`encode`: ``numel`` elements, in :attr:`arithmetic`."""
        raise NotImplementedError(f"{type(self).__name__}.decode")


@dataclass(frozen=True, kw_only=True)
class ElementFormat(Format):
    """One array of elements, each loaded and stored by itself: kernels move 16 bytes at a time.

    Attributes:
        cuda_type: the C++ type of an element, for ``load_as<S, T>`` and ``store_as<T, S>`` of ``kernels/numbers.cuh``.
        cuda_text: those two, if the kernels do not have them.
        numba_type: the NumPy type as which an element is read.
        numba_load, numba_store: expressions, in which ``{}`` is what is read, or what is to be stored.  They become
            part of a rule's own text, so NumPy is ``_np`` there; there are the arithmetic type ``S``, ``_numbers``
            (``from_half``, ``to_half``, ``from_bfloat16``, ``to_bfloat16``), ``float_of``, ``bits_of``, the functions
            of rules (``element_sqrt``, …), and what Python has built in: no other names.

    One that does more than convert, for example scale, defines :meth:`encode` and :meth:`decode` to do the same: an
    optimizer compares them with the text before it takes the format.
    """

    numba_type: str = ""

    def __hash__(self) -> int:
        """Asked for in every step, to find the kernel; who has the same name is compared whole."""
        return hash(self.name)

    @property
    def plain(self) -> bool:
        """It is."""
        return True

    def _check_texts(self) -> None:
        what = f"format {self.name!r}"
        check_text(f"{what}: numba_type", self.numba_type, {"_np"}, "eval")
        for name in ("numba_load", "numba_store"):
            text = getattr(self, name)
            try:
                filled = text.format("x")
            except (LookupError, ValueError, AttributeError) as error:
                raise ValueError(f"{what}: {name} is {text!r}; braces but {{}} are doubled ({error!r})") from None
            if text and filled == text:
                raise ValueError(f"{what}: {name} is {text!r}; it needs {{}}, which stands for the element")
            check_text(f"{what}: {name}", filled, {"x", "_np", "_numbers", "S"}, "eval")

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        return self.columns[0].dtype

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As torch converts."""
        return (values.to(self.dtype),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """As torch converts."""
        return columns[0].to(self.arithmetic)


def complexified(column: Column) -> Column:
    """The column of a complex parameter, whose real and imaginary parts are the elements."""
    return dataclasses.replace(column, dtype=column.dtype.to_complex())


__all__ = ["Column", "ElementFormat", "Format", "complexified"]
