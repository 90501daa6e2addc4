"""What happens if a list of pointers is handed to a kernel in the obvious ways?  Each in a process of its own.

Answer (H200, 2026-11): a std::vector and a struct of 4,096 pointers do not compile, a list in host memory ends in an
illegal access; by value go 4,095 pointers at most, and 512 as documented before CUDA 12.1 (544 by the assembler).
Of three lists 1,365 tensors fit (170 into 4 KB); arguments cut by hand arrive cut; the source's own norms of 423 and
424 tensors, which crashed it, are right today.

The lecture's attempts, for real: a ``std::vector`` as argument, a host ``float**``, a struct beyond the limit, and the
limit itself, found by search, for one list and for three; arguments of which the first 4,096 bytes are handed over and
no more; ``_foreach_norm`` as the source calls it.  An attempt that crashes or leaves a CUDA context broken breaks only
its own process.

Background: kernel parameters were limited to 4,096 bytes until CUDA 12.1 (PTX ISA 8.1) and to 32,764 since, on Volta
and later (https://developer.nvidia.com/blog/cuda-12-1-supports-large-kernel-parameters/).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.harness.child import Child
from experiments.harness.rows import Row, Rows
from experiments.harness.show import Bar, Table
from experiments.works.handed_over import (
    ARRIVED,
    BY_VALUE,
    HOST_LIST,
    THREE_LISTS,
    LeftOut,
    gpu,
    launch,
    launcher,
    right_sum,
    some_values,
)

if TYPE_CHECKING:  # a child loads torch only if it needs it
    from experiments.harness.run import Run

ARCH = "sm_90"
LIMIT = 120.0
QUICK = ("vector_nvrtc", "struct_too_large", "foreach_norm_424")
#: Pointers of the struct that is cut, and bytes of it that are handed over.
CUT_POINTERS, CUT_BYTES = 1000, 4096

VECTOR = """\
#include <vector>
__global__ void fill(std::vector<float*> list) { *list[threadIdx.x] = 1.0f; }
"""
#: A kernel as a compiler before CUDA 12.1 would hand it to the assembler.
OLD_PTX = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .align 8 .b8 list[{nbytes}]) {{ ret; }}
"""


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


def limit_three_lists() -> str:
    """Search for the most tensors of which three addresses each go by value, as in ``addresses[3][NUM_TENSORS]``."""
    count = largest(lambda n: _compiles(f"add<{n}>", THREE_LISTS), 1, 1 << 16)
    return f"{count:,} tensors in three lists ({24 * count:,} bytes); the documented 4,096 bytes hold {4096 // 24}"


def launch_three_lists() -> str:
    """As many tensors as the limit allows, the third list the sum of the others."""
    import numpy as np

    torch = gpu()
    count = 32764 // 24
    lists = [some_values(torch, count) for _ in range(3)]
    argument = np.zeros(1, [("addresses", np.uint64, (3, count))])
    argument["addresses"][0] = [addresses for _, addresses in lists]
    launch(THREE_LISTS, f"add<{count}>", argument, count)
    one, two, three = (values for values, _ in lists)
    if not torch.equal(three, one + two):
        raise AssertionError("the sums are wrong")
    return f"{count:,} tensors, three lists in {argument.itemsize:,} bytes; all sums are right"


def cut_by_hand() -> str:
    """A struct of 1,000 pointers of which 4,096 bytes are handed over: what a compiler refused, or cut, long ago."""
    import numpy as np

    torch = gpu()
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    argument = np.zeros(1, [("count", np.uint64), ("first", np.uint64), ("item", np.uint64, (CUT_POINTERS,))])
    argument["count"], argument["first"] = count.data_ptr(), 1 << 20
    argument["item"] = (1 << 20) + 4 * np.arange(CUT_POINTERS, dtype=np.uint64)
    hand_over = launcher(ARRIVED, f"arrived<{CUT_POINTERS}>", argument, CUT_POINTERS)
    found = []
    for nbytes in (argument.itemsize, CUT_BYTES):
        count.zero_()
        hand_over(nbytes)
        torch.cuda.synchronize()
        found.append(int(count))
    if found[0] != CUT_POINTERS:
        raise AssertionError(f"of {CUT_POINTERS:,} pointers {found[0]:,} arrive although nothing is cut")
    if found[1] == CUT_POINTERS:
        raise RuntimeError(f"nothing was cut: all {CUT_POINTERS:,} pointers arrive, of {CUT_BYTES:,} bytes too")
    return (
        f"{found[1]:,} of {CUT_POINTERS:,} pointers arrive of {CUT_BYTES:,} bytes, all of {argument.itemsize:,} bytes"
    )


def host_list() -> str:
    """The kernel follows an address of ordinary host memory."""
    import numpy as np

    torch = gpu()
    values, addresses = some_values(torch, 1000)
    table = np.array(addresses, np.uint64)  # pageable host memory
    out = torch.zeros(1, device="cuda")
    argument = np.zeros(1, [("list", np.uint64), ("count", np.int64), ("out", np.uint64)])
    argument["list"], argument["count"], argument["out"] = table.ctypes.data, len(table), out.data_ptr()
    launch(HOST_LIST, "sum_list", argument, len(table))
    torch.cuda.synchronize()
    return f"the GPU reads ordinary host memory here (HMM or ATS); sum is {right_sum(out, values)}"


def launch_full_struct() -> str:
    """As many pointers as the limit allows, by value, in one launch."""
    import numpy as np

    torch = gpu()
    values, addresses = some_values(torch, 4094)
    out = torch.zeros(1, device="cuda")
    argument = np.zeros(1, [("item", np.uint64, (4094,)), ("out", np.uint64)])
    argument["item"][0], argument["out"] = addresses, out.data_ptr()
    launch(BY_VALUE, "sum_all<4094>", argument, 4094)
    torch.cuda.synchronize()
    return f"4,094 pointers and one for the result in {argument.itemsize:,} bytes; sum is {right_sum(out, values)}"


def foreach_norm(count: int) -> str:
    """torch._foreach_norm, which once put 422 result pointers into a struct and crashed beyond (pytorch#118604)."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = list(torch.rand(count, 6, device=device).unbind())
    norms = torch.stack(torch._foreach_norm(tensors, 2))
    torch.testing.assert_close(norms, torch.linalg.vector_norm(torch.stack(tensors), dim=1))
    return f"{count} norms, all right, on {device} (torch {torch.__version__})"


def source_norm(count: int) -> str:
    """The source's own lines: ``rand(2, 3)`` one by one, order 1, synchronize."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.rand(2, 3, device=device) for _ in range(count)]
    norms = torch._foreach_norm(tensors, ord=1)
    if device == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(torch.stack(norms), torch.stack(tensors).sum((1, 2)))
    return f"{count:,} norms, all right, on {device} (torch {torch.__version__})"


@dataclass(frozen=True)
class Attempt:
    """What to try, and whether it ought to fail; None: nobody said."""

    title: str
    run: Callable[[], str]
    fails: bool | None


ATTEMPTS: dict[str, Attempt] = {
    "vector_nvcc": Attempt("std::vector as argument, nvcc", vector_nvcc, True),
    "vector_nvrtc": Attempt("std::vector as argument, NVRTC", vector_nvrtc, True),
    "host_list": Attempt("float** in host memory", host_list, True),
    "struct_too_large": Attempt("struct of 4,096 pointers (32,768 bytes)", struct_too_large, True),
    "limit_before_12_1": Attempt("most pointers by value, PTX ISA 8.0", limit_before_12_1, False),
    "limit_today": Attempt("most pointers by value, this NVRTC", limit_today, False),
    "launch_full_struct": Attempt("struct of 4,095 pointers, launched", launch_full_struct, False),
    "limit_three_lists": Attempt("most tensors in three lists by value", limit_three_lists, False),
    "launch_three_lists": Attempt("three lists of 1,365 tensors, launched", launch_three_lists, False),
    "cut_by_hand": Attempt("struct of 1,000 pointers, cut at 4,096 bytes by hand", cut_by_hand, None),
    "source_norm_423": Attempt("the source's norms of 423 tensors", lambda: source_norm(423), False),
    "source_norm_424": Attempt("the source's norms of 424 tensors", lambda: source_norm(424), False),
    "source_norm_1000": Attempt("the source's norms of 1,000 tensors", lambda: source_norm(1000), False),
    "foreach_norm_423": Attempt("torch._foreach_norm of 423 tensors", lambda: foreach_norm(423), False),
    "foreach_norm_424": Attempt("torch._foreach_norm of 424 tensors", lambda: foreach_norm(424), False),
}


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
    attempt = ATTEMPTS[name]
    found = rows[0] if rows else {"outcome": "fails", "message": f"the process {ended}"}
    expected = {True: ("fails",), False: ("works",), None: ("fails", "works")}[attempt.fails]
    as_expected = bool(rows) and found["outcome"] in (*expected, "left out")
    return {"name": name, "title": attempt.title, **found, "as_expected": as_expected}


def outcome(name: str) -> Iterator[Row]:
    """In the child: try, and say what came of it."""
    try:
        found = ("works", ATTEMPTS[name].run())
    except LeftOut as error:
        found = ("left out", str(error))
    except Exception as error:
        found = ("fails", f"{type(error).__name__}: {error}"[:1500])
    yield {"outcome": found[0], "message": found[1]}


def short(row: Row) -> str:
    """The first lines of a message."""
    lines = [line.strip() for line in row["message"].splitlines() if line.strip()]
    return "\n".join(lines[:3])[:400]


def unexpected(rows: Rows) -> tuple[float, str]:
    """How many came out otherwise, and which."""
    wrong = [row["title"] for row in rows if not row["as_expected"]]
    return float(len(wrong)), f" ({', '.join(wrong)})" if wrong else ""


def _compile(text: str, name: str) -> str:
    from pagedopt.kernels.nvrtc import CompileError, compile_cuda

    try:
        compile_cuda(text, (name,), ARCH)
    except CompileError:
        raise
    except (ImportError, RuntimeError) as error:  # cuda-bindings raises the second where the library is missing
        raise LeftOut(f"NVRTC is not installed ({error}); pip install nvidia-cuda-nvrtc") from error
    return "compiled"


def _compiles(name: str, text: str = BY_VALUE) -> bool:
    from pagedopt.kernels.nvrtc import CompileError

    try:
        _compile(text, name)
    except CompileError:
        return False
    return True


TABLES = [
    Table(
        "attempts",
        {
            "attempt": "title",
            "outcome": lambda row: row["outcome"] + ("" if row["as_expected"] else " (not as expected)"),
            "message": short,
        },
    )
]
BARS = [Bar("attempts that came out otherwise than expected", unexpected, at_most=0)]
