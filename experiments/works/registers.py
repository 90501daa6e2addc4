"""Registers of a kernel and the bytes that it spills, as NVRTC's assembler says them: no GPU is needed for that."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from experiments.harness.rows import Row
from experiments.harness.time import series

FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def compiled(text: str, name: str, defines: Mapping[str, int], arch: str) -> tuple[bytes, Row]:
    """The cubin of a text; and of one kernel in it the registers, the bytes of stack that a thread has and of what it
    spills there (stores, loads), with the time that compiling all of it took.

    Raises:
        RuntimeError: NVRTC refuses the text, or does not say what it made.
    """
    from cuda.bindings import nvrtc

    def call(function: Any, *arguments: Any) -> Any:
        code, *values = function(*arguments)
        if int(code):
            raise RuntimeError(f"{function.__name__}: {code.name}: {read_log()[-300:]}")
        return values[0] if values else None

    def read_log() -> str:
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.decode(errors="replace").strip("\0")

    program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])[1]
    options = [f"--gpu-architecture={arch}", "--ptxas-options=--verbose", *(f"-D{k}={v}" for k, v in defines.items())]
    begin = time.perf_counter()
    call(nvrtc.nvrtcCompileProgram, program, len(options), [option.encode() for option in options])
    seconds = time.perf_counter() - begin
    cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
    call(nvrtc.nvrtcGetCUBIN, program, cubin)
    log = read_log()
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), {**said(log, name), "compile_ms": series([1e3 * seconds], "wall")}


def said(log: str, name: str) -> Row:
    """What the assembler's log says of a kernel.

    Raises:
        RuntimeError: it says nothing of it.
    """
    _, _, own = log.partition(f"Compiling entry function '{name}'")
    frame, used = FRAME.search(own), USED.search(own)
    if frame is None or used is None:
        raise RuntimeError(f"the assembler says nothing of {name!r}: {log[-300:]}")
    stack, stores, loads = map(int, frame.groups())
    return {"registers": int(used[1]), "stack": stack, "spill_stores": stores, "spill_loads": loads}
