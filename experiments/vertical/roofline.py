"""How many operations per byte does a device need to be busy, and what is fused until then for nothing?

Answer: see notes/vertical_fusion.md.

A chain of k multiplications with addition on each element.  One after the other in torch, each reads and writes all;
fused, all k are done between one read and one write.  The fused chain takes the time of a copy until its arithmetic
takes longer: the knee.  Beside it stand the rates that the knee is made of, measured here, and that of the link.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from experiments.clock import Case
from experiments.columns import ms
from experiments.comparing import on_one_clock, over
from experiments.lab import Page, Row, Rows, Run, number
from experiments.pictures import Lines
from pagedopt.rules import RULES, Rule

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables")
EAGER, FUSED = "one after the other", "fused"
COPY, CHAIN, PRODUCT, LINK = "memory, a copy", "float32, a chain", "matrix product", "link, host to device"
#: Links of a chain, fused; and the most of torch's, whose time grows with each.
LENGTHS, MOST_EAGER = tuple(2**i for i in range(13)), 64
#: x + A x: a multiplication with addition of one operand; the longest chain less than doubles it.
A = 2.0**-13
#: What costs no more than this, in units of a chain of one link, costs nothing.
FREE = 1.1
CUDA = r"""
extern "C" __global__ void chain(const float4* x, float4* y, long long n, long long k, float a) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
#pragma unroll 16
    for (int j = 0; j < k; ++j)
        v.x = fmaf(v.x, a, v.x), v.y = fmaf(v.y, a, v.y), v.z = fmaf(v.z, a, v.z), v.w = fmaf(v.w, a, v.w);
    y[i] = v;
}
"""


def one_by_one(x: torch.Tensor, k: int) -> torch.Tensor:
    """In torch, an operator each."""
    for _ in range(k):
        x = torch.add(x, x, alpha=A)
    return x


def fused(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    """The chain in one kernel."""
    import cupy

    from pagedopt.kernels.cuda import Stream

    kernel = cupy.RawKernel(CUDA, "chain")

    def run(x: torch.Tensor, y: torch.Tensor, k: int) -> None:
        stream, n = Stream(torch.cuda.current_stream(device).cuda_stream), x.numel() // 4
        arguments = (x.data_ptr(), y.data_ptr(), n, k, np.float32(A))
        kernel((-(-n // 256),), (256,), arguments, stream=stream)

    return run


def measure(run: Run) -> Iterator[Row]:
    """A row per rate, and one per way and length of the chain: times (µs), bytes, operations."""
    run.rounds, run.seconds = run.size((20, 0.5), (3, 0.05))
    x = torch.rand(run.size(1 << 27, 1 << 14), device=run.device)
    y, host = torch.empty_like(x), torch.empty(x.numel(), pin_memory=True)
    side = run.size(8192, 64)
    one, other = (torch.rand(side, side, device=run.device).to(torch.bfloat16) for _ in "ab")
    rates = {
        COPY: (partial(y.copy_, x), 2 * x.nbytes, 0),
        PRODUCT: (partial(torch.mm, one, other), 0, 2 * side**3),
        LINK: (partial(y.copy_, host, non_blocking=True), x.nbytes, 0),
    }
    for row in run.time([Case(name, call) for name, (call, *_) in rates.items()], what="rate"):
        _, nbytes, flop = rates[row["case"]]
        yield {**row, "bytes": nbytes, "flop": flop}
    chain = fused(run.device)
    chain(x, y, 5)
    torch.testing.assert_close(y, one_by_one(x, 5))
    for k in run.each(run.size(LENGTHS, LENGTHS[:5])):
        cases = [Case(FUSED, partial(chain, x, y, k)), Case(EAGER, partial(one_by_one, x, k))]
        for row in run.time(cases if k <= MOST_EAGER else cases[:1], what="chain", k=k, numel=x.numel()):
            yield {**row, "bytes": 0, "flop": 2 * k * x.numel()}


def derive(rows: Rows) -> Rows:
    """Rates in 1e9 a second; the knee: operations a byte, and k, from which on the longest chain's rate decides."""
    rows = on_one_clock(rows)
    first, *_, longest = sorted(rows.where(what="chain", case=FUSED), key=lambda row: row["k"])
    rates = Rows(
        {**row, "rate": (row["bytes"] or row["flop"]) / row["time"]["median"] / 1e3}
        for row in [*rows.where(what="rate"), {**longest, "what": "rate", "case": CHAIN}]
    )
    chains = Rows({**row, "of_first": over(row["time"], first["time"])} for row in rows.where(what="chain"))
    memory, arithmetic, product = (rates.number("rate", case=name) or 0.0 for name in (COPY, CHAIN, PRODUCT))
    knee = {
        "what": "knee",
        "clock": first["clock"],
        "balance": arithmetic / memory,
        "of_product": product / memory,
        "knee": 8 * arithmetic / memory / 2,
        "free": max(row["k"] for row in chains.where(case=FUSED) if row["of_first"] <= FREE),
    }
    return Rows([*rates, *chains, knee])


def operations(rule: Rule) -> int:
    """Of an element's update in its CUDA text: a multiplication with addition is two, a function one, a choice none."""
    body = re.sub(r"//.*", "", rule.cuda_source()).partition("apply(")[2]
    return sum(len(re.findall(kind, body)) for kind in (r" [-+*/] ", r"element_\w+<", r"element_fma<"))


def sentence(rows: Rows) -> str:
    """Where the knee is, and how far optimizers are from it."""
    knee = rows.where(what="knee")[0]
    lines = [f"- The knee is at {number(knee['balance'])} operations a byte, {number(knee['knee'])} multiplications "
             f"with addition on each float32 that is read and written; up to {knee['free']:,} of them the fused chain "
             f"takes no more than 1.1 times the time of one ({knee['clock']})."]  # fmt: skip
    for name in ("sgd", "adamw"):
        rule = RULES[name]
        moved, count = 4 * (len(rule.reads) + len(rule.writes)), operations(rule)
        lines.append(f"- {name}: {count} operations on {moved} bytes, {number(count / moved)} a byte.")
    return "\n".join(lines)


PANELS = [
    Lines(title="Fused, arithmetic costs nothing up to the knee", unit="ms", x="k", y=ms("time"), each="case",
          label="multiplications with addition on each element", where={"what": "chain"}),
]  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """Tables, what follows, a picture, and what is held to a limit."""
    page.table("rates", rows.where(what="rate"), {"of": "case",
        "GB/s": lambda row: row["rate"] if row["bytes"] else None,
        "Gflop/s": lambda row: None if row["bytes"] else row["rate"], "ms, {clock}": ms("time")})  # fmt: skip
    page.say(sentence(rows))
    page.picture("roofline", rows, PANELS)
    page.bar("fused, multiplications with addition an element that take no more than 1.1 x one", rows, "free", "≥ 16")
