"""Traces in a row of results, and their picture: above each other, on one axis of time."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from experiments.harness.plot import LETTERS, PAGE
from experiments.harness.rows import Row, Rows
from experiments.harness.time import Stats
from experiments.works.trace import KERNEL, OPERATOR, Event, Trace, picture

#: Lane → a name and a kind by which a :class:`Trace` knows it again.
LANES = {"o": ("aten::", OPERATOR), "l": ("cudaLaunchKernel", "cuda_runtime"), "k": ("", KERNEL)}
#: What a kernel does, by what its name holds; the first that fits.
KINDS = (
    ("Triton", "triton_"),
    ("LayerNorm + tanh", "norm_tanh"),
    ("LayerNorm", "layer_norm|LayerNorm"),
    ("tanh", "tanh"),
    ("stack", "CatArray|cat_"),
    ("linear", "gemv|gemm|cutlass|cublas|splitK|dot_kernel|reduce_1Block"),
    ("copy", "[Mm]emcpy|copy"),
    ("ReLU", "clamp|relu|launch_clamp|threshold"),
)


def packed(trace: Trace) -> str:
    """What a picture needs of a trace: lane, start, length (tenths of a µs), correlation."""
    lanes = {"o": trace.operators, "l": trace.launches, "k": trace.on_gpu}
    events = [(lane, event) for lane, found in lanes.items() for event in found]
    zero = min((event.start for _, event in events), default=0.0)
    return " ".join(
        f"{lane}{10 * (event.start - zero):.0f},{10 * event.length:.0f},{event.correlation or 0}"
        for lane, event in events
    )


def unpacked(text: str) -> Trace:
    """The trace of a picture."""
    events = []
    for word in text.split():
        start, length, correlation = (int(number) for number in word[1:].split(","))
        name, kind = LANES[word[0]]
        lane = (word[0], 0)
        events.append(Event(name, kind, start / 10, length / 10, lane, correlation or None))
    return Trace(events)


def kind(name: str) -> str:
    """What a kernel does."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), name[:40])


def by_kind(trace: Trace) -> list[Row]:
    """Kernels of a kind: how many, and how long one takes (µs)."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for event in trace.on_gpu:
        lengths[kind(event.name)].append(event.length)
    return [
        {"kind": kind, "count": len(found), "each": vars(Stats.of(found)), "all": sum(found)}
        for kind, found in lengths.items()
    ]


def draw(figure: Any, rows: Rows) -> None:
    """A panel per row that has a trace, the longest deciding the axis."""
    drawn = rows.where(drawn=True)
    if not drawn:
        return
    figure.set_size_inches(PAGE, 0.6 + 1.15 * len(drawn))
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, row in zip(panels, drawn, strict=True):
        picture(axes, unpacked(row["trace"]))
        axes.set_title(row["case"], loc="left", fontsize=LETTERS + 1, pad=2)
        axes.set_xlabel("")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("µs (while the profiler listens)")
