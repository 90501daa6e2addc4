"""The CPU backend: Numba kernels that walk the words of a pointer table, on torch's threads.

In a forked child, and with a build of torch that has no OpenMP for us, a kernel runs on the calling thread alone.

For each rule and formats a small Python module is generated (``rule.numba_source()`` shows it).  Numba compiles it,
and later processes load the machine code from disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..system.compile_text import load
from ..tables.layout import HostTable, Span
from ..tables.storage import POSITION_WORDS, StorageFormat
from . import cpu_text, team
from .kernel_rule import KernelRule


class Walk(NamedTuple):
    """The walk of a span of chunks: call ``walk``, then :meth:`check`; ``team``: the call on torch's team, if any."""

    walk: Callable[[], object]
    team: team.Call | None = None

    def check(self) -> None:
        """Raise MemoryError if a thread of the team ran out of memory: such a thread cannot raise itself."""
        if self.team is not None:
            self.team.check()


#: The walk of each span of chunks; None stands for all chunks.
Walks = dict[Span | None, Walk]


def sums_kernel(order: int, form: StorageFormat, threads: int) -> Callable[..., None]:
    """Return the kernel that adds the terms of a norm (order 0: infinity) of each chunk, over lists (tensor, sums).

    Args:
        threads: see :func:`~pagedopt.kernels.cpu_text.sums_source`.
    """
    return _for_threads(_sums_kernel(order, form, threads))


@functools.cache
def _sums_kernel(order: int, form: StorageFormat, threads: int) -> Callable[..., None]:
    return _compiled(cpu_text.sums_source(order, form, threads), f"sums{order}_{threads}", 2, 0)


def kernel(rule: KernelRule, formats: tuple[StorageFormat, ...], scaled: bool = False) -> Callable[..., None]:
    """Return the compiled kernel for ``rule`` on lists in ``formats``, for :func:`run`.

    Args:
        scaled: whether gradients are multiplied by a factor (see ``factor.cuh``).
    """
    return _for_threads(_kernel(rule, formats, scaled))


@functools.cache
def _kernel(rule: KernelRule, formats: tuple[StorageFormat, ...], scaled: bool) -> Callable[..., None]:
    columns, uniforms = sum(len(f.columns) for f in formats), rule.uniform_count + scaled
    if not all(f.plain for f in formats):
        columns, uniforms = columns + POSITION_WORDS, uniforms + 1  # the element's position, and the seed
    return _compiled(cpu_text.source(rule, formats, scaled), rule.name, columns, uniforms)


def sample_kernel(form: StorageFormat) -> Callable[..., None]:
    """Return the compiled loop that loads and stores a few elements of ``form``."""
    kernel: Callable[..., None] = load(cpu_text.sample_source(form), "sample", "pagedopt.kernels.numba_numbers")
    return kernel


def _compiled(text: str, name: str, lists: int, uniforms: int) -> Callable[..., None]:
    """Load a kernel and call it without work, so that compiler errors come before a step has changed anything."""
    kernel: Callable[..., None] = load(text, name, "pagedopt.kernels.numba_numbers")
    kernel(*arguments_of(HostTable(lists, [1], uniforms)), 0, 0)
    return kernel


def _for_threads(kernel: Callable[..., None]) -> Callable[..., None]:
    """Compile the entry for teams too if torch uses several threads; not cached, as that number may change."""
    if torch.get_num_threads() > 1:
        team.prepare(kernel)
    return kernel


def run(compiled: Callable[..., None], table: HostTable, span: Span | None = None) -> None:
    """Walk ``table``, or a span of its chunks; when this returns or raises, no thread uses the table any more."""
    found = walks(compiled, table, (span,), torch.get_num_threads())[span]
    found.walk()
    found.check()


def whole(compiled: Callable[..., None], table: HostTable, count: int) -> Walk:
    """Return the walk of a whole table on ``count`` threads; what can fail before the walk, fails here."""
    return _cached_walks(compiled, table, count).by_span[None]


def walks(compiled: Callable[..., None], table: HostTable, spans: Iterable[Span | None], count: int) -> Walks:
    """Return the walk of each of ``spans``, and of the whole table."""
    cached = _cached_walks(compiled, table, count)
    for span in spans:
        if span not in cached.by_span:
            cached.by_span[span] = _choose_walk(cached, table, span)
    return cached.by_span


class Entry(NamedTuple):
    """A walk of a whole table as one C call: ``function(call.address)``, on torch's team if it has several threads."""

    function: int
    call: team.Call
    threads: int


def entry(compiled: Callable[..., None], table: HostTable, count: int) -> Entry | None:
    """Return how compiled code walks all of a table on ``count`` threads; None: torch has no team that we know."""
    team.prepare(compiled)
    if (member := team.member(compiled)) is None:
        return None
    if (call := whole(compiled, table, count).team) is not None:
        return Entry(member, call, count)
    return Entry(member, team.Call(arguments_of(table), [(0, len(table.chunk_words))]), 1)


class _CachedWalks(NamedTuple):
    """The cached walks of a table with a kernel on some threads; ``member``: the kernel's entry for teams."""

    kernel: Callable[..., None]
    member: int | None
    threads: int
    by_span: Walks


def _cached_walks(compiled: Callable[..., None], table: HostTable, count: int) -> _CachedWalks:
    member = team.member(compiled) if count > 1 else None
    cached: _CachedWalks | None = table.walk
    if cached is None or cached.kernel is not compiled or cached.member != member or cached.threads != count:
        cached = _CachedWalks(compiled, member, count, {})
        cached.by_span[None] = _choose_walk(cached, table, None)
        table.walk = cached
    return cached


def arguments_of(table: HostTable) -> tuple[Any, ...]:
    """Return the arguments of a kernel, without the bounds of the chunks."""
    return table.scalars, table.row_words, table.chunk_words, table.geometry.chunk_numel


def _choose_walk(cached: _CachedWalks, table: HostTable, span: Span | None) -> Walk:
    """Choose the team, of which a thread always gets the same span (its cache may hold it), or this thread alone."""
    first, last = span or (0, len(table.chunk_words))
    arguments = arguments_of(table)
    if cached.member is not None:
        spans = table.shares((first, last), cached.threads, team.MIN_ELEMENTS)
        if len(spans) > 1:
            call = team.Call(arguments, spans)
            return Walk(call.on(cached.member, cached.threads), call)
    return Walk(functools.partial(cached.kernel, *arguments, first, last))
