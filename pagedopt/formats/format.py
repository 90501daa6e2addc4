"""Formats: how one list of tensors is stored."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import keyword
import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ..kernels.nvrtc import CompileError, compile_cuda
from ..kernels.source import conversions
from ..tables.storage import Column, StorageFormat

#: The most elements of a block, and bytes of an entry: chunks of work, and parameters in pages, start at multiples.
MAX_BLOCK = 1024
ENTRY = 8
#: Names that the statements for Numba may use, which columns cannot have.
TAKEN = frozenset(
    {"x", "live", "row", "index", "seed", "input", "np", "S", "elements", "float_of", "bits_of", "_numbers"}
)


@dataclass(frozen=True, kw_only=True)
class Format(StorageFormat):
    """How one list of tensors is stored: columns of entries, and how kernels load and store elements.

    Rules never see it: they compute in float32 (float64 if a list asks for it).  Kernels are compiled for a rule and
    the format of each list, and cached by them, so a format must be hashable: a frozen dataclass.  Columns of zeros
    must load as zero, because state starts as zeros.  A rule's first input, the parameter, may have a format, too: in a
    table, its columns behind the first one come last (``sixteen.py`` has examples).

    A format with blocks, or one that needs an element's position, defines in ``cuda_text`` a struct ``cuda_type``::

        struct Name {
            static constexpr int columns = 2;
            template <class S, int WIDTH> static __device__ void load(S (&x)[WIDTH], const Spot& spot);
            template <class S, int WIDTH> static __device__ void store(const S (&x)[WIDTH], const Spot& spot);
        };

    A thread loads or stores WIDTH elements, of which the first ``spot.live`` are there; the others are 0.  Element i is
    number ``spot.at + spot.offset(i)`` of the row: four elements follow each other, the next four of the thread are 128
    further on.  A warp takes whole blocks, so WIDTH is at most 4 or 1/32 of the largest block in the launch; a thread's
    elements are of one block.  The row's columns are ``spot.column<T>(i)``; if ``spot.aligned``, each begins at a
    multiple of 4 bytes.  ``block_max<BLOCK, WIDTH>(x)`` and ``block_sum`` reduce over the threads that share a format's
    block.

    For rounding at random there is ``Philox(a, b, c, d, key, other).word``, four words; ``spot.row`` is the number of
    the parameter in its optimizer, ``spot.index + spot.offset(i)`` that of an element in the parameter, ``spot.input``
    that of the list among the rule's inputs.  ``spot.seed`` has the optimizer's ``seed`` in its upper 32 bits and the
    step, counted from 1, in its lower 32; the step is 0 in an optimizer that counts none.

    ``numba_load`` and ``numba_store`` are statements that fill or store ``x``, the ``live`` elements of one block (of
    :attr:`at_once` elements), from index ``index`` of parameter ``row`` on, in list ``input``.  Columns are arrays
    under their names (``elements`` for one without a name; 16-bit floats as uint16 bits) that start with the block.
    Other names: ``np``, the arithmetic type ``S``, ``seed``, ``float_of`` (of uint32 bits), ``bits_of`` (of a float32),
    ``_numbers`` (see :class:`ElementFormat`), the functions of rules (``element_sqrt``, ``element_abs``, …), and
    Python's builtins.

    Attributes:
        name: for people.
        columns: the arrays that store the list; the first may have no name: its key is then the state's name.  Blocks
            lie in the memory of the first with an entry for each element; if there is none, in row-major order.
        block: elements that are loaded and stored together: a power of two up to 1,024.
        arithmetic: the narrowest dtype in which kernels may compute, float32 or float64.
        cuda_type, cuda_text, numba_load, numba_store: see above.

    Raises:
        ValueError: an attribute has a value that kernels or pages do not support.

    Example:
        :class:`tests.outside.format.Int8Blocks`, and notes/extending.md.
    """

    def __post_init__(self) -> None:
        what = f"format {self.name!r}"
        if not 1 <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"{what}: block is {self.block}; it must be a power of two up to {MAX_BLOCK}")
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

    def __hash__(self) -> int:
        """Hash the name alone: it is fast, and each step looks up its kernel by this."""
        return hash(self.name)

    def _check_texts(self) -> None:
        columns = {column.name or "elements" for column in self.columns}
        names = {"x", "live", "row", "index", "seed", "input", "np", "S", "_numbers", *columns}
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
        """Check that columns of zeros decode to zero.

        Raises:
            ValueError: they do not.
        """
        zeros = (torch.zeros(c.entries(self.block), dtype=c.dtype, device="cpu") for c in self.columns)
        if (loaded := self.decode(*zeros, numel=self.block)).any():
            raise ValueError(
                f"format {self.name!r}: zeros in all columns are decoded as {float(loaded[0])!r}; state begins as "
                "zeros, and they must be decoded as 0"
            )

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the columns that kernels would store for ``values``.

        Args:
            values: (n,), floating point, on any device; the first is the first of a block.

        Returns:
            one tensor (entries,) per column, on the same device.
        """
        raise NotImplementedError(f"{type(self).__name__}.encode")

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the ``numel`` elements that :meth:`encode` stored, in :attr:`arithmetic`."""
        raise NotImplementedError(f"{type(self).__name__}.decode")


@dataclass(frozen=True, kw_only=True)
class ElementFormat(Format):
    """One array of elements that are loaded and stored independently: kernels move 16 bytes at a time.

    Attributes:
        cuda_type: the C++ type of an element, for ``load_as<S, T>`` and ``store_as<T, S>`` of ``kernels/numbers.cuh``.
        cuda_text: that type, or specializations of these two, unless the kernels have them.
        numba_type: the NumPy type of a stored element, e.g. ``_np.uint16``.
        numba_load, numba_store: expressions; ``{}`` is the stored element, or the number to store.  They are inserted
            into a rule's text, where NumPy is ``_np``.  Other names: the arithmetic type ``S``, ``_numbers``
            (``from_half``, ``to_half``, ``from_bfloat16``, ``to_bfloat16``), ``float_of``, ``bits_of``, the functions
            of rules (``element_sqrt``, …), and Python's builtins.

    A format that does more than convert, e.g. scales, overrides :meth:`encode` and :meth:`decode` to do the same;
    optimizers compare them with the text before they accept the format.
    """

    numba_type: str = ""

    __hash__ = Format.__hash__

    @property
    def plain(self) -> bool:
        """Always True."""
        return True

    def _check_texts(self) -> None:
        what = f"format {self.name!r}"
        if hasattr(np, self.numba_type):
            raise ValueError(f"{what}: numba_type is {self.numba_type!r}; write '_np.{self.numba_type}'")
        check_text(f"{what}: numba_type", self.numba_type, {"_np"}, "eval")
        for name in ("numba_load", "numba_store"):
            text = getattr(self, name)
            try:
                filled = text.format("x")
            except (LookupError, ValueError, AttributeError) as error:
                raise ValueError(f"{what}: {name} is {text!r}; braces but {{}} are doubled ({error!r})") from None
            if text and filled == text:
                raise ValueError(f"{what}: {name} is {text!r}; it needs {{}} in place of the element")
            check_text(f"{what}: {name}", filled, {"x", "_np", "_numbers", "S"}, "eval")
        check_cuda(self.name, self.cuda_type, self.cuda_text, "double" if self.arithmetic is torch.float64 else "float")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a stored element."""
        return self.columns[0].dtype

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Convert as torch does."""
        return (values.to(self.dtype),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Convert as torch does."""
        return columns[0].to(self.arithmetic)


def complexified(column: Column) -> Column:
    """Return the column for a complex parameter, whose real and imaginary parts are the elements."""
    return dataclasses.replace(column, dtype=column.dtype.to_complex())


#: Types of which the kernels have the conversions.
KNOWN = ("float", "double", "half_bits", "bfloat16_bits")
#: Any architecture would do: the text is of no architecture.
ARCH = "sm_80"


@functools.cache
def check_cuda(name: str, cuda_type: str, cuda_text: str, number: str) -> None:
    """Raise ValueError if an element of ``cuda_type`` cannot be loaded as ``number`` ("float") and stored."""
    if cuda_type in KNOWN and not cuda_text:
        return
    try:
        compile_cuda(conversions(name, cuda_type, cuda_text, number), ("convert",), ARCH)
    except CompileError as error:
        lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
        raise ValueError(
            f"format {name!r}: its CUDA text does not load or store a {cuda_type or '(no cuda_type)'}: {lines[0]}"
        ) from None
    except (ImportError, RuntimeError):  # cuda-bindings raises the second where the library is missing
        return


#: Functions that any text may call: those of rules, and the two that reinterpret uint32 bits and float32.
FUNCTIONS = frozenset({
    "bits_of", "element_abs", "element_exp", "element_fma", "element_log", "element_max",
    "element_min", "element_sign", "element_sqrt", "element_tanh", "float_of",
})  # fmt: skip


def check_text(what: str, text: str, names: Collection[str], mode: Literal["eval", "exec"]) -> None:
    """Check that ``text`` is an expression (``eval``) or statements (``exec``) of Python, and uses only known names.

    Besides ``names`` it may use ``FUNCTIONS``, builtins and what it assigns.  Errors (ValueError) begin with ``what``.
    """
    needed = "an expression" if mode == "eval" else "statements"
    text = textwrap.dedent(text).strip("\n")
    empty = ValueError(f"{what} is empty; give {needed}, from which kernels for the CPU are made")
    if not text.strip():
        raise empty
    try:
        tree = ast.parse(text, mode=mode)
    except SyntaxError as error:
        line = (error.text or text).strip()
        raise ValueError(f"{what} is not {needed} of Python: {error.msg}, in {line!r}") from None
    if isinstance(tree, ast.Module) and not tree.body:
        raise empty
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known = {*names, *FUNCTIONS, *dir(builtins), *(node.id for node in used if isinstance(node.ctx, ast.Store))}
    if unknown := [node.id for node in used if node.id not in known]:
        raise ValueError(
            f"{what} uses the name {unknown[0]}; there are {', '.join(sorted(names))}, and the functions "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
