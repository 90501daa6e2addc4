"""Kernel text, compilation and loading: NVRTC for CUDA (no nvcc needed), kept on disk between runs."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from ..system import cache
from ..tables.layout import BLOCK
from .rule import KernelRule

CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_bits",
    torch.bfloat16: "bfloat16_bits",
}
#: -ftz is left off: denormal gradients stay what they are, as in torch.  No contraction: left to itself, the compiler
#: fuses other products in the vector loop than in its tail, and bits would depend on alignment and on the cut of pages.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


@functools.cache
def _text(name: str) -> str:
    body = importlib.resources.files(__package__).joinpath(name).read_text()
    return f'#line 1 "{name}"\n{body}'


def source(rule: KernelRule | None, kernel: str = "multi_tensor_apply.cu") -> str:
    """The whole CUDA text of ``kernel``, headers joined in (a cache keyed by text then sees every change)."""
    parts = [_text(name) for name in ("device.cuh", "numbers.cuh", "table.cuh", kernel)]
    if rule is not None:
        parts.append(f'#line 1 "rule {rule.name}"\n{rule.cuda_source()}')
    return "\n".join(parts)


def arithmetic(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype a kernel computes in: float64 if any list has it, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def table_type(argument_bytes: int) -> str:
    """The C++ type of the kernel's argument."""
    return f"TableOf<{argument_bytes}>" if argument_bytes else "TableAt"


def instance(
    rule: KernelRule, dtypes: tuple[torch.dtype, ...], threads: int, argument_bytes: int, small_grid: bool = False
) -> str:
    """The C++ name of one variant of the multi-tensor kernel."""
    kernel = "multi_tensor_apply_small_grid" if small_grid else "multi_tensor_apply"
    types = ", ".join(CUDA_TYPES[d] for d in dtypes)
    number = CUDA_TYPES[arithmetic(dtypes)]
    return f"{kernel}<{number}, {rule.functor}, {threads}, {table_type(argument_bytes)}, {types}>"


def compile_cuda(text: str, names: tuple[str, ...], arch: str) -> tuple[bytes, list[str]]:
    """Compile ``text`` for ``arch`` ("sm_90").

    Returns:
        the cubin and, for each of ``names`` (C++ expressions), the symbol to load.

    Raises:
        CompileError: with NVRTC's log.
    """
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            size = nvrtc.nvrtcGetProgramLogSize(program)[1]
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{code.name} for {', '.join(names)}\n{log.decode(errors='replace').strip(chr(0))}")
        return values[0] if values else None

    program = nvrtc.nvrtcCreateProgram(text.encode(), b"pagedopt.cu", 0, [], [])[1]
    for name in names:
        check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    options = [o.encode() for o in (*OPTIONS, f"--gpu-architecture={arch}")]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    symbols = [check(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in names]
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), symbols


def cached_cubin(text: str, name: str, arch: str) -> tuple[Path, str]:
    """The file with the compiled kernel and its symbol: compiled now, or found from an earlier run."""
    key = hashlib.sha256("\0".join((text, name, arch, *OPTIONS, _nvrtc_version())).encode()).hexdigest()[:32]
    if found := _kept_cubin(key):
        return found
    cubin, (symbol,) = compile_cuda(text, (name,), arch)
    mark = cache.digest(symbol, cubin)
    path = cache.keep(_cubin_file(key, mark), cubin)
    if path is None:
        return cache.in_memory(cubin), symbol
    note = f"{key}.sealed"
    cache.keep(note, cache.seal(note, f"{symbol} {mark}".encode()))
    return path, symbol


def _kept_cubin(key: str) -> tuple[Path, str] | None:
    """What an earlier run has kept, if it is whole."""
    note = cache.find(f"{key}.sealed")
    text = None if note is None else cache.unseal(note)
    if text is None:
        return None
    symbol, mark = text.decode().split()
    cubin = cache.find(_cubin_file(key, mark))
    if cubin is None:
        return None
    if cache.digest(symbol, cubin.data) != mark:
        cache.discard(cubin.path, "it is damaged")
        return None
    return cubin.path, symbol


def _cubin_file(key: str, mark: str) -> str:
    """Named after what is in it: two processes may compile at once, and a note goes with its own cubin."""
    return f"{key}-{mark[:16]}.cubin"


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(v) for v in nvrtc.nvrtcVersion())


class CudaKernel:
    """A compiled kernel on one device: a CuPy RawKernel with one argument, the table."""

    def __init__(self, text: str, name: str, device: int, chunks_per_block: int = 1, blocks: int | None = None) -> None:
        import cupy

        from ..system.driver import relaxed_capture

        major, minor = torch.cuda.get_device_capability(device)
        path, symbol = cached_cubin(text, name, f"sm_{major}{minor}")
        with torch.cuda.device(device), relaxed_capture():
            self._kernel = cupy.RawModule(path=str(path)).get_function(symbol)
            self._kernel.compile()  # load now: a module cannot be loaded while a graph is captured
        self.chunks_per_block, self.most_blocks = chunks_per_block, blocks

    def __call__(self, argument: npt.NDArray[Any], count: int, stream: Stream) -> None:
        """Launch over ``count`` chunks; ``argument`` (an array of size one, best without fields) travels by value."""
        blocks = -(-count // self.chunks_per_block)
        if self.most_blocks is not None:
            blocks = min(blocks, self.most_blocks)
        self._kernel((blocks,), (BLOCK,), (argument,), stream=stream)


class Stream:
    """The one attribute CuPy asks of a stream."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


def cuda_kernel(
    rule: KernelRule,
    dtypes: tuple[torch.dtype, ...],
    threads: int,
    argument_bytes: int,
    device: int,
    blocks: int | None = None,
) -> CudaKernel:
    """The multi-tensor kernel for a rule, ready to launch on a device (on at most ``blocks`` thread blocks).

    Raises:
        CompileError, TypeError: a dtype is not supported.
        RuleError: the rule is no longer what was translated.
    """
    rule.check()
    return _cuda_kernel(rule, dtypes, threads, argument_bytes, device, blocks)


@functools.cache
def _cuda_kernel(
    rule: KernelRule,
    dtypes: tuple[torch.dtype, ...],
    threads: int,
    argument_bytes: int,
    device: int,
    blocks: int | None,
) -> CudaKernel:
    name = instance(rule, dtypes, threads, argument_bytes, small_grid=blocks is not None)
    return CudaKernel(source(rule), name, device, BLOCK // threads, blocks)


@functools.cache
def norm_kernel(
    stage: str, order: int, dtype: torch.dtype, number: torch.dtype, threads: int, argument_bytes: int, device: int
) -> CudaKernel:
    """A stage of the norm (``chunks``, ``rows``) that reads or writes ``dtype`` and computes in ``number``."""
    types = f"{threads}, {table_type(argument_bytes)}, {CUDA_TYPES[dtype]}"
    name = f"norm_{stage}<{CUDA_TYPES[number]}, {order}, {types}>"
    return CudaKernel(source(None, "norm.cu"), name, device, BLOCK // threads)


def cpu_kernel(rule: KernelRule, dtypes: tuple[torch.dtype, ...]) -> Callable[..., None]:
    """The Numba kernel for a rule: walks a table, or a span of its chunks, on all of torch's threads.

    Raises:
        RuleError: the rule is no longer what was translated.
    """
    rule.check()
    return _cpu_kernel(rule, dtypes)


@functools.cache
def _cpu_kernel(rule: KernelRule, dtypes: tuple[torch.dtype, ...]) -> Callable[..., None]:
    from . import cpu

    return functools.partial(cpu.run, cpu.kernel(rule, dtypes))


__all__ = [
    "CompileError",
    "CudaKernel",
    "Stream",
    "arithmetic",
    "cpu_kernel",
    "cuda_kernel",
    "instance",
    "norm_kernel",
    "source",
]
