"""What happens if a list of pointers is handed to a kernel in the obvious ways?  Each in a process of its own.

Answer (H200, 2026-11): a std::vector and a struct of 4,096 pointers do not compile, a list in host memory ends in an
illegal access; by value go 4,095 pointers at most, and 512 as documented before CUDA 12.1.  Of three lists 1,365
tensors fit (170 into 4 KB); arguments cut by hand arrive cut; the source's own norms of 423 and 424 tensors, which
crashed it, are right today.

The limit itself is found by search, for one list and for three.  An attempt that crashes or leaves a CUDA context
broken breaks only its own process.

Background: kernel parameters were limited to 4,096 bytes until CUDA 12.1 (PTX ISA 8.1) and to 32,764 since, on Volta
and later (https://developer.nvidia.com/blog/cuda-12-1-supports-large-kernel-parameters/).
"""

from __future__ import annotations

import bisect
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.child import Child
from experiments.lab import Page, Row, Rows, Run

# --- lists of pointers handed to kernels of a few lines, as nobody's transport does it, and whether they arrive

ARCH = "sm_90"
BY_VALUE = """\
template <int N> struct List { float* item[N]; };
template <int N> __global__ void alone(const __grid_constant__ List<N> list) { *list.item[0] = 1.0f; }
template <int N> __global__ void beside(const __grid_constant__ List<N> list, float* out) { *out = *list.item[0]; }
"""
THREE_LISTS = """\
template <int N> struct Three { float* addresses[3][N]; };
template <int N> __global__ void add(const __grid_constant__ Three<N> lists) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) *lists.addresses[2][i] = *lists.addresses[0][i] + *lists.addresses[1][i];
}
"""
#: Counts pointers that are what they ought to be, and follows none.
ARRIVED = """\
template <int N> struct Cut { float* count; unsigned long long first; unsigned long long item[N]; };
template <int N> __global__ void arrived(const __grid_constant__ Cut<N> a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N && a.item[i] == a.first + 4ull * i) atomicAdd(a.count, 1.0f);
}
"""
HOST_LIST = """\
struct Arguments { float** list; long long count; float* out; };
__global__ void sum_list(const __grid_constant__ Arguments a) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.count) atomicAdd(a.out, *a.list[i]);
}
"""


class LeftOut(Exception):
    """What is tried needs something that is not here."""


def by_nvrtc(text: str, name: str) -> str:
    """Compile a kernel of a text with NVRTC."""
    from pagedopt.kernels.nvrtc import CompileError, compile_cuda

    try:
        compile_cuda(text, (name,), ARCH)
    except CompileError:
        raise
    except (ImportError, RuntimeError) as error:  # cuda-bindings raises the second where the library is missing
        raise LeftOut(f"NVRTC is not installed ({error}); pip install nvidia-cuda-nvrtc") from error
    return "compiled"


def most_by_nvrtc(text: str, kernel: str) -> int:
    """The largest argument with which NVRTC takes a template."""
    from pagedopt.kernels.nvrtc import CompileError

    def fits(count: int) -> bool:
        try:
            return bool(by_nvrtc(text, f"{kernel}<{count}>"))
        except CompileError:
            return False

    return largest(fits)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number below 65,536 that fits, where 1 does, and none beyond one that does not."""
    return bisect.bisect_left(range(1, 1 << 16), True, key=lambda count: not fits(count))


def some_values(count: int) -> tuple[Any, list[int]]:
    """Random whole numbers on the GPU, whose float sum is exact in any order, and the address of each.

    Raises:
        LeftOut: there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise LeftOut("needs a GPU")
    values = torch.randint(1, 100, (count,), device="cuda").float()
    return values, [values.data_ptr() + 4 * i for i in range(count)]


def right_sum(values: Any, text: str, name: str, *words: int) -> str:
    """Launch a kernel over ``words`` and the address of its result, and say in a word that this is their sum.

    Raises:
        AssertionError: it is not.
    """
    out = values.new_zeros(1)
    launch(text, name, [*words, out.data_ptr()], len(values))
    if out.item() != values.sum().item():
        raise AssertionError(f"wrong: {out.item()} instead of {values.sum().item()}")
    return "right"


def launch(text: str, name: str, words: Sequence[int], count: int, nbytes: int | None = None) -> None:
    """Launch ``count`` threads or more and hand over so many bytes of a struct of words, past every check of ours."""
    import ctypes

    import numpy as np
    import torch

    from pagedopt.kernels.nvrtc import compile_cuda
    from pagedopt.system.driver import bindings, check

    major, minor = torch.cuda.get_device_capability()
    cubin, (symbol,) = compile_cuda(text, (name,), f"sm_{major}{minor}")
    d = bindings()
    module = check("cuModuleLoadData", d.cuModuleLoadData(cubin))
    kernel = check("cuModuleGetFunction", d.cuModuleGetFunction(module, symbol.encode()))
    argument = np.array(words, np.uint64)
    size = ctypes.c_size_t(argument.nbytes if nbytes is None else nbytes)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, …_BUFFER_SIZE, …_END
    extra = (ctypes.c_void_p * 5)(1, argument.ctypes.data, 2, ctypes.addressof(size), None)
    stream = torch.cuda.current_stream().cuda_stream
    blocks = -(-count // 256)
    launched = d.cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, 0, ctypes.addressof(extra))
    check("cuLaunchKernel", launched)


# --- the question

LIMIT = 120.0
QUICK = ("vector_nvrtc", "struct_too_large", "source_norm_424")
#: Pointers of the struct that is cut, and bytes of it that are handed over.
CUT_POINTERS, CUT_BYTES = 1000, 4096

VECTOR = """\
#include <vector>
__global__ void fill(std::vector<float*> list) { *list[threadIdx.x] = 1.0f; }
"""


@dataclass(frozen=True)
class Attempt:
    """What to try, and whether it ought to fail; None: nobody said."""

    title: str
    run: Callable[[], str]
    fails: bool | None


ATTEMPTS: dict[str, Attempt] = {}


def attempt(title: str, *counts: int, fails: bool | None = False) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Put a function among the attempts, by its name; one of several counts once with each."""

    def put(function: Callable[..., str]) -> Callable[..., str]:
        for given in [[count] for count in counts] or [[]]:
            name = "_".join([function.__name__, *map(str, given)])
            ATTEMPTS[name] = Attempt(title.format(*given), functools.partial(function, *given), fails)
        return function

    return put


@attempt("std::vector as argument, nvcc", fails=True)
def vector_nvcc() -> str:
    """The whole toolkit knows std::vector, whose members are host functions."""
    if (compiler := shutil.which("nvcc")) is None:
        raise LeftOut("nvcc is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vector.cu").write_text(VECTOR)
        command = [compiler, "-std=c++17", f"-arch={ARCH}", "-cubin", "-o", "compiled", "vector.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())
    return "compiled"


@attempt("std::vector as argument, NVRTC", fails=True)
def vector_nvrtc() -> str:
    """NVRTC has no standard library at all."""
    return by_nvrtc(VECTOR, "fill")


@attempt("float** in host memory", fails=True)
def host_list() -> str:
    """The kernel follows an address of ordinary host memory."""
    import numpy as np

    values, addresses = some_values(1000)
    table = np.array(addresses, np.uint64)  # pageable host memory
    right = right_sum(values, HOST_LIST, "sum_list", table.ctypes.data, len(table))
    return f"the GPU reads ordinary host memory here (HMM or ATS); sum is {right}"


@attempt("struct of 4,096 pointers (32,768 bytes)", fails=True)
def struct_too_large() -> str:
    """One pointer more than fits in 32,764 bytes."""
    return by_nvrtc(BY_VALUE, "alone<4096>")


@attempt("most pointers by value, this NVRTC")
def limit_today() -> str:
    """Search with NVRTC for the largest struct of pointers that compiles."""
    count, beside = (most_by_nvrtc(BY_VALUE, kernel) for kernel in ("alone", "beside"))
    return f"{count:,} pointers ({8 * count:,} bytes) alone, {beside:,} beside one other pointer argument"


@attempt("most tensors in three lists by value")
def limit_three_lists() -> str:
    """Search for the most tensors of which three addresses each go by value, as in ``addresses[3][NUM_TENSORS]``."""
    count = most_by_nvrtc(THREE_LISTS, "add")
    return f"{count:,} tensors in three lists ({24 * count:,} bytes); the documented 4,096 bytes hold {4096 // 24}"


@attempt("three lists of 1,365 tensors, launched")
def launch_three_lists() -> str:
    """As many tensors as the limit allows, the third list the sum of the others."""
    count = 32764 // 24
    lists = [some_values(count) for _ in range(3)]
    words = [address for _, addresses in lists for address in addresses]
    launch(THREE_LISTS, f"add<{count}>", words, count)
    one, two, three = (values for values, _ in lists)
    if not three.equal(one + two):
        raise AssertionError("the sums are wrong")
    return f"{count:,} tensors, three lists in {8 * len(words):,} bytes; all sums are right"


@attempt("struct of 1,000 pointers, cut at 4,096 bytes by hand", fails=None)
def cut_by_hand() -> str:
    """A struct of 1,000 pointers of which 4,096 bytes are handed over: what a compiler refused, or cut, long ago."""
    pointers = range(1 << 20, (1 << 20) + 4 * CUT_POINTERS, 4)
    found = []
    all_bytes = 8 * (CUT_POINTERS + 2)
    for nbytes in (all_bytes, CUT_BYTES):
        count, _ = some_values(1)
        count.zero_()
        words = [count.data_ptr(), pointers[0], *pointers]
        launch(ARRIVED, f"arrived<{CUT_POINTERS}>", words, CUT_POINTERS, nbytes)
        found.append(int(count))
    whole, cut = found
    if whole != CUT_POINTERS:
        raise AssertionError(f"of {CUT_POINTERS:,} pointers {whole:,} arrive although nothing is cut")
    if cut == CUT_POINTERS:
        raise RuntimeError(f"nothing was cut: all {CUT_POINTERS:,} pointers arrive, of {CUT_BYTES:,} bytes too")
    return f"{cut:,} of {CUT_POINTERS:,} pointers arrive of {CUT_BYTES:,} bytes, all of {all_bytes:,} bytes"


@attempt("the source's norms of {:,} tensors", 423, 424, 1000)
def source_norm(count: int) -> str:
    """The source's own lines: ``rand(2, 3)`` one by one, order 1; they crashed beyond 422 once (pytorch#118604)."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.rand(2, 3, device=device) for _ in range(count)]
    exact = torch.linalg.vector_norm(torch.stack(tensors).flatten(1), 1, dim=1)
    torch.testing.assert_close(torch.stack(torch._foreach_norm(tensors, 1)), exact)
    return f"{count:,} norms, all right, on {device} (torch {torch.__version__})"


def measure(run: Run) -> Iterator[Row]:
    """A row per attempt: its name, title, outcome ("works", "fails", "left out"), message."""
    names = run.size(tuple(ATTEMPTS), QUICK)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for _, row in zip(run.each(names), pool.map(in_child, names), strict=True):
            run.say(f"{row['title']}: {row['outcome']}\n{row['message'].strip()}")
            yield row


def in_child(name: str) -> Row:
    """Try one."""
    child = Child(outcome, name, limit=LIMIT)
    return judged(name, list(child), child.ended)


def judged(name: str, rows: list[Row], ended: str | None) -> Row:
    """An attempt's row, of what its process sent and how that ended: who crashes has failed."""
    tried = ATTEMPTS[name]
    found = rows[0] if rows else {"outcome": "fails", "message": f"the process {ended}"}
    meant = found["outcome"] == "left out" or tried.fails in (None, found["outcome"] == "fails")
    return {"name": name, "title": tried.title, **found, "as_expected": bool(rows) and meant}


def outcome(name: str) -> Iterator[Row]:
    """In the child: try, and say what came of it."""
    try:
        yield {"outcome": "works", "message": ATTEMPTS[name].run()}
    except LeftOut as error:
        yield {"outcome": "left out", "message": str(error)}
    except Exception as error:
        yield {"outcome": "fails", "message": f"{type(error).__name__}: {error}"[:1500]}


def short(row: Row) -> str:
    """The first line of a message."""
    return next((line.strip()[:200] for line in row["message"].splitlines() if line.strip()), "")


def unexpected(rows: Rows) -> tuple[float, str]:
    """How many came out otherwise, and which."""
    wrong = [row["title"] for row in rows if not row["as_expected"]]
    return float(len(wrong)), f" ({', '.join(wrong)})" if wrong else ""


def ended(row: Row) -> str:
    """The outcome, and whether it surprises."""
    as_expected = row["as_expected"]
    said = f"{row['outcome']}, as expected" if row["outcome"] == "fails" and as_expected else str(row["outcome"])
    return said if as_expected else f"{said} (not as expected)"


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    alike = ("source_norm_423", "source_norm_1000")  # as with 424 tensors
    shown = Rows(row for row in rows if row["name"] not in alike)
    page.table("attempts", shown, {"attempt": "title", "outcome": ended, "message": short})
    page.bar("attempts that came out otherwise than expected", rows, unexpected, "≤ 0")
