"""The CPU backend: Numba kernels that walk the words of a pointer table, on torch's threads.

For each rule and formats a small Python module is generated (``rule.numba_source()`` shows it).  Numba compiles it,
and later processes load the machine code from disk.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..system.compile_text import load
from ..system.internals import openmp
from ..tables.layout import HostTable, Span
from ..tables.storage import POSITION_WORDS, StorageFormat
from .cpu_text import TEAM_ENTRY, sample_source, source, sums_source
from .source import KernelRule


class Walk(NamedTuple):
    """The walk of a span of chunks: call ``walk``, then :meth:`check`; ``team``: the call on torch's team, if any."""

    walk: Callable[[], object]
    team: Call | None = None

    def check(self) -> None:
        """Raise MemoryError if a thread of the team ran out of memory: such a thread cannot raise itself."""
        if self.team is not None:
            self.team.check()


#: The walk of each span of chunks; None stands for all chunks.
Walks = dict[Span | None, Walk]


def sums_kernel(order: int, form: StorageFormat, threads: int) -> Callable[..., None]:
    """Return the kernel that adds the terms of a norm (order 0: infinity) of each chunk, over lists (tensor, sums).

    Args:
        threads: see :func:`sums_source`.
    """
    return _with_team_entry(_sums_kernel(order, form, threads))


@functools.cache
def _sums_kernel(order: int, form: StorageFormat, threads: int) -> Callable[..., None]:
    return _compiled(sums_source(order, form, threads), f"sums{order}_{threads}", 2, 0)


def kernel(rule: KernelRule, formats: tuple[StorageFormat, ...], scaled: bool = False) -> Callable[..., None]:
    """Return the compiled kernel for ``rule`` on lists in ``formats``, for :func:`run`.

    Args:
        scaled: whether gradients are multiplied by a factor (see ``factor.cuh``).
    """
    return _with_team_entry(_kernel(rule, formats, scaled))


@functools.cache
def _kernel(rule: KernelRule, formats: tuple[StorageFormat, ...], scaled: bool) -> Callable[..., None]:
    columns, uniforms = sum(len(f.columns) for f in formats), rule.uniform_count + scaled
    if not all(f.plain for f in formats):
        columns, uniforms = columns + POSITION_WORDS, uniforms + 1  # the element's position, and the seed
    return _compiled(source(rule, formats, scaled), rule.name, columns, uniforms)


def sample_kernel(form: StorageFormat) -> Callable[..., None]:
    """Return the compiled loop that loads and stores a few elements of ``form``."""
    kernel: Callable[..., None] = load(sample_source(form), "sample", "pagedopt.kernels.numba_numbers")
    return kernel


def _compiled(text: str, name: str, lists: int, uniforms: int) -> Callable[..., None]:
    """Load a kernel and call it without work, so that compiler errors come before a step has changed anything."""
    kernel: Callable[..., None] = load(text, name, "pagedopt.kernels.numba_numbers")
    kernel(*arguments_of(HostTable(lists, [1], uniforms)), 0, 0)
    return kernel


def _with_team_entry(kernel: Callable[..., None]) -> Callable[..., None]:
    """Compile the entry for teams too if torch uses several threads; not cached, as that number may change."""
    if torch.get_num_threads() > 1:
        team_entry()
    return kernel


def run(compiled: Callable[..., None], table: HostTable, span: Span | None = None) -> None:
    """Walk ``table``, or a span of its chunks; when this returns or raises, no thread uses the table any more."""
    found = walks(compiled, table, torch.get_num_threads(), (span,))[span]
    found.walk()
    found.check()


def walks(compiled: Callable[..., None], table: HostTable, count: int, spans: Iterable[Span | None] = ()) -> Walks:
    """Return the walk of a whole table on ``count`` threads (under None), and those of ``spans``.

    Errors before the walk are raised here.
    """
    team = team_entry() if count > 1 else None
    cached: _CachedWalks | None = table.walk
    if cached is None or cached.kernel is not compiled or cached.team != team or cached.threads != count:
        cached = _CachedWalks(compiled, team, count, {})
        cached.by_span[None] = _choose_walk(cached, table, None)
        table.walk = cached
    for span in spans:
        if span not in cached.by_span:
            cached.by_span[span] = _choose_walk(cached, table, span)
    return cached.by_span


class Entry(NamedTuple):
    """A walk of a whole table as one C call: ``function(call.address)``, on torch's team if it has several threads."""

    function: int
    call: Call
    threads: int


def entry(compiled: Callable[..., None], table: HostTable, count: int) -> Entry | None:
    """Return how compiled code walks all of a table on ``count`` threads; None: torch has no team that we know."""
    if (team := team_entry()) is None:
        return None
    if (call := walks(compiled, table, count)[None].team) is not None:
        return Entry(team, call, count)
    return Entry(team, Call(compiled, table, [(0, len(table.chunk_words))]), 1)


class _CachedWalks(NamedTuple):
    """The cached walks of a table with a kernel on some threads; ``team``: what :func:`team_entry` returned."""

    kernel: Callable[..., None]
    team: int | None
    threads: int
    by_span: Walks


def arguments_of(table: HostTable) -> tuple[Any, ...]:
    """Return the arguments of a kernel, without the bounds of the chunks."""
    return table.scalars, table.row_words, table.chunk_words, table.geometry.chunk_numel


def _choose_walk(cached: _CachedWalks, table: HostTable, span: Span | None) -> Walk:
    """Choose the team, of which a thread always gets the same span (its cache may hold it), or this thread alone."""
    first, last = span or (0, len(table.chunk_words))
    if cached.team is not None:
        spans = table.shares((first, last), cached.threads, MIN_ELEMENTS)
        if len(spans) > 1:
            call = Call(cached.kernel, table, spans)
            return Walk(call.on(cached.team, cached.threads), call)
    return Walk(functools.partial(cached.kernel, *arguments_of(table), first, last))


# --- torch's team of threads ------------------------------------------------------------------------------------------
#
# In a forked child, and with a build of torch that has no OpenMP for us, a kernel runs on the calling thread alone.
# After an operation the team busy-waits for milliseconds, so other threads would compete with it for the cores.  Waking
# the team takes a few microseconds, and its threads never enter Python.

#: Elements that justify waking one more thread.
MIN_ELEMENTS = 1 << 14


def team_entry() -> int | None:
    """Return the address of the entry for teams; None: torch has no team here.  The first call compiles it."""
    # A forked child has inherited OpenMP's record of a team, but not its threads: it would wait for them forever.
    return None if forked or openmp() is None else _team_entry()


@functools.cache
def _team_entry() -> int:
    from numba import types

    loaded = load(TEAM_ENTRY, "member", "pagedopt.kernels.numba_numbers")
    loaded.compile((types.int64,))
    (compiled,) = loaded.overloads.values()
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


@functools.cache
def _address(kernel: Any) -> int:
    """Return the address of a compiled kernel, which is called as Numba calls its functions."""
    (compiled,) = kernel.overloads.values()
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


class Call:
    """A kernel, its arguments, which the caller keeps alive, and a span for each thread, as words that a team reads."""

    def __init__(self, kernel: Callable[..., None], table: HostTable, spans: Sequence[Span]) -> None:
        found = openmp()
        assert found is not None, "there is an entry for teams, so there is a team"
        *arrays, chunk_numel = arguments_of(table)
        words = [found.thread_num, found.num_threads, len(spans), chunk_numel, 0]
        for array in arrays:
            words += array.ctypes.data, *array.shape
        self.words = np.array([*words, _address(kernel), spans[0][0], *(last for _, last in spans)], np.int64)
        self.address, self._parallel = self.words.ctypes.data, found.parallel

    def on(self, entry: int, count: int) -> Callable[[], object]:
        """Return what runs the entry at an address on a team of ``count`` threads; call :meth:`check` after it."""
        # Threads without a span return at once.  OpenMP would end them if we asked for a smaller team.
        return functools.partial(self._parallel, entry, self.address, count, 0)

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
