"""Do compilers rewrite mathematics, or do they only fuse what is written?

Answer: see notes/vertical_fusion.md.

A softmax over long rows as it is written reads them for the maximum, for the sum and for the quotient; *online*, in one
pass for both.  Attention as it is written keeps n² scores; what does not is another algorithm.  Asked is what the
compiler makes of attention as everybody writes it, and with a term between that no pattern of its library knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.columns import formatted, mib, ms
from experiments.comparing import on_one_clock
from experiments.lab import Page, Row, Rows, Run
from experiments.works.witnesses import BY_COMPILER, EAGER, Call, Way, Works, witnessed

SOFTMAX, PLAIN, TERM = "softmax", "attention", "attention with a term"
NATIVE, FLEX = "scaled_dot_product_attention", "flex_attention, compiled"
COLUMNS, DIM, CAP = 1 << 17, 64, 20.0
#: An algorithm keeps all scores if it needs this part of their bytes.
KEEPS = 0.5
#: What bytes are told in units of, and the ways.
Prepared = tuple[int, dict[str, Way]]


def softmax(x: torch.Tensor) -> torch.Tensor:
    """As one calls it."""
    return torch.softmax(x, -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, term: bool) -> torch.Tensor:
    """As it is written; the term holds scores below a cap."""
    scores = torch.matmul(q, k.transpose(-2, -1)) * DIM**-0.5
    if term:
        scores = CAP * torch.tanh(scores / CAP)
    return torch.matmul(torch.softmax(scores, -1), v)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """The term handed to an algorithm that a human has written."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Any, *_: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return partial(torch.compile(flex_attention, dynamic=False), q, k, v, score_mod=capped)


def softmaxes(device: torch.device, quick: bool) -> Prepared:
    """Over long rows, in units of their bytes; Inductor looks at its setting on a GPU."""
    cuda = device.type == "cuda"
    x = torch.rand(4 if quick else 2048 if cuda else 128, 256 if quick else COLUMNS, device=device)

    def compiled(**options: Any) -> Call:
        return partial(torch.compile(softmax, dynamic=False, options=options), x)

    ways = {EAGER: Way(lambda: partial(softmax, x)), BY_COMPILER: Way(compiled, compiled=True)}
    if cuda:
        del ways[BY_COMPILER]
        for name, on in (("off", False), ("on", True)):
            ways[f"{BY_COMPILER}, online_softmax {name}"] = Way(partial(compiled, online_softmax=on), compiled=True)
    return x.nbytes, ways


def attentions(device: torch.device, quick: bool, term: bool) -> Prepared:
    """Over n rows, with the term or without, in units of the bytes of all n² scores.

    In float16 on a GPU: for float32 Inductor looks up no pattern there, unless TF32 is allowed.
    """
    cuda = device.type == "cuda"
    n = 64 if quick else 8192 if cuda else 2048
    dtype = torch.float16 if cuda else torch.float32
    q, k, v = (torch.rand(1, 1, n, DIM, device=device).to(dtype) for _ in "qkv")
    ways = {
        EAGER: Way(lambda: partial(attention, q, k, v, term)),
        BY_COMPILER: Way(lambda: partial(torch.compile(attention, dynamic=False), q, k, v, term), compiled=True),
    }
    if term:
        ways[FLEX] = Way(lambda: flex(q, k, v), compiled=True)
    else:
        ways[NATIVE] = Way(lambda: partial(scaled_dot_product_attention, q, k, v))
    return n * n * dtype.itemsize, ways


WORKS: Works = {SOFTMAX: softmaxes, PLAIN: partial(attentions, term=False), TERM: partial(attentions, term=True)}


def measure(run: Run) -> Iterator[Row]:
    """A row per work and way (:func:`experiments.works.witnesses.witnessed`)."""
    run.rounds, run.seconds = run.size((20, 1.0), (3, 0.1))
    yield from witnessed(run, __name__, WORKS)


def derive(rows: Rows) -> Rows:
    """Bytes at the peak in units of all scores (of softmax: of its input), and whether an attention keeps them all."""
    known = [row for group in rows.groups("work") for row in on_one_clock(group)]
    shares = [row["extra"] / row["unit"] for row in known]
    return Rows({**row, "share": share, "keeps": int(share >= KEEPS)} for row, share in zip(known, shares, strict=True))


def report(page: Page, rows: Rows) -> None:
    """A table."""
    page.table("what compilers make of it on {device}, {clock}", rows,
        {"work": "work", "way": "case", "kernels": "kernels", "ms": ms("time"),
        "MiB at the peak": mib("extra"), "÷ all scores (softmax: its input)": formatted("share", "{:.2f}"),
        "ncu: bytes ÷ those": formatted(lambda row: row["ncu"] and row["ncu"] / row["unit"], "{:.2f}")})  # fmt: skip
