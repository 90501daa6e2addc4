"""The threads of torch's OpenMP: a kernel runs on the team on which torch's own operations run.

For milliseconds after an operation that team waits in a loop, so threads of another kind would have to share its cores.
To wake it takes a few microseconds, and none of its threads ever sees Python.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..system.numba.compile_text import keep

#: Elements for which one more thread is worth waking.
LEAST = 1 << 14

#: What a generated module has beside its ``kernel``; the words are those of :class:`Call`.
MEMBER = '''

@_njit(error_model="numpy", nogil=True)
def member(_call):
    """What each thread of a team does: of n threads that have come, every n-th stretch."""
    _words = _carray(_pointer(_call), 14, _np.int64)
    _scalars = _carray(_pointer(_words[5]), (_words[6], _words[7]), _np.float64)
    _rows = _carray(_pointer(_words[8]), (_words[9], _words[10]), _np.int64)
    _chunks = _carray(_pointer(_words[11]), (_words[12], _words[13]), _np.int64)
    _bounds = _carray(_pointer(_call + 8 * 14), _words[2] + 1, _np.int64)
    for _i in range(_asked(_words[0]), _words[2], _asked(_words[1])):
        try:
            kernel(_scalars, _rows, _chunks, _words[3], _bounds[_i], _bounds[_i + 1])
        except Exception:
            _words[4] = 1
'''


class _OpenMP(NamedTuple):
    """``GOMP_parallel(function, argument, threads, flags)``, and the addresses of two functions for its threads."""

    parallel: Any
    thread_num: int
    num_threads: int


@functools.cache
def _openmp() -> _OpenMP | None:
    """None where torch has no OpenMP, or one that does not speak as GCC's does."""
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD)
        parallel, asked = torchs.GOMP_parallel, (torchs.omp_get_thread_num, torchs.omp_get_num_threads)
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return _OpenMP(parallel, *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in asked))


#: By kernel, the address of what a thread of a team does.
_members: dict[Callable[..., None], int] = {}


def prepare(kernel: Callable[..., None]) -> None:
    """Compile what a generated module has for a team beside its ``kernel``."""
    if kernel in _members or _forked or _openmp() is None:
        return
    from numba import types

    member = keep(sys.modules[kernel.__module__], "member")
    member.compile((types.int64,))
    (compiled,) = member.overloads.values()
    _members[kernel] = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


def member(kernel: Callable[..., None]) -> int | None:
    """What ``kernel`` is to a team; None where no team can take it.

    In a forked child none can: it has the memory of its parent's team and not the threads, for which it would wait.
    """
    return None if _forked else _members.get(kernel)


class Call:
    """A kernel's arguments and the stretches of one call, as words that a team reads.

    Args:
        arguments: what a kernel takes before the first and the last chunk; they must stay alive.
        stretches: as many as threads that are to work.
    """

    def __init__(self, arguments: Sequence[Any], stretches: Sequence[tuple[int, int]]) -> None:
        openmp = _openmp()
        assert openmp is not None, "there is a member, so there is a team"
        *arrays, chunk_numel = arguments
        words = [openmp.thread_num, openmp.num_threads, len(stretches), chunk_numel, 0]
        for array in arrays:
            words += array.ctypes.data, *array.shape
        bounds = [stretches[0][0], *(last for _, last in stretches)]
        self.words = np.array([*words, *bounds], np.int64)
        self._at, self._parallel = self.words.ctypes.data, openmp.parallel

    def on(self, member: int, count: int) -> Callable[[], object]:
        """What lets the ``count`` threads of the team do it; :meth:`check` comes behind it.  Those of them that have no
        stretch come and go: a smaller team would end them."""
        return functools.partial(self._parallel, member, self._at, count, 0)

    def check(self) -> None:
        """
        Raises:
            MemoryError: a thread found none since this was asked last.
        """
        if self.words[4]:
            self.words[4] = 0
            raise MemoryError("a thread of a CPU kernel found no memory")


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
