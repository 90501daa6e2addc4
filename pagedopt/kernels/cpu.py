"""The CPU twin: Numba kernels that walk the same words of the same table, on torch's threads.

For each rule and formats the text of a small Python module is made and run; what Numba compiles of it is kept on disk,
and the next process loads it.  Read one with ``rule.numba_source()``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..system.numba_text import load
from ..tables.format import PLACES, Format
from ..tables.layout import HostTable, Span
from . import cpu_text, team, threads
from .rule import KernelRule

#: Stretches of work per thread of our own: enough that a late thread holds nobody up.
SHARES = 8
#: Elements for which one more thread of our own is worth waking.
LEAST = 1 << 17

#: The module that generated ones call into.
_NUMBERS = "pagedopt.kernels.numba_numbers"


def norm_kernel(form: Format, number: torch.dtype, order: int) -> Callable[..., None]:
    """The kernel that leaves one partial norm per chunk (order 0: infinity) over lists (tensor, partials)."""
    return _for_threads(_norm_kernel(form, number, order))


@functools.cache
def _norm_kernel(form: Format, number: torch.dtype, order: int) -> Callable[..., None]:
    return _compiled(load(cpu_text.norm_source(form, number, order), f"norm{order}", _NUMBERS), 2, 0)


def kernel(rule: KernelRule, formats: tuple[Format, ...]) -> Callable[..., None]:
    """The compiled kernel for ``rule`` on lists in ``formats``, for :func:`run`."""
    return _for_threads(_kernel(rule, formats))


@functools.cache
def _kernel(rule: KernelRule, formats: tuple[Format, ...]) -> Callable[..., None]:
    words, numbers = sum(len(f.columns) for f in formats), rule.uniform_count
    if not all(f.plain for f in formats):
        words, numbers = words + PLACES, numbers + 1  # where an element stands, and the seed
    return _compiled(load(cpu_text.source(rule, formats), rule.name, _NUMBERS), words, numbers)


def _compiled(kernel: Callable[..., None], lists: int, uniforms: int) -> Callable[..., None]:
    """``kernel`` after a call without work: what can go wrong in a compiler goes wrong before a step has begun."""
    kernel(*_walk(HostTable(lists, [1], uniforms)).arguments, 0, 0)
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
    walk: _Walk = table.walk or _walk(table)
    first, last = span or (0, len(table.chunk_words))
    if last - first <= 1:
        compiled(*walk.arguments, first, last)
        return
    count = torch.get_num_threads()
    member = team.member(compiled) if count > 1 else None
    key = (compiled, member, count, span)
    if (way := walk.ways.get(key)) is None:
        way = walk.ways[key] = _way(compiled, member, walk.arguments, table, span, count)
    way()


class _Walk(NamedTuple):
    """What is worked out once for a table.

    Attributes:
        arguments: what a kernel takes before the first and the last chunk.
        ways: by kernel, what it is to a team, number of threads and span of the chunks (None: all): what to call.
    """

    arguments: tuple[Any, ...]
    ways: dict[tuple[Callable[..., None], int | None, int, Span | None], Callable[[], None]]


def _walk(table: HostTable) -> _Walk:
    walk = table.walk = _Walk((table.scalars, table.row_words, table.chunk_words, table.geometry.chunk_numel), {})
    return walk


def _way(
    compiled: Callable[..., None],
    member: int | None,
    arguments: tuple[Any, ...],
    table: HostTable,
    span: Span | None,
    count: int,
) -> Callable[[], None]:
    """How to walk: on this thread alone; on a team, of whose threads each has one stretch and the same in every step,
    which its cache may still hold; or on threads of our own, of which each takes what is left."""
    each, least = (SHARES, LEAST // SHARES) if member is None else (1, team.LEAST)
    whole = span or (0, len(table.chunks))
    stretches = table.shares(whole, count * each, least)
    if len(stretches) <= each:
        return functools.partial(compiled, *arguments, *whole)
    if member is None:
        walk = functools.partial(compiled, *arguments)
        return functools.partial(threads.run, walk, stretches, -(-len(stretches) // each))
    return functools.partial(team.Call(arguments, stretches).run, member, count)
