"""The CPU twin: Numba kernels that walk the same words of the same table, on all of torch's threads.

For each rule and formats the text of a small Python module is made and run; what Numba compiles of it is kept on disk,
and the next process loads it.  Read one with ``rule.numba_source()``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..system.numba_text import load
from ..tables.format import PLACES, Format
from ..tables.layout import HostTable, Span
from . import cpu_text, threads
from .rule import KernelRule

#: Stretches of work per thread: enough that a late thread holds nobody up.
SHARES = 8
#: Elements below which one thread is faster alone.
LEAST = 1 << 15

#: The module that generated ones call into.
_NUMBERS = "pagedopt.kernels.numba_numbers"


@functools.cache
def norm_kernel(form: Format, number: torch.dtype, order: int) -> Callable[..., None]:
    """The kernel that leaves one partial norm per chunk (order 0: infinity) over lists (tensor, partials)."""
    return _compiled(load(cpu_text.norm_source(form, number, order), f"norm{order}", _NUMBERS), 2, 0)


@functools.cache
def kernel(rule: KernelRule, formats: tuple[Format, ...]) -> Callable[..., None]:
    """The compiled kernel for ``rule`` on lists in ``formats``, for :func:`run`."""
    words, numbers = sum(len(f.columns) for f in formats), rule.uniform_count
    if not all(f.plain for f in formats):
        words, numbers = words + PLACES, numbers + 1  # where an element stands, and the seed
    return _compiled(load(cpu_text.source(rule, formats), rule.name, _NUMBERS), words, numbers)


def _compiled(kernel: Callable[..., None], lists: int, uniforms: int) -> Callable[..., None]:
    """``kernel`` after a call without work: what can go wrong in a compiler goes wrong before a step has begun."""
    kernel(*_walk(HostTable(lists, [1], uniforms)).arguments, 0, 0)
    return kernel


def run(compiled: Callable[..., None], table: HostTable, span: Span | None = None) -> None:
    """Walk ``table``, or a span of its chunks, with ``compiled`` on as many threads as torch uses.

    When it returns or raises, no thread is in the table any more.
    """
    walk = _walks.get(table) or _walk(table)
    first, last = span or (0, len(table.chunks))
    if last - first <= 1:
        compiled(*walk.arguments, first, last)
        return
    count = torch.get_num_threads()
    if (shares := walk.shares.get((span, count))) is None:
        shares = walk.shares[span, count] = _shares(table, span, count)
    if len(shares) == 1:
        compiled(*walk.arguments, *shares[0])
    else:
        threads.run(functools.partial(compiled, *walk.arguments), shares, count)


class _Walk(NamedTuple):
    """What is worked out once for a table.

    Attributes:
        arguments: what a kernel takes before the first and the last chunk.
        shares: for a span of the chunks (None: all) and a number of threads, the stretches they take.
    """

    arguments: tuple[Any, ...]
    shares: dict[tuple[Span | None, int], list[Span]]


_walks: WeakKeyDictionary[HostTable, _Walk] = WeakKeyDictionary()


def _walk(table: HostTable) -> _Walk:
    chunks = table.chunks.view(np.int64).reshape(-1, 2)
    walk = _walks[table] = _Walk((table.scalars, table.row_words, chunks, table.geometry.chunk_numel), {})
    return walk


def _shares(table: HostTable, span: Span | None, count: int) -> list[Span]:
    """One where one thread is as fast, else so many that a late thread holds nobody up."""
    first, last = span or (0, len(table.chunks))
    work = (last - first) * min(table.geometry.chunk_numel, max(1, int(table.rows["numel"].max(initial=0))))
    alone = count == 1 or last - first <= 1 or work < LEAST
    return [(first, last)] if alone else table.shares((first, last), count * SHARES)
