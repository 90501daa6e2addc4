"""Where the tensors of a list lie now.  A step asks this of every tensor it is about to use, so it is asked in bulk."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from ..system.reader import Reader

Addresses = npt.NDArray[np.uint64]

_address = torch.Tensor.data_ptr
_reader: Reader | None = None
#: Below so many tensors Python is as fast as the reader.
_FEW = 16


def gather(tensors: Sequence[torch.Tensor], checked: bool = False) -> Addresses:
    """The address of every tensor; 0 of one without elements or memory.

    Args:
        checked: these are tensors of kinds whose addresses were read before; only such can be read in bulk.
    """
    if _reader is None or not checked or len(tensors) < _FEW:
        return np.array(list(map(_address, tensors)), np.uint64)
    at = np.empty(len(tensors), np.uint64)
    tensors = tuple(tensors)
    _reader.read(ids(tensors), at)
    return at


def ids(items: tuple[object, ...]) -> npt.NDArray[np.int64]:
    """``id`` of each, in one go: CPython keeps a tuple's items behind its header.  A view: keep the tuple alive."""
    return memory_at(id(items) + tuple.__basicsize__, 8 * len(items), np.int64)


def same_objects(items: tuple[object, ...], others: tuple[object, ...]) -> bool:
    """Whether two tuples have the very same items, whatever their ``==`` says."""
    if len(items) < _FEW:
        return len(items) == len(others) and all(map(operator.is_, items, others))
    return _identities(items) == _identities(others)


def _identities(items: tuple[object, ...]) -> bytes:
    """:func:`ids` as a value to compare."""
    return ctypes.string_at(id(items) + tuple.__basicsize__, 8 * len(items))


def memory_at(address: int, nbytes: int, dtype: type) -> npt.NDArray[Any]:
    """Memory of this process as an array, which does not keep it alive."""
    if not nbytes:
        return np.empty(0, dtype)
    return np.frombuffer(_bytes(nbytes.bit_length()).from_address(address), dtype, nbytes // np.dtype(dtype).itemsize)


@functools.cache
def _bytes(bits: int) -> Any:
    """ctypes takes longer to make a type of arrays than all else here, and leaves memory behind: one does for many."""
    return ctypes.c_char * (1 << bits)


class Places:
    """The addresses of a fixed list of tensors, which it keeps alive.

    Args:
        tensors: the tensors.
        at: where they lie, if that is known already.
    """

    __slots__ = ("_asked", "_objects", "at", "tensors")  # there are some for each optimizer, of which there may be many

    def __init__(self, tensors: tuple[torch.Tensor, ...], at: Addresses | None = None) -> None:
        self.tensors = tensors
        self.at = gather(tensors) if at is None else at
        self._objects: npt.NDArray[np.int64] | None = None
        self._asked = 0

    def same(self) -> bool:
        """Whether every tensor lies where it did."""
        if self._objects is not None and _reader is not None:
            return _reader.same(self._objects, self.at)
        self._asked += 1
        if len(self.tensors) >= _FEW and (self._asked > 1 or not self.tensors[0].is_cuda):
            _load_reader()  # takes a moment: not in the first step on a GPU; on a CPU the kernels need Numba anyway
            self._objects = ids(self.tensors)
        return list(map(_address, self.tensors)) == self.at.tolist()


def _load_reader() -> None:
    global _reader
    if _reader is None:
        from ..system.reader import reader

        _reader = reader()
