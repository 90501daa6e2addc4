"""Traces in a row of results, and their picture: above each other, on one axis of time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from experiments.lab import Row, Rows, series
from experiments.pictures import BLUE, GRAY, LETTERS, ORANGE, Panel
from experiments.works.trace import Trace

#: Lane, start and length (µs), and what a launch and its kernels have in common, or 0.
Event = tuple[str, float, float, int]
#: Lanes of a picture from top to bottom: their letters in a row, names and colours.
LANES = (("o", "operators", GRAY), ("l", "launches", ORANGE), ("k", "GPU", BLUE))
#: µs of a trace that are drawn, from the first launch on.
MOST = 1200.0
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
    zero = min((event.start for events in lanes.values() for event in events), default=0.0)
    return " ".join(
        f"{lane}{10 * (event.start - zero):.0f},{10 * event.length:.0f},{event.correlation or 0}"
        for lane, events in lanes.items()
        for event in events
    )


def unpacked(text: str) -> Iterator[Event]:
    """The events of a row."""
    for word in text.split():
        start, length, correlation = map(int, word[1:].split(","))
        yield word[0], start / 10, length / 10, correlation


def from_first_launch(events: Iterable[Event]) -> Iterator[Event]:
    """What is not over when the first launch begins, which is at 0; where nothing is launched, the first event is.

    >>> list(from_first_launch([("o", 0.0, 3.0, 0), ("o", 5.0, 9.0, 0), ("l", 7.0, 2.0, 1)]))
    [('o', -2.0, 9.0, 0), ('l', 0.0, 2.0, 1)]
    """
    known = list(events)
    zero = min((start for lane, start, *_ in known if lane == "l"), default=min((e[1] for e in known), default=0.0))
    yield from ((lane, start - zero, length, of) for lane, start, length, of in known if start + length > zero)


class Timeline(Panel):
    """What the host called, what it launched and what ran, in three lanes; each launch is joined to its kernels."""

    def height(self, rows: Rows) -> float:
        """Of three lanes."""
        return 1.15

    def is_wide(self, rows: Rows) -> bool:
        """All have one axis, the longest decides it."""
        return True

    def draw(self, axes: Any, rows: Rows) -> None:
        """The lanes of the first row."""
        events = list(from_first_launch(unpacked(rows[0]["trace"])))
        for at, (lane, _, color) in enumerate(LANES):
            bars = [(start, max(length, 0.2)) for of, start, length, _ in events if of == lane]
            edge = "white" if lane == "o" else color  # what is launched must be seen, however short it is
            axes.broken_barh(bars, (-at - 0.3, 0.6), color=color, edgecolor=edge, linewidth=0.4)
        launched = {correlation: start for lane, start, _, correlation in events if lane == "l"}
        for lane, start, _, correlation in events:
            if lane == "k" and correlation in launched:
                axes.plot((launched[correlation], start), (-1.3, -1.7), color="black", linewidth=0.4)
        axes.set_yticks([-at for at in range(len(LANES))], [name for _, name, _ in LANES])
        axes.set_ylim(-len(LANES) + 0.5, 0.5)
        axes.set_xlabel(self.unit)
        axes.set_xlim(0, MOST)
        if (end := max((start + length for _, start, length, _ in events), default=0.0)) > MOST:
            axes.set_title(f"… until {end:,.0f}", loc="right", fontsize=LETTERS)
        axes.spines[["top", "right"]].set_visible(False)
        axes.sharex(axes.figure.axes[0])
        axes.label_outer()


def by_kind(trace: Trace) -> Iterator[Row]:
    """Kernels of a kind: how many, and how long one takes (µs)."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for event in trace.on_gpu:
        lengths[kind(event.name)].append(event.length)
    for name, found in lengths.items():
        yield {"kind": name, "count": len(found), "clock": "GPU", "each": series(found, "GPU"), "all": sum(found)}


def kind(name: str) -> str:
    """What a kernel does."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), name[:40])
