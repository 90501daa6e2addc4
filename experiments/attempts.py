"""What happens if a list of pointers is handed to a kernel in the obvious ways?  Each in a process of its own.

The lecture's attempts, for real: a ``std::vector`` as argument, a host ``float**``, a struct beyond the limit, and the
limit itself, found by search.  An attempt that crashes or leaves a CUDA context broken breaks only its own process.

Background: kernel parameters were limited to 4,096 bytes until CUDA 12.1 (PTX ISA 8.1) and to 32,764 since, on Volta
and later (https://developer.nvidia.com/blog/cuda-12-1-supports-large-kernel-parameters/).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCH = "sm_90"
ROOT = Path(__file__).resolve().parents[1]
#: The child's last line starts with this.
MARK = "outcome: "

VECTOR = """\
#include <vector>
__global__ void fill(std::vector<float*> list) { *list[threadIdx.x] = 1.0f; }
"""
BY_VALUE = """\
template <int N> struct List { float* item[N]; };
template <int N> __global__ void sum(const __grid_constant__ List<N> list, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) atomicAdd(out, *list.item[i]);
}
template <int N> struct Arguments { float* item[N]; float* out; };
template <int N> __global__ void sum_all(const __grid_constant__ Arguments<N> a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) atomicAdd(a.out, *a.item[i]);
}
template <int N> __global__ void alone(const __grid_constant__ List<N> list) {
    if (threadIdx.x < N) *list.item[threadIdx.x] = 1.0f;
}
"""
HOST_LIST = """\
struct Arguments { float** list; long long count; float* out; };
__global__ void sum_list(const __grid_constant__ Arguments a) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) atomicAdd(a.out, *a.list[i]);
}
"""
#: A kernel as a compiler before CUDA 12.1 would hand it to the assembler.
OLD_PTX = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .align 8 .b8 list[{nbytes}]) {{ ret; }}
"""


class LeftOut(Exception):
    """This attempt needs something that is not here."""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high) with ``fits(n)``, where ``fits(low)`` holds and ``fits`` never turns true again."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def vector_nvcc() -> str:
    """The whole toolkit knows std::vector, whose members are host functions."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise LeftOut("nvcc is not on the PATH (NVRTC's answer is shown)")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vector.cu").write_text(VECTOR)
        command = [compiler, "-std=c++17", f"-arch={ARCH}", "-cubin", "-o", "vector.cubin", "vector.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())
    return "compiled"


def vector_nvrtc() -> str:
    """NVRTC has no standard library at all."""
    return _compile(VECTOR, "fill")


def struct_too_large() -> str:
    """One pointer more than fits in 32,764 bytes."""
    return _compile(BY_VALUE, "alone<4096>")


def limit_today() -> str:
    """Search with NVRTC for the largest struct of pointers that compiles."""
    count = largest(lambda n: _compiles(f"alone<{n}>"), 1, 1 << 16)
    beside = largest(lambda n: _compiles(f"sum<{n}>"), 1, 1 << 16)
    return f"{count:,} pointers ({8 * count:,} bytes) alone, {beside:,} beside one other pointer argument"


def limit_before_12_1() -> str:
    """Search with the assembler under the rules of PTX ISA 8.0."""
    assembler = shutil.which("ptxas")
    if assembler is None:
        raise LeftOut("ptxas is not on the PATH, and NVRTC cannot be told to emit an older PTX version")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "old.ptx"

        def fits(count: int) -> bool:
            path.write_text(OLD_PTX.format(nbytes=8 * count))
            command = [assembler, "--gpu-name", ARCH, "-o", os.devnull, str(path)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        count = largest(fits, 1, 1 << 16)
    return (
        f"the assembler takes {count:,} pointers ({8 * count:,} bytes: 4,096 and 256 more); "
        f"the documented 4,096 bytes hold {4096 // 8}"
    )


def host_list() -> str:
    """The kernel follows an address of ordinary host memory."""
    import numpy as np

    torch = _cuda()
    values, addresses = _values(torch, 1000)
    table = np.array(addresses, np.uint64)  # pageable host memory
    out = torch.zeros(1, device="cuda")
    argument = np.zeros(1, [("list", np.uint64), ("count", np.int64), ("out", np.uint64)])
    argument["list"], argument["count"], argument["out"] = table.ctypes.data, len(table), out.data_ptr()
    _launch(HOST_LIST, "sum_list", argument, len(table))
    torch.cuda.synchronize()
    return f"the GPU reads ordinary host memory here (HMM or ATS); sum is {_right(out, values)}"


def launch_full_struct() -> str:
    """As many pointers as the limit allows, by value, in one launch."""
    import numpy as np

    torch = _cuda()
    values, addresses = _values(torch, 4094)
    out = torch.zeros(1, device="cuda")
    argument = np.zeros(1, [("item", np.uint64, (4094,)), ("out", np.uint64)])
    argument["item"][0], argument["out"] = addresses, out.data_ptr()
    _launch(BY_VALUE, "sum_all<4094>", argument, 4094)
    torch.cuda.synchronize()
    return f"4,094 pointers and one for the result in {argument.itemsize:,} bytes; sum is {_right(out, values)}"


def foreach_norm(count: int) -> str:
    """torch._foreach_norm, which once put 422 result pointers into a struct and crashed beyond (pytorch#118604)."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = list(torch.rand(count, 6, device=device).unbind())
    norms = torch.stack(torch._foreach_norm(tensors, 2))
    torch.testing.assert_close(norms, torch.linalg.vector_norm(torch.stack(tensors), dim=1))
    return f"{count} norms, all right, on {device} (torch {torch.__version__})"


@dataclass(frozen=True)
class Attempt:
    """What to try, and whether it ought to fail."""

    title: str
    run: Callable[[], str]
    fails: bool


ATTEMPTS: dict[str, Attempt] = {
    "vector_nvcc": Attempt("std::vector as argument, nvcc", vector_nvcc, True),
    "vector_nvrtc": Attempt("std::vector as argument, NVRTC", vector_nvrtc, True),
    "host_list": Attempt("float** in host memory", host_list, True),
    "struct_too_large": Attempt("struct of 4,096 pointers (32,768 bytes)", struct_too_large, True),
    "limit_before_12_1": Attempt("most pointers by value, PTX ISA 8.0", limit_before_12_1, False),
    "limit_today": Attempt("most pointers by value, this NVRTC", limit_today, False),
    "launch_full_struct": Attempt("struct of 4,095 pointers, launched", launch_full_struct, False),
    "foreach_norm_423": Attempt("torch._foreach_norm of 423 tensors", lambda: foreach_norm(423), False),
    "foreach_norm_424": Attempt("torch._foreach_norm of 424 tensors", lambda: foreach_norm(424), False),
}


def run_all(names: Sequence[str] = tuple(ATTEMPTS), timeout: float = 120) -> list[dict[str, Any]]:
    """Try each in a child process; returns its name, title, outcome ("works", "fails", "left out"), message."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda name: _in_child(name, timeout), names))


def _in_child(name: str, timeout: float) -> dict[str, Any]:
    attempt = ATTEMPTS[name]
    command = [sys.executable, "-m", "experiments.attempts", "--child", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        outcome, message = "fails", f"no answer in {timeout:.0f} s"
    else:
        last = (done.stdout.strip().splitlines() or [""])[-1]
        if last.startswith(MARK):
            outcome, message = json.loads(last[len(MARK) :])
        else:
            tail = "\n".join(done.stderr.strip().splitlines()[-3:])
            outcome, message = "fails", f"the process ended with {done.returncode}\n{tail}"
    expected = "fails" if attempt.fails else "works"
    return {
        "name": name, "title": attempt.title, "outcome": outcome, "message": message,
        "as_expected": outcome in (expected, "left out"),
    }  # fmt: skip


def _child(name: str) -> None:
    """Try, print the outcome and leave without cleaning up: a CUDA context may be beyond it."""
    try:
        outcome = ("works", ATTEMPTS[name].run())
    except LeftOut as error:
        outcome = ("left out", str(error))
    except Exception as error:
        outcome = ("fails", f"{type(error).__name__}: {error}"[:1500])
    print(MARK + json.dumps(outcome), flush=True)
    os._exit(0)


def _compile(text: str, name: str) -> str:
    from pagedopt.kernels.nvrtc import CompileError, compile_cuda

    try:
        compile_cuda(text, (name,), ARCH)
    except CompileError:
        raise
    except (ImportError, RuntimeError) as error:  # cuda-bindings raises the second where the library is missing
        raise LeftOut(f"NVRTC is not installed ({error}); pip install 'pagedopt[test]'") from error
    return "compiled"


def _compiles(name: str) -> bool:
    from pagedopt.kernels.nvrtc import CompileError

    try:
        _compile(BY_VALUE, name)
    except CompileError:
        return False
    return True


def _cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise LeftOut("needs a GPU")
    return torch


def _values(torch: Any, count: int) -> tuple[Any, list[int]]:
    """Random whole numbers on the GPU, whose float sum is exact in any order, and the address of each."""
    values = torch.randint(1, 100, (count,), device="cuda").float()
    return values, [values.data_ptr() + 4 * i for i in range(count)]


def _right(out: Any, values: Any) -> str:
    if out.item() != values.sum().item():
        raise AssertionError(f"wrong: {out.item()} instead of {values.sum().item()}")
    return "right"


def _launch(text: str, name: str, argument: Any, count: int) -> None:
    import torch

    from pagedopt.kernels.cuda import CudaKernel, Stream
    from pagedopt.tables.layout import BLOCK
    from pagedopt.transports.transport import opaque

    device = torch.cuda.current_device()
    stream = Stream(torch.cuda.current_stream().cuda_stream)
    CudaKernel(text, name, device, chunks_per_block=BLOCK)(opaque(argument), count, stream)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attempts and print what came of them."""
    parser = argparse.ArgumentParser(prog="attempts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", choices=list(ATTEMPTS), help="try one, in this process")
    options = parser.parse_args(arguments)
    if options.child:
        _child(options.child)
    results = run_all()
    for result in results:
        print(f"{result['title']}: {result['outcome']}\n    {result['message']}".replace("\n", "\n    "))
    return 0 if all(r["as_expected"] for r in results) else 1


if __name__ == "__main__":  # a child that tries one of them
    sys.exit(main())
