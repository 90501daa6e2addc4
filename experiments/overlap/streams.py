"""What runs when, in an exposed and in a hidden iteration?

From a trace of torch.profiler: kernels of the model, updates of state, copies up and down.  Times are only to be looked
at: a host that is listened to is slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from experiments.lab import Page, Row, Rows, Run
from experiments.overlap.iteration import EXPOSED, HIDDEN, MODELS, maker
from experiments.pictures import BLUE, GRAY, GREEN, ORANGE, Panel
from experiments.works.trace import Event, traced
from experiments.works.training import Load, Training
from pagedopt.planning.sizes import SIZES

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
OURS = re.compile(r"\bmulti_tensor_apply(_blocks)?(_small_grid)?\b")
#: Lanes from top to bottom, with their colours.
LANES = {"model": GRAY, "updates": BLUE, "copies up": ORANGE, "copies down": GREEN}
#: What is no farther apart is drawn as one (ms).
JOINED = 0.1


def measure(run: Run) -> Iterator[Row]:
    """A row per way: for each lane when something ran, [begin, end] in ms."""
    for way in run.each((EXPOSED, HIDDEN)):
        with run.attempt(way):
            training = Training(run.device, SIZES[run.size(MODELS["355 M"], "tiny")], Load(), maker(way, "float32"))
            if way == HIDDEN:
                training.optimizer.attach(training.model)
            for _ in range(3):
                training.iterate()
            trace = traced(partial(iterations, training, 2))
            yield {"way": way, "model": "355 M", "lanes": spans(trace.on_gpu)}
            del training


def iterations(training: Training, count: int) -> None:
    """So many iterations."""
    for _ in range(count):
        training.iterate()


def spans(events: Iterable[Event]) -> dict[str, list[list[float]]]:
    """When something ran in each lane, from the first event on.

    >>> spans([Event("Memcpy HtoD", "gpu_memcpy", 5000.0, 2000.0), Event("gemm", "kernel", 6000.0, 500.0)])
    {'model': [[1.0, 1.5]], 'updates': [], 'copies up': [[0.0, 2.0]], 'copies down': []}
    """
    found: dict[str, list[list[float]]] = {name: [] for name in LANES}
    events = sorted(events, key=lambda event: event.start)
    for event in events:
        begin, end = ((at - events[0].start) / 1e3 for at in (event.start, event.end))
        lane = found[lane_of(event)]
        if lane and begin - lane[-1][1] < JOINED:
            lane[-1][1] = max(lane[-1][1], end)
        else:
            lane.append([begin, end])
    return {name: [[round(at, 2) for at in span] for span in lane] for name, lane in found.items()}


def lane_of(event: Event) -> str:
    """The lane of what ran."""
    if event.kind == "gpu_memcpy":
        return {"HtoD": "copies up", "DtoH": "copies down"}.get(event.name.split()[1], "model")
    return "updates" if OURS.search(event.name) else "model"


class Streams(Panel):
    """Lanes above each other; the axis is that of the first panel."""

    def height(self, rows: Rows) -> float:
        """Of four lanes."""
        return 1.5

    def is_wide(self, rows: Rows) -> bool:
        """A picture is as wide as its page."""
        return True

    def draw(self, axes: Any, rows: Rows) -> None:
        """The lanes of the first row."""
        for at, (lane, color) in enumerate(LANES.items()):
            bars = [(begin, end - begin) for begin, end in rows[0]["lanes"][lane]]
            axes.broken_barh(bars, (-at - 0.35, 0.7), color=color)
        axes.set_yticks([-at for at in range(len(LANES))], list(LANES))
        axes.set_ylim(-len(LANES) + 0.4, 0.6)
        axes.set_xlabel("ms by the profiler's clock")
        axes.spines[["top", "right"]].set_visible(False)
        axes.sharex(axes.figure.axes[0])
        axes.label_outer()


def report(page: Page, rows: Rows) -> None:
    """A picture."""
    page.picture("streams", rows, [Streams(title="{model} parameters, two iterations, {way}",
        where={"way": way}) for way in (EXPOSED, HIDDEN)],
        "Exposed, the model waits for the step; hidden, the next forward goes on beside it")  # fmt: skip
