"""Pictures of compiled steps: phases of a first one, time against steps, and the graph with its kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.harness.panels import BLUE, COLORS, GRAY, ORANGE, PURPLE, label_beside
from experiments.lab import Rows
from experiments.works.first_steps import COLD, FOREACH, FUSED, OURS_COLD, TRACED, WARM
from experiments.works.phases import PHASES

#: Of the lines against steps.
WAYS = {COLD: PURPLE, WARM: ORANGE, FOREACH: GRAY, FUSED: "black", OURS_COLD: BLUE}
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}


def stacked(figure: Any, rows: Rows) -> None:
    """Phases of cold first steps upon each other, against N, with ours as a line."""
    known = rows.where(what="step", phased=True)
    cold = known.where(way=COLD) or known.where(way=TRACED)
    axes, base, ends = figure.add_subplot(), np.zeros(len(cold)), []
    for name, color in zip(PHASES, COLORS, strict=False):
        high = np.array([row["phases"][name] for row in cold])
        axes.bar(range(len(cold)), high, bottom=base, color=color, width=0.6)
        ends.append((len(cold) - 0.7, float(base[-1] + high[-1] / 2), name, color))
        base += high
    for i, row in enumerate(cold):
        axes.annotate(f"{row['first_s']:.1f} s", (i, base[i]), (0, 3), ha="center", **BESIDE)
    ours = {row["count"]: row["first_s"] for row in rows.where(way=OURS_COLD) if row["first_s"]}
    at = [(i, ours[row["count"]]) for i, row in enumerate(cold) if row["count"] in ours]
    if at:
        axes.plot(*zip(*at, strict=True), color="black", marker="o")
        ends.append((*at[-1], OURS_COLD, "black"))
    axes.set_ylim(0, 1.1 * max(base))
    axes.set_xticks(range(len(cold)), [f"{row['count']:,}" for row in cold])
    axes.set_xlabel("tensors")
    axes.set_ylabel("s until the first step is done, wall")
    axes.set_title(f"{cold[0]['way']}: where the time of the first step goes")
    label_beside(axes, ends)


def crossing(figure: Any, rows: Rows) -> None:
    """All time so far against steps."""
    axes, across, ends = figure.add_subplot(), np.unique(np.logspace(0, 6, 200).astype(int)), []
    for way, color in WAYS.items():
        for row in rows.where(way=way):
            first, later = row["first_s"], row["later"]["median"] / 1e6
            axes.loglog(across, first + (across - 1) * later, color=color)
            ends.append((1e6, first + (1e6 - 1) * later, way, color))
            for paid in (row["paid_foreach"], row["paid_fused"]):
                if way in (COLD, WARM) and paid:
                    up = first + (paid - 1) * later
                    axes.plot(paid, up, marker="o", color=color)
                    axes.annotate(f"{paid:,}", (paid, up), (-5, 5), ha="right", color=color, **BESIDE)
    axes.set_xlabel("steps (log)")
    axes.set_ylabel("s in all, wall (log)")
    axes.set_title(f"{rows[0]['count']:,} tensors: a dot is where a compiled step has paid")
    axes.grid(alpha=0.3)
    label_beside(axes, ends)


def coloured(figure: Any, rows: Rows) -> None:
    """A graph from top to bottom, each node in the colours of the kernels that compute it."""
    nodes = rows[0]["nodes"]
    depth: dict[str, int] = {}
    for name, _, _, inputs in nodes:
        depth[name] = 1 + max((depth[x] for x in inputs if x in depth), default=-1)
    at: dict[str, tuple[float, float]] = {}
    for level in range(max(depth.values(), default=0) + 1):
        line = [name for name in depth if depth[name] == level]
        at |= {name: (i - (len(line) - 1) / 2, -level) for i, name in enumerate(line)}
    figure.set_size_inches(8, 9)
    axes = figure.add_subplot()
    for name, op, kernels, inputs in nodes:
        x, y = at[name]
        for source in inputs:
            axes.plot(*zip(at[source], (x, y), strict=True), color="#BBBBBB", linewidth=0.6, zorder=1)
        for i, kernel in enumerate(kernels or [None]):  # side by side
            color = GRAY if kernel is None else COLORS[kernel % len(COLORS)]
            axes.scatter([x + 0.1 * i], [y], color=color, marker="s" if op == "placeholder" else "o", s=36, zorder=2)
        if op != "placeholder":
            said = name.removeprefix("_foreach_").replace("full_default", "full")
            axes.annotate(said, (x, y), (2, -13), ha="center", **(BESIDE | {"fontsize": 7}))
    used = sorted({kernel for _, _, kernels, _ in nodes for kernel in kernels})
    for i, kernel in enumerate(used):
        where = {"transform": axes.transAxes, "fontsize": 9, "color": COLORS[kernel % len(COLORS)]}
        axes.text(0, 0.03 * (len(used) - i), f"kernel {kernel}", **where)
    axes.text(0, 0, "squares are inputs", transform=axes.transAxes, fontsize=9, color=GRAY)
    axes.set_axis_off()
    axes.set_title(
        f"{rows[0]['case']} over two tensors on {rows[0]['device']}: {len(used)} kernels after fusion (a dot each)"
    )
