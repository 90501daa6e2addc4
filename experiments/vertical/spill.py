"""How many values may a fused kernel hold at once until it costs more than it saves?

Answer: see notes/vertical_fusion.md.

W numbers of a column are divided by their sum.  Fused, a thread holds all W in registers between one read and one
write: 2 accesses of each.  In two passes it adds them up, and reads them again: 3.  A thread has 255 registers, or 64
in a block of 1,024; what does not fit is spilled to memory.  Registers and spilled bytes are the assembler's, for an
architecture that need not be here; on a GPU the same machine code is timed, and rules that choose by them are judged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from experiments.lab import Bar, Case, Lines, Plot, Row, Rows, Run, Table, Text, ms, number, on_one_clock, over, series
from experiments.works.registers import compiled

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


def assembled(width: int, threads: int, arch: str) -> tuple[bytes, Row]:
    """Machine code of all three kernels, and what the assembler says of the fused one."""
    cubin, said = compiled(TEXT, "fused", {"W": width, "THREADS": threads}, arch)
    return cubin, {"arch": arch, **said}


def calls(x: torch.Tensor, y: torch.Tensor, width: int, threads: int) -> tuple[list[Case], Row]:
    """Both ways over as many columns as there is room for, checked; and what is said of the fused kernel."""
    import cupy

    from pagedopt.kernels.cuda import Stream

    cubin, said = assembled(width, threads, "sm_{}{}".format(*torch.cuda.get_device_capability(x.device)))
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "kernels.cubin").write_bytes(cubin)
        module = cupy.RawModule(path=str(path))
        kernels = {name: module.get_function(name) for name in ("fused", "add", "divide")}
        for kernel in kernels.values():
            kernel.compile()  # loads now, while the file is there
    columns = x.numel() // width
    sums = torch.empty(columns, device=x.device)

    def launch(name: str, *tensors: torch.Tensor) -> None:
        stream = Stream(torch.cuda.current_stream(x.device).cuda_stream)
        arguments = (*(tensor.data_ptr() for tensor in tensors), columns)
        kernels[name]((-(-columns // threads),), (threads,), arguments, stream=stream)

    def passes() -> None:
        launch("add", x, sums)
        launch("divide", x, sums, y)

    cases = [Case(FUSED, partial(launch, "fused", x, y)), Case(PASSES, passes)]
    some = slice(0, min(columns, 4096))
    exact = x[: width * columns].view(width, columns)[:, some]
    for case in cases:
        y.zero_()
        case.run()
        torch.testing.assert_close(y[: width * columns].view(width, columns)[:, some], exact / exact.sum(0))
    return cases, said


def measure(run: Run) -> Iterator[Row]:
    """A row per W and threads of a block: registers, spilled bytes, and on a GPU the times of both ways (µs)."""
    run.rounds, run.seconds = run.size((20, 0.5), (3, 0.1))
    cuda = run.device.type == "cuda"
    x, y = (torch.rand(run.size(NUMEL, 1 << 20) if cuda else 0, device=run.device) for _ in "xy")
    if not cuda:
        run.left_out.append(f"times of the kernels, which are compiled for {ARCH}: need a GPU")
    for width, threads in run.each([(width, threads) for threads in THREADS for width in run.size(WIDTHS, TOYS)]):
        with run.attempt(f"W = {width}, {threads} threads", (Exception,)):
            if cuda:
                cases, said = calls(x, y, width, threads)
                times = run.measure(cases)
            else:
                said, times = assembled(width, threads, ARCH)[1], {FUSED: None, PASSES: None}
            yield {"width": width, "threads": threads, "device": run.device.type, **said, **times}


def derive(rows: Rows) -> Rows:
    """Bytes that a thread spills, stored and loaded; the time of the fused kernel in units of the two passes'."""
    found = Rows()
    for row in rows:
        timed = Rows(row[name] for name in (FUSED, PASSES) if row[name])
        one, two = [timing["time"] for timing in on_one_clock(timed)] or (None, None)
        ratio = over(one, two)
        found.append({
            **row, "one": one, "two": two, "of_passes": series([ratio], one["clock"]) if one and ratio else None,
            "spilled": row["spill_stores"] + row["spill_loads"], "block": f"{row['threads']:,} threads",
        })  # fmt: skip
    return found


#: Rules of one line that choose whether to fuse; the third is that of Inductor's benchmark of an epilogue's fusion.
CHOICES: dict[str, Callable[[Row], bool]] = {
    "always": lambda row: True,
    "if nothing is spilled": lambda row: not row["spilled"],
    "if fewer than 8 words of local memory are used (Inductor)": lambda row: row["stack"] < 4 * 8,
    "up to 64 values (Inductor's max_fusion_size is 64 operations)": lambda row: row["width"] <= 64,
    "never": lambda row: False,
}


def judged(rows: Rows) -> dict[str, tuple[int, float]]:
    """By rule: how often it chooses the slower way, and the worst that its choice takes in units of the best."""
    known = [(row, row["of_passes"]["median"]) for row in rows if row["of_passes"]]
    found = {}
    for name, fuses in CHOICES.items():
        costs = [(ratio if fuses(row) else 1.0) / min(ratio, 1.0) for row, ratio in known]
        found[name] = (sum(cost > 1 for cost in costs), max(costs, default=0.0))
    return found if known else {}


def sentence(rows: Rows) -> str:
    """From which W on a kernel spills, from which on fusing loses, and what the rules make of it."""
    lines = []
    for group in rows.groups("threads"):
        spills = [row["width"] for row in group if row["spilled"]]
        loses = [row["width"] for row in group if row["of_passes"] and row["of_passes"]["median"] > 1]
        first = f"from W = {min(spills)} on" if spills else "nowhere"
        lost = f"; fusing loses {f'at W = {loses}' if loses else 'nowhere'}" if group[0]["of_passes"] else ""
        lines.append(f"- {group[0]['block']} a block, {group[0]['arch']}: values are spilled {first}{lost}.")
    lines += [f"- Fuse {name}: wrong {wrong} times, at worst {number(worst)} times the better way's time."
              for name, (wrong, worst) in judged(rows).items()]  # fmt: skip
    return "\n".join(lines)


def losing(rows: Rows) -> float | None:
    """How many kernels lose by fusing."""
    known = [row["of_passes"]["median"] for row in rows if row["of_passes"]]
    return sum(ratio > 1 for ratio in known) if known else None


TABLES = [
    Table("W values at once in blocks of {threads:,} threads, {arch}", by=("threads",), columns={
        "W": "width", "registers": "registers", "stack, B": "stack", "spill stores, B": "spill_stores",
        "spill loads, B": "spill_loads", "compiled in ms": "compile_ms", "fused ms": ms("one"),
        "two passes ms": ms("two"), "fused ÷ two passes": "of_passes",
    })
]  # fmt: skip
TEXTS = [Text("spill", sentence)]
BARS = [Bar("kernels that lose by fusing", losing, at_least=1, device="cuda")]
PANELS = [
    Lines(title="What a thread spills", unit="bytes", x="width", y="spilled", each="block", label="W", log="x"),
    Lines(
        title="Fused, in units of two passes",
        unit="x",
        x="width",
        y="of_passes",
        each="block",
        label="W",
        log="x",
        where={"device": "cuda"},
    ),
]
PLOTS = [Plot("spill", PANELS)]
