"""Compile CUDA text with NVRTC (no nvcc needed); machine code is cached on disk between runs."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from ..system import cache
from ..system.libc import same_locale

#: No -ftz: denormal gradients are not flushed to zero, as in torch.  No contraction into FMA: the compiler fuses
#: different products in the vector loop and in its tail, so bits would depend on alignment and on page boundaries.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message contains its log."""


def compile_cuda(text: str, names: tuple[str, ...], arch: str) -> tuple[bytes, list[str]]:
    """Compile ``text`` for ``arch`` ("sm_90"); return the cubin, and a symbol for each C++ expression in ``names``."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{code.name} for {', '.join(names)}\n{log.decode(errors='replace').strip(chr(0))}")
        return values[0] if values else None

    program = nvrtc.nvrtcCreateProgram(text.encode(), b"pagedopt.cu", 0, [], [])[1]
    for name in names:
        check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    options = [o.encode() for o in (*OPTIONS, f"--gpu-architecture={arch}")]
    with same_locale():  # NVRTC 12.4 leaves the thread in the locale "C", where open() reads text as ASCII
        check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    symbols = [check(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in names]
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), symbols


def cached_cubin(text: str, name: str, arch: str) -> tuple[bytes, str]:
    """Return the compiled kernel and its symbol: found in the cache, or compiled now."""
    key = hashlib.sha256("\0".join((text, name, arch, *OPTIONS, _nvrtc_version())).encode()).hexdigest()[:32]
    if found := _find_cubin(key):
        return found
    cubin, (symbol,) = compile_cuda(text, (name,), arch)
    mark, note = cache.digest(symbol, cubin), f"{key}.sealed"
    if cache.store(_cubin_file(key, mark), cubin) is not None:
        cache.store(note, cache.seal(note, f"{symbol} {mark}".encode()))
    return cubin, symbol


def _find_cubin(key: str) -> tuple[bytes, str] | None:
    """Return the cubin of an earlier run and its symbol, if both are undamaged."""
    if (note := cache.find(f"{key}.sealed")) is None or (text := cache.unseal(note)) is None:
        return None
    symbol, mark = text.decode().split()
    if (cubin := cache.find(_cubin_file(key, mark))) is None:
        return None
    if cache.digest(symbol, cubin.data) != mark:
        cache.discard(cubin.path, "it is damaged")
        return None
    return cubin.data, symbol


def _cubin_file(key: str, mark: str) -> str:
    """Return a name with a digest, so that each note matches its own cubin when two processes compile at once."""
    return f"{key}-{mark[:16]}.cubin"


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(v) for v in nvrtc.nvrtcVersion())
