"""Run a kernel on torch's OpenMP threads, the "team" that runs torch's own operations.

After an operation the team busy-waits for milliseconds, so other threads would compete with it for the cores.  Waking
the team takes a few microseconds, and its threads never enter Python.
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

from ..system.compile_text import with_disk_cache
from ..tables.layout import Span

#: Elements that justify waking one more thread.
MIN_ELEMENTS = 1 << 14

#: The second function of a generated module: the entry for teams.  :class:`Call` writes the words that it reads.
MEMBER = '''

@_njit(error_model="numpy", nogil=True)
def member(_call):
    """The work of one thread of a team: with n threads running, every n-th span."""
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
def openmp() -> _OpenMP | None:
    """Return torch's OpenMP; None where torch has none, or one without GCC's interface."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD)
        parallel, numbers = library.GOMP_parallel, (library.omp_get_thread_num, library.omp_get_num_threads)
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return _OpenMP(parallel, *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in numbers))


#: The address of each kernel's compiled ``member``.
_members: dict[Callable[..., None], int] = {}


def prepare(kernel: Callable[..., None]) -> None:
    """Compile the ``member`` of the generated module that defines ``kernel``."""
    if kernel in _members or forked or openmp() is None:
        return
    from numba import types

    member = with_disk_cache(sys.modules[kernel.__module__], "member")
    member.compile((types.int64,))
    (compiled,) = member.overloads.values()
    _members[kernel] = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


def member(kernel: Callable[..., None]) -> int | None:
    """Return the address of the kernel's entry for teams, if there is one."""
    # A forked child has inherited OpenMP's record of a team, but not its threads: it would wait for them forever.
    return None if forked else _members.get(kernel)


class Call:
    """A kernel's arguments, which the caller keeps alive, and a span for each thread, as words that a team reads."""

    def __init__(self, arguments: Sequence[Any], spans: Sequence[Span]) -> None:
        found = openmp()
        assert found is not None, "there is a member, so there is a team"
        *arrays, chunk_numel = arguments
        words = [found.thread_num, found.num_threads, len(spans), chunk_numel, 0]
        for array in arrays:
            words += array.ctypes.data, *array.shape
        self.words = np.array([*words, spans[0][0], *(last for _, last in spans)], np.int64)
        self.address, self._parallel = self.words.ctypes.data, found.parallel

    def on(self, member: int, count: int) -> Callable[[], object]:
        """Return the function that runs ``member`` on a team of ``count`` threads; call :meth:`check` after it."""
        # Threads without a span return at once.  OpenMP would end them if we asked for a smaller team.
        return functools.partial(self._parallel, member, self.address, count, 0)

    def check(self) -> None:
        """Raise MemoryError if a thread has run out of memory since the last check."""
        if self.words[4]:
            self.words[4] = 0
            raise MemoryError("a thread of a CPU kernel found no memory")


#: Whether this process is a fork: it has inherited OpenMP's record of a team, but not its threads.
forked = False


def _after_fork() -> None:
    global forked
    forked = True


os.register_at_fork(after_in_child=_after_fork)
