"""Pointwise kernels as text, in three languages, and the lecture's ``func3``: two of them pasted to one.

A kernel loads ``x``, computes ``y`` and stores it.  To paste is to leave out the store of the first and the load of the
second: ``x = y`` stands there.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

#: Statements: a local name, or y, and what it is.
Body = Sequence[tuple[str, str]]
Launch = Callable[[torch.Tensor, torch.Tensor, float], None]
NUMBA, TRITON, CUDA = LANGUAGES = "Numba", "Triton", "CUDA C++"
#: What is left for each thread of a single block of Triton's.
MOST = 1024
HEADS = {
    NUMBA: ["def {name}(inp, out, n, a):", "    for i in range(n):", "        x = inp[i]"],
    TRITON: [
        "import triton", "import triton.language as tl", "@triton.jit",
        "def {name}(inp, out, n, a, BLOCK: tl.constexpr):", "        i = tl.arange(0, BLOCK)",
        "        x = tl.load(inp + i, i < n, other=0.0).to(tl.float32)",
    ],
    CUDA: [
        "template <class T> __device__ float sum(const T* inp, long long n) {{",
        "    float total = 0; for (long long k = 0; k < n; ++k) total += inp[k]; return total; }}",
        'extern "C" __global__ void {name}(const {inp}* inp, {out}* out, long long n, float a) {{',
        "    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;", "    if (i < n) {{",
        "        float x = inp[i], y;",
    ],
}  # fmt: skip
TAILS = {
    NUMBA: ["        out[i] = y"],
    TRITON: ["        tl.store(out + i, y, i < n)"],
    CUDA: ["        out[i] = y;", "    }}", "}}"],
}
#: What stands for the sum of all that is read, and for its last element but i.
SUM, MIRRORED = "SUM", "MIRRORED"
ATOMS = {
    NUMBA: {SUM: "inp.sum()", MIRRORED: "inp[n - 1 - i]"},
    TRITON: {SUM: "tl.sum(tl.load(inp + i, i < n, other=0.0), 0)", MIRRORED: "tl.load(inp + n - 1 - i, i < n)"},
    CUDA: {SUM: "sum(inp, n)", MIRRORED: "inp[n - 1 - i]"},
}
TYPES = {torch.float32: "float", torch.int32: "int"}
LOADS, STORES = re.compile(r"^\s+(float )?x = "), re.compile(r"out\[i\] = |tl\.store\(")


def text(language: str, name: str, body: Body, inp: torch.dtype, out: torch.dtype) -> list[str]:
    """The lines of a kernel."""
    lines = []
    for left, right in body:
        for atom, written in ATOMS[language].items():
            right = right.replace(atom, written)
        declared = f"float {left}" if language == CUDA and left != "y" else left
        lines.append(f"        {declared} = {right}{';' if language == CUDA else ''}")
    known = {"name": name, "inp": TYPES[inp], "out": TYPES[out]}
    return [
        *(line.format(**known) for line in HEADS[language]),
        *lines,
        *(line.format(**known) for line in TAILS[language]),
    ]


def paste(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The lines of a kernel that does what the first does, and to its result what the second does."""
    stored = next(i for i, line in enumerate(first) if STORES.search(line))
    loaded = next(i for i, line in enumerate(second) if LOADS.search(line))
    glue = "        x = y;" if first[stored].endswith(";") else "        x = y"
    return [*first[:stored], glue, *second[loaded + 1 :]]


def compiled(language: str, lines: Sequence[str], name: str) -> Launch:
    """A launch of the kernel; over up to :data:`MOST` elements.

    Raises:
        Exception: whatever the compiler says, here or at the first launch.
    """
    written = "\n".join(lines) + "\n"
    if language == NUMBA:
        known: dict[str, Any] = {}
        exec(written, known)
        numba, numpy = importlib.import_module("numba"), importlib.import_module("numpy")
        loop = numba.njit(known[name])
        return lambda inp, out, a: loop(inp.numpy(), out.numpy(), inp.numel(), numpy.float32(a))
    if language == TRITON:
        kernel = getattr(_module(written), name)
        return lambda inp, out, a: kernel[(1,)](inp, out, inp.numel(), a, BLOCK=MOST)
    cupy, numpy = importlib.import_module("cupy"), importlib.import_module("numpy")
    raw = cupy.RawKernel(written, name, options=("-fmad=false",))

    def launch(inp: torch.Tensor, out: torch.Tensor, a: float) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            raw((MOST // 256,), (256,), (inp.data_ptr(), out.data_ptr(), inp.numel(), numpy.float32(a)))

    return launch


def _module(written: str) -> Any:
    """Triton reads the source of a kernel from its file."""
    path = Path(tempfile.mkdtemp(prefix="pagedopt-pasted-")) / "pasted.py"
    path.write_text(written)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
