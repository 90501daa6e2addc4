"""Do compilers rewrite mathematics, or do they only fuse what is written?

Answer: see notes/vertical_fusion.md.

A softmax over long rows as it is written reads them for the maximum, for the sum and for the quotient; *online*, in one
pass for both.  Attention as it is written keeps n² scores; what does not is another algorithm.  Asked is what the
compiler makes of attention as everybody writes it, and with a term between that no pattern of its library knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.harness.machine import chosen_device
from experiments.lab import Case, Row, Rows, Run, Table, Text, formatted, mib, ms, on_one_clock
from experiments.works import weight, witnesses
from experiments.works.trace import counted

SOFTMAX, PLAIN, TERM = "softmax", "attention", "attention with a term"
EAGER, COMPILED = "eager", "torch.compile"
#: Inductor's setting, which it looks at on a GPU.
ONLINE = {f"{COMPILED}, online_softmax {name}": on for name, on in (("off", False), ("on", True))}
NATIVE, FLEX = "scaled_dot_product_attention", "flex_attention, compiled"
COLUMNS, DIM, CAP = 1 << 17, 64, 20.0
#: Another order of sums is off by less.
WRONG = 1e-2
#: An algorithm keeps all scores if it needs this part of their bytes.
KEEPS = 0.5
Makers = dict[str, Callable[[], Callable[[], torch.Tensor]]]


def softmax(x: torch.Tensor) -> torch.Tensor:
    """As one calls it."""
    return torch.softmax(x, -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, term: bool) -> torch.Tensor:
    """As it is written; the term holds scores below a cap."""
    scores = torch.matmul(q, k.transpose(-2, -1)) * DIM**-0.5
    if term:
        scores = CAP * torch.tanh(scores / CAP)
    return torch.matmul(torch.softmax(scores, -1), v)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The term handed to an algorithm that a human has written."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Any, *_: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return partial(torch.compile(flex_attention, dynamic=False), q, k, v, score_mod=capped)


def patched(x: torch.Tensor, online: bool) -> Callable[[], torch.Tensor]:
    """Softmax compiled with or without its online form.

    Raises:
        NotImplementedError: this torch has no such form.
    """
    from torch._inductor import config

    if not hasattr(config, "online_softmax"):
        raise NotImplementedError(f"torch {torch.__version__} has no online_softmax")
    return partial(torch.compile(softmax, dynamic=False, options={"online_softmax": online}), x)


def softmaxes(device: torch.device, quick: bool) -> tuple[dict[str, int], Makers]:
    """Ways of a softmax over long rows."""
    cuda = device.type == "cuda"
    x = torch.rand(4 if quick else 2048 if cuda else 128, 256 if quick else COLUMNS, device=device)
    compiled: Makers = {COMPILED: lambda: partial(torch.compile(softmax, dynamic=False), x)}
    if cuda:
        compiled = {name: partial(patched, x, on) for name, on in ONLINE.items()}
    return {"numel": x.numel(), "all": x.nbytes}, {EAGER: lambda: partial(softmax, x), **compiled}


def attentions(device: torch.device, quick: bool, term: bool) -> tuple[dict[str, int], Makers]:
    """Ways of an attention over n rows, with the term or without."""
    n = 64 if quick else 8192 if device.type == "cuda" else 2048
    q, k, v = (torch.rand(1, 1, n, DIM, device=device) for _ in "qkv")
    makers: Makers = {
        EAGER: lambda: partial(attention, q, k, v, term),
        COMPILED: lambda: partial(torch.compile(attention, dynamic=False), q, k, v, term),
    }
    makers |= (
        {FLEX: lambda: flex(q, k, v)} if term else {NATIVE: lambda: partial(scaled_dot_product_attention, q, k, v)}
    )
    return {"numel": n * DIM, "all": 4 * n * n}, makers


WORKS: dict[str, Callable[[torch.device, bool], tuple[dict[str, int], Makers]]] = {
    SOFTMAX: softmaxes,
    PLAIN: partial(attentions, term=False),
    TERM: partial(attentions, term=True),
}


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way: bytes at the peak of a call, kernels, the largest error, times (µs)."""
    run.rounds, run.seconds = run.size((20, 1.0), (3, 0.1))
    hardware = witnesses.of_hardware(run, works, run.quick)
    for work, make in run.each(WORKS.items()):
        about, makers = make(run.device, run.quick)
        cases, seen, first = [], {}, None
        for name, build in makers.items():
            if run.quick and run.device.type == "cpu" and name in (COMPILED, FLEX):
                run.left_out.append(f"{work}, {name}: takes a compiler and tens of seconds")
                continue
            with run.attempt(f"{work}, {name}", (Exception,)):
                call = build()
                out = call()
                first = out if first is None else first
                error = float((out - first).abs().max() / first.abs().max())
                assert error < WRONG, f"off from eager by {error:.2g} of its largest"
                call()
                kernels = counted(call).kernels if run.device.type == "cuda" else None
                seen[name] = {"error": error, "kernels": kernels, "extra": weight.extra(call, run.device)}
                cases.append(Case(name, call))
        for row in run.time(cases, work=work, device=run.device.type, **about):
            found = hardware.get(f"{work}, {row['case']}", {})
            yield {**row, **seen[row["case"]], "moved": found.get("bytes")}


def works(device: str, quick: bool) -> witnesses.Works:
    """In the process whose kernels are counted."""
    for work, make in WORKS.items():
        for name, build in make(chosen_device(device), quick)[1].items():
            yield f"{work}, {name}", build


def derive(rows: Rows) -> Rows:
    """Bytes at the peak in units of all scores (of softmax: of its input), and whether an attention keeps them all."""
    found = Rows()
    for group in rows.groups("work"):
        for row in on_one_clock(group):
            share = row["extra"] / row["all"]
            each = row["moved"] / row["all"] if row["moved"] is not None else None
            found.append({**row, "share": share, "each": each, "keeps": int(share >= KEEPS)})
    return found


def sentence(rows: Rows) -> str:
    """What was rewritten, and what was not."""
    lines = []
    for work in (PLAIN, TERM):
        if row := rows.first(work=work, case=COMPILED):
            lines.append(f"- {work}, compiled: {'keeps all n² scores' if row['keeps'] else 'was rewritten'}.")
    return "\n".join(lines)


TABLES = [
    Table("{work} on {device}, {clock}", by=("work",), columns={
        "way": "case", "kernels": "kernels", "ms": ms("time"), "MiB at the peak": mib("extra"),
        "÷ all scores (softmax: its input)": formatted("share", "{:.2f}"),
        "ncu: bytes ÷ those": formatted("each", "{:.2f}"), "error": formatted("error", "{:.1e}"),
    })
]  # fmt: skip
TEXTS = [Text("rewrite", sentence)]
