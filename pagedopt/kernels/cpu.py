"""The CPU twin: Numba kernels that walk the same words of the same table, on torch's threads.

For each rule and formats the text of a small Python module is made and run; what Numba compiles of it is kept on disk,
and the next process loads it.  Read one with ``rule.numba_source()``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..paging.visits import Action, Launch
from ..system.numba.compile_text import load
from ..tables.layout import HostTable, Span
from ..tables.storage import PLACES, StorageFormat
from . import cpu_text, team, threads
from .kernel_rule import KernelRule

#: Stretches of work per thread of our own: enough that a late thread holds nobody up.
SHARES = 8
#: Elements for which one more thread of our own is worth waking.
LEAST = 1 << 17


class Way(NamedTuple):
    """How to walk a span of a table's chunks.

    Attributes:
        walk: does it.
        team: the threads that do; None: what fails there is raised by ``walk``.
    """

    walk: Callable[[], object]
    team: team.Call | None = None

    def check(self) -> None:
        """Call it when :attr:`walk` has returned.

        Raises:
            MemoryError: a thread of the team found none.
        """
        if self.team is not None:
            self.team.check()


#: By span of the chunks; None: all.
Ways = dict[Span | None, Way]

#: The module that generated ones call into.
_NUMBERS = "pagedopt.kernels.numba_numbers"


def norm_kernel(form: StorageFormat, number: torch.dtype, order: int) -> Callable[..., None]:
    """The kernel that leaves one partial norm per chunk (order 0: infinity) over lists (tensor, partials)."""
    return _for_threads(_norm_kernel(form, number, order))


@functools.cache
def _norm_kernel(form: StorageFormat, number: torch.dtype, order: int) -> Callable[..., None]:
    return _compiled(load(cpu_text.norm_source(form, number, order), f"norm{order}", _NUMBERS), 2, 0)


def kernel(rule: KernelRule, formats: tuple[StorageFormat, ...]) -> Callable[..., None]:
    """The compiled kernel for ``rule`` on lists in ``formats``, for :func:`run`."""
    return _for_threads(_kernel(rule, formats))


@functools.cache
def _kernel(rule: KernelRule, formats: tuple[StorageFormat, ...]) -> Callable[..., None]:
    words, numbers = sum(len(f.columns) for f in formats), rule.uniform_count
    if not all(f.plain for f in formats):
        words, numbers = words + PLACES, numbers + 1  # where an element stands, and the seed
    return _compiled(load(cpu_text.source(rule, formats), rule.name, _NUMBERS), words, numbers)


def _compiled(kernel: Callable[..., None], lists: int, uniforms: int) -> Callable[..., None]:
    """``kernel`` after a call without work: what can go wrong in a compiler goes wrong before a step has begun."""
    kernel(*arguments_of(HostTable(lists, [1], uniforms)), 0, 0)
    return kernel


def _for_threads(kernel: Callable[..., None]) -> Callable[..., None]:
    """``kernel``, and what a team needs of it compiled where there is more than one thread."""
    if torch.get_num_threads() > 1:
        team.prepare(kernel)
    return kernel


def run(compiled: Callable[..., None], table: HostTable, span: Span | None = None) -> None:
    """Walk ``table``, or a span of its chunks, with ``compiled`` on as many of torch's threads as the work is worth.

    When it returns or raises, no thread is in the table any more.
    """
    count = torch.get_num_threads()
    way = whole(compiled, table, count) if span is None else ways(compiled, table, (Launch(span),), count)[span]
    way.walk()
    way.check()


def whole(compiled: Callable[..., None], table: HostTable, count: int) -> Way:
    """What to call to walk all of a table on ``count`` threads; all that the call needs is there then."""
    return _walk(compiled, table, count).whole


def ways(compiled: Callable[..., None], table: HostTable, steps: Iterable[Action], count: int) -> Ways:
    """The same for the span of each launch among some steps."""
    walk = _walk(compiled, table, count)
    if walk.ways is None:
        walk = table.walk = walk._replace(ways={None: walk.whole})
    found: Ways = walk.ways or {}
    for step in steps:
        if type(step) is Launch and (span := step.span) not in found:
            found[span] = _way(walk, table, span or (0, len(table.chunk_words)))
    return found


class _Walk(NamedTuple):
    """What is worked out once for a table.

    Attributes:
        by: the kernel.
        member: what it is to a team; None: it has none.
        threads: how many.
        whole: how to walk all of it.
        ways: by span, what to call; None: no span was asked for.
    """

    by: Callable[..., None]
    member: int | None
    threads: int
    whole: Way
    ways: Ways | None = None


def _walk(compiled: Callable[..., None], table: HostTable, count: int) -> _Walk:
    member = team.member(compiled) if count > 1 else None
    walk: _Walk | None = table.walk
    if walk is None or walk.by is not compiled or walk.member != member or walk.threads != count:
        way = _way(_Walk(compiled, member, count, _NO_WAY), table, (0, len(table.chunk_words)))
        walk = table.walk = _Walk(compiled, member, count, way)
    return walk


_NO_WAY = Way(bool)


def arguments_of(table: HostTable) -> tuple[Any, ...]:
    """What a kernel takes before the first and the last chunk."""
    return table.scalars, table.row_words, table.chunk_words, table.geometry.chunk_numel


def _way(walk: _Walk, table: HostTable, span: Span) -> Way:
    """How to walk: on this thread alone; on a team, of whose threads each has one stretch and the same in every step,
    which its cache may still hold; or on threads of our own, of which each takes what is left."""
    each, least = (SHARES, LEAST // SHARES) if walk.member is None else (1, team.LEAST)
    arguments = arguments_of(table)
    alone = Way(functools.partial(walk.by, *arguments, *span))
    if walk.threads == 1 or span[1] - span[0] <= 1:
        return alone
    stretches = table.shares(span, walk.threads * each, least)
    if len(stretches) <= each:
        return alone
    if walk.member is None:
        some = functools.partial(walk.by, *arguments)
        return Way(functools.partial(threads.run, some, stretches, -(-len(stretches) // each)))
    call = team.Call(arguments, stretches)
    return Way(call.on(walk.member, walk.threads), call)
