"""What does a loop cost whose every 20th batch needs more memory than the state leaves?

Answer (H200, 2026-11): a large batch 0.7 s instead of 0.05 if all 2.1 GB of state make room and come back, 0.57 if
only what is needed does; ordinary steps, those behind it too, cost what they do on a large card, and the losses are
the same bits.

The small card is simulated.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from experiments.lab import Column, Page, Row, Rows, Run, formatted, gb
from experiments.pictures import Lines
from experiments.works.models import HYPER
from experiments.works.paged import digest
from pagedopt import PagedAdamW, run_with_room
from pagedopt.system.virtual import device_page_limit

# --- a small card, simulated on a large one

SPILLING, BACK = "spilling", "taking back"


class OnCard(PagedAdamW):
    """PagedAdamW on a card of ``nbytes``.

    Attributes:
        moves: rows of what spilling and taking back took.
    """

    nbytes: int
    moves: list[dict[str, Any]]

    @contextlib.contextmanager
    def inserted(self, nbytes: int, state: int) -> Iterator[None]:
        """The card is there for the block, with so many bytes of state on it."""
        self.nbytes, self.moves = nbytes, []
        with device_page_limit(nbytes, torch.cuda.memory_reserved):
            try:
                self.cap(state)
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)

    def cap(self, state: int) -> None:
        """Let torch have what so many bytes of state leave."""
        share = (self.nbytes - state) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Pages move in the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.moves.append({"what": what, "ms": (time.perf_counter() - begin) * 1e3, "clock": "wall"})
            self.cap(self.memory_report().by_place.get("device", 0))

    def spill(self, nbytes: int | str | None = None) -> int:
        """Then torch may have more."""
        with self.timed(SPILLING):
            return super().spill(nbytes)

    def unspill(self) -> None:
        """Then torch may have less."""
        with self.timed(BACK):
            super().unspill()


# --- the question

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
#: Steps of a loop, and which of them are large (counted from 1).
STEPS, EVERY = 65, 20
#: Rows of a batch, and how many times as many a large one has.
ROWS, LARGER = 2048, 4
#: Width of a layer, and how many there are.  Activations of less than a segment of torch's allocator (20 MiB) would
#: leave a small card in pieces, so a quick run has fewer layers and no smaller ones.
WIDTH, DEPTH, QUICK_DEPTH = 4096, 16, 4
#: Steps at the beginning that load and tune things, in no statistic.
WARM = 5
UNPAGED, SPILL_ALL, SPILL_SOME = "unpaged, large card", "spills all", "spills what is needed"
#: Kinds of steps.
ORDINARY, LARGE, BEHIND = "ordinary", "large", "behind"
#: Kinds of rows: a time, the card with what was compared on it, and what the times of a loop say (derived).
#: Of the loops that are kept, times are medians, but for a turn's steps, which are there to be drawn.
TIME, CARD, LOOP = "time", "card", "loop"
#: Bytes of a card on which nothing is missing, and options of who may be on a small one.
LARGE_CARD, MAPPED = 1 << 60, {"placement": "mapped", "device_budget": "100%"}
#: Of the weights at first; and a small learning rate: the losses must stay finite to be compared.
STD, RATE = 0.5 * WIDTH**-0.5, 2e-5


class Training:
    """A loop over residual layers and batches that are the same every time; backward needs two activations a layer."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.device = run.device
        depth = run.size(DEPTH, QUICK_DEPTH)
        generator = torch.Generator(device=self.device).manual_seed(3)
        layers = (torch.empty(WIDTH, WIDTH, device=self.device) for _ in range(depth))
        self.weights = [torch.nn.Parameter(layer.normal_(0, STD, generator=generator)) for layer in layers]
        self.state_bytes = 8 * depth * WIDTH**2
        self.optimizer = OnCard(self.weights, **HYPER | {"lr": RATE}, **options)

    def batch(self, step: int) -> torch.Tensor:
        """Random rows that depend on the step alone."""
        generator = torch.Generator(device=self.device).manual_seed(step)
        rows = ROWS * (LARGER if step % EVERY == 0 else 1)
        return torch.empty(rows, WIDTH, device=self.device).normal_(generator=generator)

    def forward_and_backward(self, step: int) -> torch.Tensor:
        """The loss of mirroring a batch."""
        self.optimizer.zero_grad()
        x = self.batch(step)
        wanted = x.flip(-1)
        for weight in self.weights:
            x = x + F.gelu(F.linear(x, weight))
        loss = F.mse_loss(x, wanted)
        loss.backward()
        return loss.detach().clone()  # the storage of what mse_loss returns is that of its whole input

    def loop(self, steps: int = STEPS, spilled: int | None = 0) -> Iterator[Row]:
        """A row per step, with its loss and its time; so many bytes make room for what runs out of memory."""
        for step in range(1, steps + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run = functools.partial(self.forward_and_backward, step)
            loss = run() if spilled == 0 else run_with_room(self.optimizer, run, spilled)
            self.optimizer.step()
            torch.cuda.synchronize()
            row = {"step": step, "ms": (time.perf_counter() - begin) * 1e3, "clock": "wall", "loss": float(loss)}
            kind = {0: LARGE, 1: BEHIND}.get(step % EVERY, ORDINARY)
            yield row | ({"what": kind} if step > WARM else {})


def card_bytes(state: int, normal: int, spiked: int) -> int:
    """A card on which an ordinary step has room beside all state, and a large one only beside half of it.

    Raises:
        ValueError: no size of the card takes an ordinary batch and refuses a large one.
    """
    left = max(int(1.05 * normal), spiked - state // 2)
    if left > 0.98 * spiked:
        raise ValueError(f"a large step takes {spiked:,} bytes, an ordinary one {normal:,}: too close to tell apart")
    return state + left


def measure(run: Run) -> Iterator[Row]:
    """The times of every loop, step by step, then the card and what was compared."""
    # Without it torch's cache of a small card is in pieces after the first batch of another size (for all contenders).
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        undo.callback(settings, "expandable_segments:False")
        torch.set_float32_matmul_precision("high")
        settings("expandable_segments:True")
        about = _needs(run)
        run.free()
        results = []
        for turn in range(2):  # in turn, so that a drifting clock meets all alike
            for name, spilled in ((UNPAGED, 0), (SPILL_ALL, None), (SPILL_SOME, int(1.5 * about["needed"]))):
                card, options = (LARGE_CARD, {"placement": "device"}) if name == UNPAGED else (about["card"], MAPPED)
                with run.attempt(name):
                    rows, bits = _trained(run, card, STEPS, spilled, **options)
                    results.append((bits, [row["loss"] for row in rows if "loss" in row]))
                    yield from ({"kind": TIME, "loop": name, "turn": turn, **row} for row in rows)
        same = all(result == results[0] for result in results)
        yield {"kind": CARD, **about, "same": same, "helpless": _helpless(run, about["card"])}


def _helpless(run: Run, card: int) -> str:
    """What the same loop says on that card without spilling."""
    try:
        _trained(run, card, EVERY, 0, **MAPPED)
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error)[:160]}"
    return "finished"


def _needs(run: Run) -> Row:
    """What torch holds in ordinary steps, and has in use in a large one, the state not counted; and a card for that."""
    training = Training(run, **MAPPED)
    torch.cuda.reset_peak_memory_stats(run.device)
    list(training.loop(WARM))
    normal = torch.cuda.max_memory_reserved(run.device)
    torch.cuda.reset_peak_memory_stats(run.device)
    training.forward_and_backward(EVERY)
    torch.cuda.synchronize()
    spiked, state = torch.cuda.max_memory_allocated(run.device), training.state_bytes
    card = card_bytes(state, normal, spiked)
    return {"card": card, "state_bytes": state, "normal": normal, "spiked": spiked, "needed": spiked + state - card}


def _trained(run: Run, card: int, steps: int, spilled: int | None, **options: Any) -> tuple[list[Row], str]:
    """Rows of a loop on a card, and the bits of its weights."""
    training = Training(run, **options)
    with training.optimizer.inserted(card, training.state_bytes):
        rows = list(training.loop(steps, spilled))
    return rows + training.optimizer.moves, digest(training.weights)


def derive(rows: Rows) -> Rows:
    """Medians (ms) of every loop, and over the unpaged one's; how many finish, if without spilling there is no room."""
    about = {**rows.where(kind=CARD)[0], "kind": LOOP, "clock": "wall"}
    loops = Rows()
    for times in rows.where(kind=TIME).groups("loop"):
        medians = {w: statistics.median(row["ms"] for row in times.where(what=w)) for w in times.values("what")}
        loops.append({**about, "loop": times[0]["loop"], **medians})
    unpaged = loops.number(ORDINARY, loop=UNPAGED)
    spilling = [row for row in loops if row["loop"] != UNPAGED and unpaged]
    for row in spilling:
        row["slowdown"] = row[ORDINARY] / unpaged
        row["slower"] = 100 * (row["slowdown"] - 1)
    finished = len(spilling) if about["helpless"].startswith("out of memory") else 0
    loops.append({**about, "loop": f"without spilling: {about['helpless']}", "finished": finished})
    return Rows([*loops, *(row for row in rows.where(turn=0) if row.get("step", 0) > WARM)])


def title(rows: Rows) -> str:
    """The card, and what was needed of it."""
    card, state, normal, spiked = (gb(name)(rows[0]) for name in ("card", "state_bytes", "normal", "spiked"))
    return (
        f"every 20th batch is four times as large; card {card} GB, state {state} GB, torch holds {normal} GB in an "
        f"ordinary step and needs {spiked} GB in a large one; losses {'the same' if rows[0]['same'] else 'DIFFERENT'}"
    )


COLUMNS: dict[str, Column] = {
    "loop": "loop",
    "ordinary step, ms": ORDINARY,
    "large": LARGE,
    "the one behind it": BEHIND,
    "spilling": SPILLING,
    "taking back": BACK,
    "÷ unpaged": formatted("slowdown", "{:.3f} x", ""),
}


class Spikes(Lines):
    """Lines whose names stand beside their last peaks."""

    def line(self, axes: Any, i: int, rows: Rows) -> tuple[float, float, str, str]:
        """A line; of its end, the last large step's."""
        *_, name, color = super().line(axes, i, rows)
        x, y, _ = [point for point in self.points(rows) if point[0] % EVERY == 0][-1]
        return x, y, name, color


TITLE = "Every 20th batch needs more memory than is left beside the state"
SHOWN = Spikes(title=TITLE, unit="ms", x="step", y="ms", each="loop", log="y", inches=4.0)


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    page.table(title, rows.where(kind=LOOP), COLUMNS)
    page.picture("spikes", rows.where(kind=TIME), [SHOWN])
    page.bar("spikes: loops that finish where the card is too small without spilling",
        rows.where(kind=LOOP), "finished", at_least=2)  # fmt: skip
    page.bar("spikes: the other steps, time over unpaged", rows.where(kind=LOOP), "slower", at_most=3, unit="%")
    page.bar(f"spikes: losses that differ from '{UNPAGED}'", rows.where(kind=LOOP),
        lambda rows: float(not rows[0]["same"]), at_most=0)  # fmt: skip
