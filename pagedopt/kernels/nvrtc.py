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
    file = f"{key}.cubin"
    if (found := cache.find(file)) is not None:
        symbol, _, cubin = found.data.partition(b"\n")
        return cubin, symbol.decode()
    cubin, (made,) = compile_cuda(text, (name,), arch)
    cache.store(file, made.encode() + b"\n" + cubin)
    return cubin, made


@functools.cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(v) for v in nvrtc.nvrtcVersion())
