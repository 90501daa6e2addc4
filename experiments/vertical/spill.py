"""How many values may a fused kernel hold at once until it costs more than it saves?

Answer: see notes/vertical_fusion.md.

W numbers of a column are divided by their sum.  Fused, a thread holds all W in registers between one read and one
write: 2 accesses of each.  In two passes it adds them up, and reads them again: 3.  A thread has 255 registers, or 64
in a block of 1,024; what does not fit is spilled to memory.  Registers and spilled bytes are the assembler's, for an
architecture that need not be here; on a GPU the same text is timed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial

import torch

from experiments.clock import Case, series
from experiments.columns import ms
from experiments.comparing import best
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import Lines

# --- registers of a kernel and the bytes that it spills, as NVRTC's assembler says them: no GPU is needed for that

#: From this version on NVRTC keeps what it has compiled, and says nothing when it finds it again.
CACHES = (12, 9)
SAID = (
    r"entry function '{}'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers"
)


def registers(text: str, name: str, arch: str, *options: str) -> Row:
    """Of a kernel in a text: its registers, the bytes of stack that a thread has and of what it spills there (stores,
    loads).

    Raises:
        RuntimeError: NVRTC refuses the text, or does not say what it made.
    """
    from cuda.bindings import nvrtc

    fresh = ["--no-cache"] if nvrtc.nvrtcVersion()[1:] >= CACHES else []
    given = [o.encode() for o in (f"--gpu-architecture={arch}", "--ptxas-options=--verbose", *fresh, *options)]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    (code,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    said = re.search(SAID.format(name), log.decode(errors="replace"), re.DOTALL)
    if int(code) or said is None:
        raise RuntimeError(f"{code.name}, and of {name!r} it says: {log.decode(errors='replace')[-300:]}")
    nvrtc.nvrtcDestroyProgram(program)
    names = ("stack", "spill_stores", "spill_loads", "registers")
    return dict(zip(names, map(int, said.groups()), strict=True))


# --- the question

WIDTHS, TOYS, THREADS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 320), (8, 128), (256, 1024)
NUMEL = 1 << 28
#: What is compiled for where there is no GPU.
ARCH = "sm_90"
FUSED, PASSES = "fused", "two passes"
TEXT = r"""
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define COLUMN const long long at = blockIdx.x * (long long)THREADS + threadIdx.x; if (at >= columns) return

KERNEL fused(const float* x, float* y, long long columns) {
    COLUMN;
    float v[W], sum = 0;
#pragma unroll
    for (int i = 0; i < W; ++i) sum += v[i] = x[i * columns + at];
#pragma unroll
    for (int i = W - 1; i >= 0; --i) y[i * columns + at] = v[i] / sum;
}
KERNEL add(const float* x, float* sums, long long columns) {
    COLUMN;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < W; ++i) sum += x[i * columns + at];
    sums[at] = sum;
}
KERNEL divide(const float* x, const float* sums, float* y, long long columns) {
    COLUMN;
    const float sum = sums[at];
#pragma unroll 8
    for (int i = W - 1; i >= 0; --i) y[i * columns + at] = x[i * columns + at] / sum;
}
"""


def defines(width: int, threads: int) -> tuple[str, str]:
    """What the text leaves open."""
    return f"-DW={width}", f"-DTHREADS={threads}"


def calls(x: torch.Tensor, y: torch.Tensor, width: int, threads: int) -> list[Case]:
    """Both ways over as many columns as there is room for."""
    import cupy

    from pagedopt.kernels.cuda import Stream

    module = cupy.RawModule(code=TEXT, options=defines(width, threads))
    kernels = {name: module.get_function(name) for name in ("fused", "add", "divide")}
    columns = x.numel() // width
    sums = torch.empty(columns, device=x.device)

    def launch(name: str, *tensors: torch.Tensor) -> None:
        stream = Stream(torch.cuda.current_stream(x.device).cuda_stream)
        arguments = (*(tensor.data_ptr() for tensor in tensors), columns)
        kernels[name]((-(-columns // threads),), (threads,), arguments, stream=stream)

    def passes() -> None:
        launch("add", x, sums)
        launch("divide", x, sums, y)

    return [Case(FUSED, partial(launch, "fused", x, y)), Case(PASSES, passes)]


def measure(run: Run) -> Iterator[Row]:
    """A row per W and threads of a block: registers, spilled bytes, and on a GPU the times of both ways (µs)."""
    run.rounds, run.seconds = run.size((20, 0.5), (3, 0.1))
    cuda = run.device.type == "cuda"
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(run.device)) if cuda else ARCH
    x, y = (torch.rand(run.size(NUMEL, 1 << 20) if cuda else 0, device=run.device) for _ in "xy")
    if not cuda:
        run.left_out.append(f"times of the kernels, which are compiled for {ARCH}: need a GPU")
    for threads, width in run.each(itertools.product(THREADS, run.size(WIDTHS, TOYS))):
        said = registers(TEXT, "fused", arch, *defines(width, threads))
        times = run.measure(calls(x, y, width, threads)) if cuda else dict.fromkeys((FUSED, PASSES))
        yield {"width": width, "threads": threads, "block": f"{threads:,} threads", "arch": arch, **said, **times}


def derive(rows: Rows) -> Rows:
    """Bytes that a thread spills, stored and loaded; the time of the fused kernel in units of the two passes'."""
    found = Rows()
    for row in rows:
        one, two = (row[name] and best(row[name]) for name in (FUSED, PASSES))
        of_passes = series([one["median"] / two["median"]], one["clock"]) if one else None
        spilled = row["spill_stores"] + row["spill_loads"]
        found.append({**row, "one": one, "two": two, "of_passes": of_passes, "spilled": spilled, "timed": bool(one)})
    return found


def losing(rows: Rows) -> list[Row]:
    """Kernels that lose by fusing."""
    return [row for row in rows.where(timed=True) if row["of_passes"]["median"] > 1]


def sentence(rows: Rows) -> str:
    """From which W on a kernel spills, at which fusing loses, and what the rules make of it."""
    lines = []
    for group in rows.groups("threads"):
        spills = [row["width"] for row in group if row["spilled"]]
        lines.append(f"- {group[0]['block']} a block, {group[0]['arch']}: values are spilled at W = {spills}.")
    if rows.where(timed=True):
        for group in Rows(losing(rows)).groups("threads"):
            widths = ", ".join(str(row["width"]) for row in group)
            lines.append(f"- Fusing loses at W = {widths} in blocks of {group[0]['block']}.")
    return "\n".join(lines)


HELD = "values held at once"
PANELS = [
    Lines(title="What a thread spills", unit="bytes", x="width", y="spilled", each="block", label=HELD, log="x"),
    Lines(title="What the fused kernel takes", unit="x two passes", x="width", y="of_passes", each="block", label=HELD,
          log="x", where={"timed": True}, level=("two passes", lambda _: 1.0)),
]  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, a picture, and what is held to a limit."""
    title = "W values at once in blocks of {threads:,} threads, {arch}"
    columns: dict[str, Column] = {"W": "width", "registers": "registers",
        "spill stores, B": "spill_stores", "fused ms": ms("one"),
        "two passes ms": ms("two"), "fused ÷ two passes": "of_passes"}  # fmt: skip
    page.table(title, rows.where(threads=THREADS[1]), columns)
    page.say(sentence(rows))
    page.picture("spill", rows, PANELS)
    page.bar("kernels that lose by fusing", rows.where(timed=True), lambda rows: len(losing(rows)), "≥ 1")
