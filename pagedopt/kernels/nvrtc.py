"""NVRTC: CUDA text to machine code, with no nvcc, kept on disk between runs."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from ..system import cache
from ..system.files.libc import same_locale

#: -ftz is left off: denormal gradients stay what they are, as in torch.  No contraction: left to itself, the compiler
#: fuses other products in the vector loop than in its tail, and bits would depend on alignment and on the cut of pages.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


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
    with same_locale():  # NVRTC 12.4 leaves the thread in "C", where open() takes every text for ASCII
        compiled = nvrtc.nvrtcCompileProgram(program, len(options), options)
    check(compiled)
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
