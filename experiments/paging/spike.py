"""What does a loop cost whose every 20th batch needs more memory than the state leaves?

Answer (H200, 2026-11): a large batch 0.7 s instead of 0.05 if all 2.1 GB of state make room and come back, 0.57 if
only what is needed does; ordinary steps, those behind it too, cost what they do on a large card, and the losses are
the same bits.

The small card is simulated: torch's allocator gets a cap.  Device pages of ``placement="mapped"`` are not torch's, so
the cap is the card less the state on it, set anew whenever pages move, and a device page that would not fit beside
what torch holds is refused with the driver's own error.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from experiments.harness.columns import gb
from experiments.harness.plot import LETTERS, PAGE, Plot, label_beside, look
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table
from experiments.works.models import HYPER
from experiments.works.paged import digest
from pagedopt import PagedAdamW, run_with_room
from pagedopt.system.cuda import driver, virtual

NEEDS_GPU = True
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
#: Kinds of rows: the medians of a loop, with the card and what was compared, and a loop's steps.
LOOP, STEP = "loop", "step"
#: A small learning rate: the losses must stay finite to be compared.
OPTIONS: dict[str, Any] = {**HYPER, "lr": 2e-5}


class Blocks(torch.nn.Module):
    """Residual layers: what backward needs of a batch is two activations a layer."""

    def __init__(self, depth: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device=device).manual_seed(3)
        self.layers = torch.nn.ParameterList(
            torch.empty(WIDTH, WIDTH, device=device).normal_(0, 0.5 * WIDTH**-0.5, generator=generator)
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean squared error of mirroring the input."""
        wanted = x.flip(-1)
        for weight in self.layers:
            x = x + F.gelu(F.linear(x, weight))
        return F.mse_loss(x, wanted)


class SmallCard:
    """A card of ``nbytes``: torch may have what the state leaves, and the state gets pages that torch leaves."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes, self.state = device, nbytes, 0

    def fit(self, optimizer: PagedAdamW) -> None:
        """Set the cap for the pages that are on the device now."""
        self.state = optimizer.memory_report().by_place.get("device", 0)
        self.cap(self.nbytes - self.state)

    def cap(self, nbytes: int) -> None:
        """Let torch have so many bytes and no more."""
        total = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)

    @contextlib.contextmanager
    def inserted(self) -> Iterator[SmallCard]:
        """The card goes with the block."""
        create = virtual.Range._create

        def limited(pages: virtual.Range, nbytes: int, where: driver.Location) -> Any:
            if where is driver.Location.DEVICE:
                if torch.cuda.memory_reserved(self.device) + self.state + nbytes > self.nbytes:
                    raise driver.CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "the small card is full")
                self.state += nbytes
            return create(pages, nbytes, where)

        virtual.Range._create = limited  # type: ignore[method-assign, assignment]
        try:
            yield self
        finally:
            virtual.Range._create = create  # type: ignore[method-assign]
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


class OnSmallCard(PagedAdamW):
    """PagedAdamW that tells a :class:`SmallCard` where its pages are."""

    card: SmallCard
    taken: dict[str, list[float]]

    def spill(self, nbytes: int | str | None = None) -> int:
        """Then torch may have more."""
        begin = time.perf_counter()
        given = super().spill(nbytes)
        self.taken["spill_ms"].append((time.perf_counter() - begin) * 1e3)
        self.card.fit(self)
        return given

    def unspill(self) -> None:
        """Then torch may have less."""
        begin = time.perf_counter()
        try:
            super().unspill()
        finally:
            self.taken["unspill_ms"].append((time.perf_counter() - begin) * 1e3)
            self.card.fit(self)


class Training:
    """A training loop on a model and batches that are the same every time."""

    def __init__(self, run: Run) -> None:
        self.device, self.depth = run.device, run.size(DEPTH, QUICK_DEPTH)

    def model(self) -> Blocks:
        """Always with the same weights."""
        return Blocks(self.depth, self.device)

    @property
    def state_bytes(self) -> int:
        """Bytes of the model's AdamW state."""
        return 8 * self.depth * WIDTH**2

    def batch(self, step: int) -> torch.Tensor:
        """Random rows that depend on the step alone."""
        rows = ROWS * (LARGER if large(step) else 1)
        generator = torch.Generator(device=self.device).manual_seed(step)
        return torch.empty(rows, WIDTH, device=self.device).normal_(generator=generator)

    def loop(
        self, model: Blocks, optimizer: torch.optim.Optimizer, steps: int,
        room: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Losses and wall times (ms) of the steps; ``room`` runs what may run out of memory."""
        losses: list[torch.Tensor] = []
        taken: list[float] = []
        for step in range(1, steps + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()

            def forward_and_backward(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(self.batch(step))
                loss.backward()
                return loss.detach().clone()  # the storage of what mse_loss returns is that of its whole input

            losses.append(forward_and_backward() if room is None else room(forward_and_backward))
            optimizer.step()
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - begin) * 1e3)
        return {"losses": [float(loss) for loss in losses], "ms": taken, "digest": digest(list(model.parameters()))}


def large(step: int) -> bool:
    """Whether a step (counted from 1) has a large batch."""
    return step % EVERY == 0


def card_bytes(state: int, normal: int, spiked: int) -> int:
    """A card on which an ordinary step has room beside all state, and a large one only beside half of it.

    Args:
        state: bytes of optimizer state.
        normal: what torch holds in an ordinary step.
        spiked: what it has in use in a large one.

    Raises:
        ValueError: no size of the card takes an ordinary batch and refuses a large one.
    """
    left = max(int(1.05 * normal), spiked - state // 2)
    if left > 0.98 * spiked:
        raise ValueError(f"a large step takes {spiked:,} bytes, an ordinary one {normal:,}: too close to tell apart")
    return state + left


def measure(run: Run) -> Iterator[Row]:
    """The medians of every loop, beside the card and what was compared, and its steps one by one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    # Without it torch's cache of a small card is in pieces after the first batch of another size (for all contenders).
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    settings("expandable_segments:True")
    try:
        yield from _rows(run)
    finally:
        settings("expandable_segments:False")
        torch.set_float32_matmul_precision(before)


def _rows(run: Run) -> list[Row]:
    training = Training(run)
    normal, spiked = _needs(training)
    run.free()
    card = SmallCard(run.device, card_bytes(training.state_bytes, normal, spiked))
    needed = spiked + training.state_bytes - card.nbytes
    loops: dict[str, list[dict[str, Any]]] = {}
    for _ in range(2):  # in turn, so that a drifting clock meets all alike
        loops.setdefault(UNPAGED, []).append(_unpaged(training))
        run.free()
        for name, nbytes in ((SPILL_ALL, None), (SPILL_SOME, int(1.5 * needed))):
            run.free()
            with run.attempt(name):
                found = _spilling(training, card, nbytes)
                loops.setdefault(name, []).append(found)
    helpless = _helpless(training, card)
    medians = {name: summary(many) for name, many in loops.items()}
    for name, each in medians.items():
        run.say(
            f"{name}: {each['ordinary_ms']:.2f} ms, large {each['large_ms']:.0f} ms, behind {each['behind_ms']:.0f} ms"
        )
    same = all(one[what] == loops[UNPAGED][0][what] for many in loops.values() for one in many
               for what in ("losses", "digest"))  # fmt: skip
    about = {"card": card.nbytes, "state_bytes": training.state_bytes, "normal": normal, "spiked": spiked,
             "needed": needed, "same": same, "helpless": helpless}  # fmt: skip
    return as_rows(about, medians, {name: many[0]["ms"] for name, many in loops.items()}, loops[UNPAGED][0]["losses"])


def as_rows(
    about: Row, medians: dict[str, dict[str, float]], timeline: dict[str, list[float]], losses: list[float]
) -> list[Row]:
    """A row of every loop's medians, with what is known about all; one of every step, with its loss if unpaged."""
    loops = [{"kind": LOOP, "loop": name, **found, **about} for name, found in medians.items()]
    steps = [
        {"kind": STEP, "loop": name, "step": step, "ms": ms} | ({"loss": loss} if name == UNPAGED else {})
        for name, times in timeline.items()
        for step, (ms, loss) in enumerate(zip(times, losses, strict=True), 1)
    ]
    return loops + steps


def summary(loops: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians (ms) of ordinary steps, of large ones, of those behind them and of spilling, over all loops."""
    kinds: dict[str, list[float]] = {"ordinary_ms": [], "large_ms": [], "behind_ms": []}
    for kind in ("spill_ms", "unspill_ms"):
        if times := [ms for loop in loops for ms in loop.get(kind, ())]:
            kinds[kind] = times
    for loop in loops:
        for step, ms in enumerate(loop["ms"], 1):
            if step <= WARM:
                continue
            kind = "large_ms" if large(step) else "behind_ms" if large(step - 1) else "ordinary_ms"
            kinds[kind].append(ms)
    return {kind: statistics.median(times) for kind, times in kinds.items()}


def _needs(training: Training) -> tuple[int, int]:
    """Bytes that torch holds in ordinary steps, and has in use in a large one, the state not counted."""
    model = training.model()
    optimizer = PagedAdamW(model.parameters(), **OPTIONS, placement="mapped", device_budget=training.state_bytes)
    torch.cuda.reset_peak_memory_stats(training.device)
    training.loop(model, optimizer, WARM)
    normal = torch.cuda.max_memory_reserved(training.device)
    torch.cuda.reset_peak_memory_stats(training.device)
    optimizer.zero_grad()
    model(training.batch(EVERY)).backward()
    torch.cuda.synchronize()
    return normal, torch.cuda.max_memory_allocated(training.device)


def _unpaged(training: Training) -> dict[str, Any]:
    model = training.model()
    optimizer = PagedAdamW(model.parameters(), **OPTIONS, placement="device")
    return training.loop(model, optimizer, STEPS)


def _on(training: Training, card: SmallCard) -> tuple[Blocks, OnSmallCard]:
    """A model and an optimizer whose state, all of it on the card, leaves what the card has left."""
    model = training.model()
    optimizer = OnSmallCard(model.parameters(), **OPTIONS, placement="mapped", device_budget=training.state_bytes)
    optimizer.card, optimizer.taken = card, {"spill_ms": [], "unspill_ms": []}
    card.cap(card.nbytes - training.state_bytes)
    return model, optimizer


def _spilling(training: Training, card: SmallCard, nbytes: int | None) -> dict[str, Any]:
    with card.inserted():
        model, optimizer = _on(training, card)
        found = training.loop(model, optimizer, STEPS, lambda run: run_with_room(optimizer, run, nbytes))
        return {**found, **optimizer.taken}


def _helpless(training: Training, card: SmallCard) -> str:
    """What the same loop says on that card without spilling."""
    with card.inserted():
        model, optimizer = _on(training, card)
        try:
            training.loop(model, optimizer, EVERY)
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error)[:160]}"
    return "finished"


# --- what the loops say, table, bar, plot


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    about = {name: part[name] for name in ("card", "state_bytes", "normal", "spiked", "needed", "same", "helpless")}
    return as_rows(about, part["summary"], part["timeline"], part["losses"])


def derive(rows: Rows) -> Rows:
    """How many times as long as unpaged ordinary steps take; and a line of what a loop without spilling says."""
    loops, steps = rows.where(kind=LOOP), rows.where(kind=STEP)
    unpaged = loops.number("ordinary_ms", loop=UNPAGED)
    spilling = [{**row, "slowdown": row["ordinary_ms"] / unpaged} for row in loops if row["loop"] != UNPAGED]
    helpless = [{"kind": LOOP, "loop": f"without spilling: {row['helpless']}"} for row in loops[:1]]
    return Rows([*loops.where(loop=UNPAGED), *spilling, *helpless, *steps])


def title(rows: Rows) -> str:
    """The card, and what was needed of it."""
    card, state, normal, spiked = (gb(name)(rows[0]) for name in ("card", "state_bytes", "normal", "spiked"))
    return (
        f"every 20th batch is four times as large; card {card} GB, state {state} GB, torch holds {normal} GB in an "
        f"ordinary step and needs {spiked} GB in a large one; losses {'the same' if rows[0]['same'] else 'DIFFERENT'}"
    )


def finished(rows: Rows) -> float:
    """Loops that spill and finish, if without spilling there is no room."""
    helpless = rows[0]["helpless"].startswith("out of memory")
    return float(sum("slowdown" in row for row in rows)) if helpless else 0.0


def slower(rows: Rows) -> float | None:
    """How much longer (%) the ordinary steps of the worst loop take than unpaged."""
    worst = max((row["slowdown"] for row in rows if "slowdown" in row), default=None)
    return None if worst is None else float(100 * (worst - 1))


TABLES = [
    Table(title, where={"kind": LOOP}, columns={
        "loop": "loop", "ordinary step, ms": "ordinary_ms", "large": "large_ms", "the one behind it": "behind_ms",
        "spilling": "spill_ms", "taking back": "unspill_ms",
        "÷ unpaged": lambda row: f"{row['slowdown']:.3f} x" if "slowdown" in row else "",
    })
]  # fmt: skip
BARS = [
    Bar("spikes: loops that finish where the card is too small without spilling", finished, at_least=2, kind=LOOP),
    Bar("spikes: the other steps, time over unpaged", slower, at_most=3, unit="%", kind=LOOP),
    Bar(f"spikes: losses that differ from '{UNPAGED}'", lambda rows: float(not rows[0]["same"]), at_most=0, kind=LOOP),
]


def draw(figure: Any, rows: Rows) -> None:
    """Every step of the loops."""
    figure.set_size_inches(PAGE, 4)
    axes = figure.subplots()
    peaks = []
    for i, times in enumerate(rows.groups("loop")):
        shown = [(row["step"], row["ms"]) for row in times if row["step"] > WARM]
        axes.plot(*zip(*shown, strict=True), markersize=4, linewidth=0.8, **look(i))
        last = max((step for step, ms in shown if ms > 2 * shown[0][1]), default=shown[-1][0])
        peaks.append((last, dict(shown)[last], times[0]["loop"], look(i)["color"]))
    axes.set(yscale="log", xlabel="step", ylabel="ms (log)")
    axes.grid(alpha=0.3)
    axes.set_title("Every 20th batch needs more memory than is left beside the state", fontsize=LETTERS + 1)
    label_beside(axes, peaks)


PLOTS = [Plot("spikes", draw, where={"kind": STEP})]
