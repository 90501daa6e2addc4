"""The kernels' own text, compiled by g++ behind ``host_shim.h``, and played over the words of a table.

A card's kernels (:class:`Kernel`) tell what they touch, by ``traces.h``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedopt.formats import Format
from pagedopt.kernels import cuda, source
from pagedopt.rules import Rule
from pagedopt.tables.layout import BLOCK, HostTable
from pagedopt.transports.by_value import StructTransport
from pagedopt.transports.transport import TABLE_AT
from tests.card.order import REGION, Range, Touched

#: No contraction of a * b + c: then the results are Numba's bit for bit. Squares, too, are the C library's pow, as in
#: Python.
#: Fibers jump between stacks, which the checks of ``_FORTIFY_SOURCE`` take for a mistake.
FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-fno-builtin-pow", "-U_FORTIFY_SOURCE")
#: They speak on stderr and go on.
CHECKS = "-fsanitize=alignment,bounds,shift,signed-integer-overflow"

HERE = Path(__file__).parent
Texts = tuple[str, ...]
Play = Callable[[np.ndarray, int, bool], None]


def kernel_text(kernel: str = "multi_tensor_apply.cu", formats: tuple[Format, ...] = ()) -> str:
    """The text NVRTC gets, with the shim in the place of device.cuh."""
    return on_host(source.text(None, formats, kernel))


def on_host(text: str) -> str:
    """CUDA text with the shim in the place of device.cuh."""
    device, rest = text.split('#line 1 "numbers.cuh"', 1)
    assert '#line 1 "device.cuh"' in device, "device.cuh no longer comes first"
    shim = (HERE / "host_shim.h").read_text()
    return f'#line 1 "host_shim.h"\n{shim}\n#line 1 "numbers.cuh"{rest}'


@functools.cache
def build(
    names: Texts, functors: Texts = (), kernel: str = "multi_tensor_apply.cu", formats: tuple[Format, ...] = ()
) -> list[Play]:
    """A function to play each of ``names`` (kernel instances); skips the test where there is no g++."""
    text = "\n".join([kernel_text(kernel, formats), *functors])
    library = built(text, names)
    return [functools.partial(_play, getattr(library, f"play_{i}")) for i in range(len(names))]


def built(text: str, names: Texts, traced: bool = False) -> ctypes.CDLL:
    """The library with a function ``play_i`` for each instance.  Without g++ a test is skipped, or fails in CI."""
    compiler = shutil.which("g++")
    if compiler is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("g++ is not installed")
    entries = [
        f'extern "C" bool play_{i}(const void* table, long long blocks, bool backwards) {{\n'
        f"    return fibers::play(blocks, BLOCK, backwards, [=] {{ {name}(*(const {_table_of(name)}*)table); }});\n}}\n"
        for i, name in enumerate(names)
    ]
    traces = [(HERE / "traces.h").read_text()] if traced else []
    return _library(compiler, "\n".join([*traces, text, '#line 1 "entries"', *entries]), traced)


def _table_of(name: str) -> str:
    if (own := {"prologue": "PrologueAt", "total": "TotalAt"}.get(name.partition("<")[0])) is not None:
        return own
    table = next(t for t in (*(f"TableOf<{n}>" for n in (4096, 32764)), "TableAt") if t in name)
    return f"Factored<{table}>" if "Factored" in name else table


def _library(compiler: str, text: str, traced: bool) -> ctypes.CDLL:
    """Compile once for all workers, and for later runs."""
    folder = Path(os.environ["PAGEDOPT_CACHE_DIR"]) / "host"
    folder.mkdir(parents=True, exist_ok=True)
    made_of = repr((text, traced, FLAGS, CHECKS, _version(compiler)))
    path = folder / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        own, source = path.with_suffix(f".{os.getpid()}"), path.with_suffix(f".{os.getpid()}.cpp")
        source.write_text(text)
        if traced:  # in two steps: the second would link a runtime that has to be there when a process starts
            made = path.with_suffix(f".{os.getpid()}.o")
            _compile(compiler, "-fsanitize=thread", "-c", str(source), "-o", str(made))
            _compile(compiler, str(made), "-o", str(own))
        else:
            _compile(compiler, CHECKS, str(source), "-o", str(own))
        os.replace(own, path)
    return ctypes.CDLL(str(path))


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _compile(compiler: str, *arguments: str) -> None:
    result = subprocess.run([compiler, *FLAGS, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


def _play(function: Any, argument: np.ndarray, blocks: int, backwards: bool) -> None:
    function.restype = ctypes.c_bool
    alive = function(ctypes.c_void_p(argument.ctypes.data), ctypes.c_longlong(blocks), ctypes.c_bool(backwards))
    assert alive, "a thread touched memory that is not there"


def table_at(table: HostTable) -> np.ndarray:
    """The argument that stands for a table in memory."""
    return np.array([(table.words.ctypes.data, table.header()[0])], TABLE_AT)


def launch(play: Play, table: HostTable, argument_bytes: int = 0, backwards: bool = False) -> int:
    """Play the kernel over the table as its transport would hand it over; returns the number of launches."""
    per_block = BLOCK // table.geometry.threads
    if not argument_bytes:
        play(table_at(table), -(-len(table.chunks) // per_block), backwards)
        return 1
    with StructTransport(0, argument_bytes).lend(table, 0) as lent:
        parts = list(lent.parts())
    for argument, count in parts:
        play(argument, -(-count // per_block), backwards)
    return len(parts)


def functors(rules: Iterable[Rule]) -> tuple[str, ...]:
    """The generated C++ of some rules."""
    return tuple(rule.cuda_source() for rule in rules)


class Kernel(cuda.CudaKernel):
    """In the place of a compiled kernel, on a card."""

    handle = 0

    def __init__(
        self,
        card: Any,
        text: str,
        name: str,
        device: int,
        chunks_per_block: int = 1,
        blocks: int | None = None,
        threads: int = BLOCK,
    ) -> None:
        self.card, self.name, self.what, self.library = card, name, name.partition("<")[0], _traced(text, name)
        self.handle = len(card.driver.functions) + 1
        card.driver.functions[self.handle] = self._as_node
        self.chunks_per_block, self.most_blocks, self.threads = chunks_per_block, blocks, threads

    def _kernel(self, grid: tuple[int], block: tuple[int], arguments: tuple[npt.NDArray[Any]], stream: Any) -> None:
        """A launch: the argument is passed now, all else is read when its turn comes."""
        self.card.order.submit(stream.ptr, self.what, functools.partial(self._work, arguments[0].copy(), grid[0]))

    def _as_node(self, argument: int, grid: int) -> tuple[str, Callable[[], Touched]]:
        nbytes = {"prologue": cuda.PROLOGUE_AT, "total": cuda.TOTAL_AT}.get(self.what, TABLE_AT).itemsize
        passed = np.frombuffer(ctypes.string_at(argument, nbytes), np.uint8).copy()
        return self.what, functools.partial(self._work, passed, grid)

    def _work(self, argument: npt.NDArray[Any], grid: int) -> Touched:
        memory, library = self.card.memory, self.library
        library.traces_between(ctypes.c_ulonglong(memory.base), ctypes.c_ulonglong(memory.base + REGION))
        _play(library.play_0, argument, grid, False)
        reads, writes = (_touched(f) for f in (library.traces_read, library.traces_written))
        memory.check(self.name, *reads, *writes)
        return reads, writes


@functools.cache
def _traced(text: str, name: str) -> ctypes.CDLL:
    return built(on_host(text), (name,), traced=True)


def _touched(function: Any) -> list[Range]:
    """The ranges of a list of ``traces.h``, in order, those that overlap or meet as one."""
    function.restype = ctypes.POINTER(ctypes.c_int64 * 3)
    address, count, _ = function().contents
    if not count:
        return []
    found = np.frombuffer((ctypes.c_int64 * (2 * count)).from_address(address), np.int64).reshape(-1, 2)
    found = found[np.argsort(found[:, 0], kind="stable")]
    first, end = found[:, 0], np.maximum.accumulate(found.sum(1))
    begins = np.flatnonzero(np.r_[True, first[1:] > end[:-1]])
    return list(zip(first[begins].tolist(), end[np.r_[begins[1:] - 1, len(end) - 1]].tolist(), strict=True))
