"""Registers of a kernel and the bytes that it spills, as NVRTC's assembler says them: no GPU is needed for that."""

from __future__ import annotations

import re
import time

from experiments.lab import Row, series

#: From this version on NVRTC keeps what it has compiled, and says nothing when it finds it again.
CACHES = (12, 9)
SAID = (
    r"entry function '{}'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers"
)


def registers(text: str, name: str, arch: str, *options: str) -> Row:
    """Of a kernel in a text: its registers, the bytes of stack that a thread has and of what it spills there (stores,
    loads), and the time that compiling the text took.

    Raises:
        RuntimeError: NVRTC refuses the text, or does not say what it made.
    """
    from cuda.bindings import nvrtc

    fresh = ["--no-cache"] if nvrtc.nvrtcVersion()[1:] >= CACHES else []
    given = [o.encode() for o in (f"--gpu-architecture={arch}", "--ptxas-options=--verbose", *fresh, *options)]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    begin = time.perf_counter()
    (code,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    seconds = time.perf_counter() - begin
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    said = re.search(SAID.format(name), log.decode(errors="replace"), re.DOTALL)
    if int(code) or said is None:
        raise RuntimeError(f"{code.name}, and of {name!r} it says: {log.decode(errors='replace')[-300:]}")
    nvrtc.nvrtcDestroyProgram(program)
    names = ("stack", "spill_stores", "spill_loads", "registers")
    return {**dict(zip(names, map(int, said.groups()), strict=True)), "compile_ms": series([1e3 * seconds], "wall")}
