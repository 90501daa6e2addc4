"""The CPU backend: Numba kernels that walk the words of a pointer table, on torch's threads.

For each rule and formats a small Python module is generated (``rule.numba_source()`` shows it).  Numba compiles it,
and later processes load the machine code from disk.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..system.compile_text import load, shared, with_disk_cache
from ..tables.layout import HostTable, Span
from ..tables.storage import POSITION_WORDS, Column, StorageFormat, words_of
from .source import KernelRule, arithmetic


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
    return _for_threads(_sums_kernel(order, form, threads))


@functools.cache
def _sums_kernel(order: int, form: StorageFormat, threads: int) -> Callable[..., None]:
    return _compiled(sums_source(order, form, threads), f"sums{order}_{threads}", 2, 0)


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


def _for_threads(kernel: Callable[..., None]) -> Callable[..., None]:
    """Compile the entry for teams too if torch uses several threads; not cached, as that number may change."""
    if torch.get_num_threads() > 1:
        prepare(kernel)
    return kernel


def run(compiled: Callable[..., None], table: HostTable, span: Span | None = None) -> None:
    """Walk ``table``, or a span of its chunks; when this returns or raises, no thread uses the table any more."""
    found = walks(compiled, table, torch.get_num_threads(), (span,))[span]
    found.walk()
    found.check()


def walks(compiled: Callable[..., None], table: HostTable, count: int, spans: Iterable[Span | None] = ()) -> Walks:
    """Return the walk of a whole table on ``count`` threads (under None), and those of ``spans``.

    What can fail before a walk, fails here.
    """
    member = member_of(compiled) if count > 1 else None
    cached: _CachedWalks | None = table.walk
    if cached is None or cached.kernel is not compiled or cached.member != member or cached.threads != count:
        cached = _CachedWalks(compiled, member, count, {})
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
    prepare(compiled)
    if (member := member_of(compiled)) is None:
        return None
    if (call := walks(compiled, table, count)[None].team) is not None:
        return Entry(member, call, count)
    return Entry(member, Call(arguments_of(table), [(0, len(table.chunk_words))]), 1)


class _CachedWalks(NamedTuple):
    """The cached walks of a table with a kernel on some threads; ``member``: the kernel's entry for teams."""

    kernel: Callable[..., None]
    member: int | None
    threads: int
    by_span: Walks


def arguments_of(table: HostTable) -> tuple[Any, ...]:
    """Return the arguments of a kernel, without the bounds of the chunks."""
    return table.scalars, table.row_words, table.chunk_words, table.geometry.chunk_numel


def _choose_walk(cached: _CachedWalks, table: HostTable, span: Span | None) -> Walk:
    """Choose the team, of which a thread always gets the same span (its cache may hold it), or this thread alone."""
    first, last = span or (0, len(table.chunk_words))
    arguments = arguments_of(table)
    if cached.member is not None:
        spans = table.shares((first, last), cached.threads, MIN_ELEMENTS)
        if len(spans) > 1:
            call = Call(arguments, spans)
            return Walk(call.on(cached.member, cached.threads), call)
    return Walk(functools.partial(cached.kernel, *arguments, first, last))


# --- torch's team of threads ------------------------------------------------------------------------------------------
#
# In a forked child, and with a build of torch that has no OpenMP for us, a kernel runs on the calling thread alone.
# After an operation the team busy-waits for milliseconds, so other threads would compete with it for the cores.  Waking
# the team takes a few microseconds, and its threads never enter Python.

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


def member_of(kernel: Callable[..., None]) -> int | None:
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


# --- the text of kernels ----------------------------------------------------------------------------------------------

_MODULE = '''\
"""Generated by pagedopt from the rule {name!r}; do not edit."""
import numpy as _np
from numba import carray as _carray, njit as _njit
from pagedopt.kernels import numba_numbers as _numbers
from pagedopt.kernels.numba_numbers import {functions}asked as _asked, pointer as _pointer

S = _np.{number}

{formats}
@_njit(error_model="numpy", nogil=True)
def kernel(_scalars, _rows, _chunks, _chunk_numel, _first, _last):
    for _item in range(_first, _last):
        _row, _offset = _chunks[_item, 0], _chunks[_item, 1]
        _numel = min(_rows[_row, {lists}] - _offset, _chunk_numel)
        if _numel <= 0:
            continue
{body}
'''


#: The gradient among the lists of a rule.
_GRAD = 1
#: Statements that compute the factor of gradients: its address is a number of each set, behind the rule's.
_FACTOR = """\
_at = _scalars.view(_np.int64)[0, {at}]
_words, _halves = _carray(_pointer(_at), 3, _np.float64), _carray(_pointer(_at + 24), 2, _np.float32)
_factor = S(_words[0] / _np.float64(_halves[0]))"""


def source(rule: KernelRule, formats: tuple[StorageFormat, ...], scaled: bool = False) -> str:
    """Return the Python text of the kernel for ``rule`` on lists in ``formats``.

    Args:
        scaled: whether gradients are multiplied by a factor (see ``factor.cuh``).
    """
    if not all(f.plain for f in formats):
        return _source_of_blocks(rule, formats, scaled)
    arrays, loads, stores = [], [], []
    for i, form in enumerate(formats):
        arrays.append(_array(i, form.columns[0], form.numba_type))
        loads.append(form.numba_load.format(f"_p{i}[_i]"))
        stores.append(f"_p{i}[_i] = " + form.numba_store)
    uniforms = _uniforms(rule, len(formats), scaled)
    if scaled:
        loads[_GRAD] = f"({loads[_GRAD]}) * _factor"
    lines = [
        *uniforms,
        *arrays,
        "for _i in range(_numel):",
        *_indented(rule.numba_lines(loads, stores, _rounded(formats))),
    ]
    return _module(rule.name, len(formats), arithmetic(formats), lines)


def _rounded(formats: tuple[StorageFormat, ...]) -> list[Callable[[str], str]]:
    """Return a function for each list: the text of a number → that of the number after a store and a load."""
    return [lambda text, f=f: f.numba_load.format(f.numba_store.format(text)) for f in formats]  # type: ignore[misc]


def _uniforms(rule: KernelRule, lists: int, scaled: bool) -> list[str]:
    """Return statements that read the hyperparameters of the row's set, and the factor of gradients."""
    read = [f"u{i} = S(_scalars[_rows[_row, {lists + 1}], {i}])" for i in range(rule.uniform_count)]
    return read + (_FACTOR.format(at=rule.uniform_count).splitlines() if scaled else [])


def _array(word: int, column: Column, dtype: str) -> str:
    """Return the statement that makes ``_p{word}``: a chunk's entries of the column at that word of the row."""
    if column.per == 1:
        begin, count = f"_offset * {column.dtype.itemsize}", "_numel"
    else:
        begin = f"_offset // {column.per} * {column.dtype.itemsize}"
        count = f"(_numel + {column.per - 1}) // {column.per}"
    return f"_p{word} = _carray(_pointer(_rows[_row, {word}] + {begin}), {count}, {dtype})"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


_BLOCK_FUNCTION = """\
import numpy as np
from numba import njit as _njit
from pagedopt.kernels.numba_numbers import {functions}asked as _asked

S = np.{number}

@_njit(error_model="numpy", nogil=True)
def function({arguments}):
{body}
"""


def _source_of_blocks(rule: KernelRule, formats: tuple[StorageFormat, ...], scaled: bool) -> str:
    """Do the same as :func:`source` for formats with blocks: load each block into an array, update it, and store it."""
    block, number = max(f.at_once for f in formats), arithmetic(formats)
    found: list[list[str]] = [[] for _ in range(6)]
    arrays, loads, stores, before, after, functions = found
    words = words_of([len(f.columns) for f in formats])
    for i, (form, (word, *_)) in enumerate(zip(formats, words, strict=True)):
        if form.plain:
            arrays.append(_array(word, form.columns[0], form.numba_type))
            # A slice from 0 on: with an index that may be negative the loop would not become one over vectors.
            before.append(f"_q{word} = _p{word}[_b : _b + _live]")
            loads.append(form.numba_load.format(f"_q{word}[_i]"))
            stores.append(f"_q{word}[_i] = " + form.numba_store)
        else:
            columns = [*zip(words[i], form.columns, strict=True)]
            arrays += [_array(at, column, _entry_type(column)) for at, column in columns]
            arrays.append(f"_x{i} = _np.zeros({block}, S)")
            loads.append(f"_x{i}[_i]")
            stores.append(f"_x{i}[_i] = S({{}})")
            if i in rule.reads:
                functions.append(_block_function(f"_load{i}", form, form.numba_load, number))
                before += _block_calls(f"_load{i}", i, words[i], form)
            if i in rule.writes:
                functions.append(_block_function(f"_store{i}", form, form.numba_store, number))
                after += _block_calls(f"_store{i}", i, words[i], form)
    place = sum(map(len, words))
    lists = place + POSITION_WORDS
    if scaled:
        loads[_GRAD] = f"({loads[_GRAD]}) * _factor"
    lines = [
        *_uniforms(rule, lists, scaled),
        f"_parameter, _index = _rows[_row, {place}], _rows[_row, {place + 1}] + _offset",
        f"_seed = int(_scalars[_rows[_row, {lists + 1}], {rule.uniform_count + scaled}])",
        *arrays,
        f"for _b in range(0, _numel, {block}):",
        *_indented([f"_live = min({block}, _numel - _b)", *before]),
        *_indented(["for _i in range(_live):", *_indented(rule.numba_lines(loads, stores, _rounded(formats))), *after]),
    ]
    return _module(rule.name, lists, number, lines, "".join(functions))


def _entry_type(column: Column) -> str:
    """Return the NumPy type of an entry; unsigned integers for 8- and 16-bit floats, which Numba lacks."""
    if column.dtype.is_floating_point and column.dtype.itemsize < 4:
        return f"_np.uint{8 * column.dtype.itemsize}"
    return f"_np.{_name(column.dtype)}"


def _block_function(name: str, form: StorageFormat, text: str, number: torch.dtype) -> str:
    """Return the statement that imports a function of a format, which all kernels share."""
    columns = [column.name or "elements" for column in form.columns]
    body = textwrap.indent(textwrap.dedent(text).strip("\n"), "    ")
    arguments = ", ".join(["x", *columns, "live", "row", "index", "seed", "input"])
    function = _BLOCK_FUNCTION.format(functions=_functions(body), number=_name(number), arguments=arguments, body=body)
    module = shared(function, columns[0], "pagedopt.kernels.numba_numbers")
    return f"from {module} import function as {name}\n"


def _block_calls(name: str, i: int, words: list[int], form: StorageFormat) -> list[str]:
    """Return statements that call a format's function for each of its blocks among the elements from ``_b`` on."""
    columns = [
        f"_p{word}[_b + _k :]" if c.per == 1 else f"_p{word}[(_b + _k) // {c.per} :]"
        for word, c in zip(words, form.columns, strict=True)
    ]
    where = f"min({form.at_once}, _live - _k), _parameter, _index + _b + _k, _seed, {i}"
    return [f"for _k in range(0, _live, {form.at_once}):", f"    {name}(_x{i}[_k:], {', '.join(columns)}, {where})"]


_SUMS_LINES = """\
_x = _carray(_pointer(_rows[_row, 0] + _offset * {itemsize}), _numel, {dtype})
_total = _carray(_pointer(_rows[_row, 1] + _offset // _chunk_numel * 8), 1, S)
_sums = _np.zeros({sums}, S)
for _first in range(0, _numel, {sums}):
    _part = _x[_first : _first + {sums}]
    for _j in range(len(_part)):
        value = {load}
        _sums[_j] = {add_term}
_left = {sums}
while _left > 1:
    _left //= 2
    for _j in range(_left):
        _sums[_j] = {add_neighbours}
_total[0] = _sums[0]"""
#: The term of an element by the order of a norm, and how terms are added; order 0: infinity.
_TERMS = {0: "abs(value)", 1: "abs(value)", 2: "value * value"}
_ADD = {0: "element_max({}, {})", 1: "{} + {}", 2: "{} + {}"}


def sums_source(order: int, form: StorageFormat, threads: int) -> str:
    """Return the Python text of the kernel for :func:`sums_kernel`: that of ``sums.cu``.

    Args:
        threads: that share a chunk on a GPU, which decides the order in which terms are added.
    """
    itemsize, add = form.columns[0].dtype.itemsize, _ADD[order].format
    lines = _SUMS_LINES.format(
        itemsize=itemsize, dtype=form.numba_type, sums=threads * 16 // itemsize,
        load=form.numba_load.format("_part[_j]"),
        add_term=add("_sums[_j]", _TERMS[order]), add_neighbours=add("_sums[2 * _j]", "_sums[2 * _j + 1]"),
    )  # fmt: skip
    return _module(f"sums{order}_{threads}", 2, torch.float64, lines.splitlines())


_SAMPLE = """\
import numpy as _np
from numba import njit as _njit
from pagedopt.kernels import numba_numbers as _numbers
from pagedopt.kernels.numba_numbers import {functions}asked as _asked

S = _np.{number}

@_njit(error_model="numpy")
def kernel(_entries, _loaded, _stored):
    for _i in range(len(_entries)):
        _loaded[_i] = {load}
        _stored[_i] = {store}
"""


def sample_source(form: StorageFormat) -> str:
    """Return the Python text of a kernel that loads entries of a plain format, and stores again what it has loaded."""
    load, store = form.numba_load.format("_entries[_i]"), form.numba_store.format("_loaded[_i]")
    functions, number = _functions(f"{load} {store}"), _name(form.arithmetic)
    return _SAMPLE.format(functions=functions, number=number, load=load, store=store)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _functions(text: str) -> str:
    """Return the functions of ``numba_numbers`` that a generated text calls, as its import statement lists them."""
    calls = re.findall(r"\b(element_\w+|float_of|bits_of)\(", text)
    return "".join(f"{f}, " for f in sorted(set(calls)))


def _module(name: str, lists: int, number: torch.dtype, lines: list[str], formats: str = "") -> str:
    """Return a module whose kernel runs ``lines`` for every chunk; ``formats`` defines functions that they call."""
    functions = _functions("\n".join([formats, *lines]))
    body = "\n".join(" " * 8 + line for line in lines)
    text = _MODULE.format(name=name, functions=functions, number=_name(number), lists=lists, body=body, formats=formats)
    return text + MEMBER
