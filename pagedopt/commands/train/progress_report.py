"""The end of a run: a table, a sentence, a plot and a JSON file."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ...common.units import text_of_bytes
from ...system import machine
from ..errors import UsageError
from ..results import as_json, new_figure, spread
from ..tables import FittingTable
from .compare import TOLERANCE, Comparison, compare
from .contender import Contender
from .files import replacing
from .sizes import parameter_count
from .train_options import TrainOptions, as_saved

RESULT = "result.json"
FINAL_STEPS = 10  # the final loss is their mean, since batches differ
WARM_UP_STEPS = 5  # left out of the times: compilation, allocation and autotuning happen there


def report(
    options: TrainOptions, contenders: Sequence[Contender], validation: Sequence[float], console: Console
) -> int:
    """Show and write the results; return 1 if the curves part (or one is not finite), else 0."""
    results = {c.kind: summarize(c, loss, options) for c, loss in zip(contenders, validation, strict=True)}
    comparison = None
    if len(contenders) == 2:
        first, second = (contender.curve.losses for contender in contenders)
        comparison = compare(first, second, TOLERANCE[contenders[0].device.type])
    out = Path(options.out)
    console.print(table(list(results.values())))  # first: the disk may be full
    console.print(verdict(comparison, contenders), highlight=False, soft_wrap=True)
    write_json(out / RESULT, options, results, comparison)
    plotted = draw(out / "losses.png", contenders, comparison)
    files = f"{out / 'losses.png'}, {out / RESULT}" if plotted else f"{out / RESULT}"
    note = "" if plotted else " (no plot: matplotlib is not installed; pip install matplotlib)"
    console.print(f"written: {files}{note}", highlight=False, soft_wrap=True)
    finite = all(math.isfinite(loss) for contender in contenders for loss in contender.curve.losses)
    return 0 if finite and (comparison is None or comparison.agree) else 1


def summarize(contender: Contender, validation_loss: float, options: TrainOptions) -> dict[str, Any]:
    """What a contender measured, as plain values."""
    curve = contender.curve
    return {
        "optimizer": contender.label,
        "first_train_loss": curve.losses[0],
        "final_train_loss": statistics.fmean(curve.losses[-FINAL_STEPS:]),
        "validation_loss": validation_loss,
        "tokens_per_second": options.batch * options.block / warm_spread(curve.step_ms)["median"] * 1e3,
        "optimizer_step_ms": warm_spread(curve.optimizer_ms),
        "state_bytes": contender.state_bytes(),
        "losses": curve.losses,
        "step_ms": curve.step_ms,
        "optimizer_ms": curve.optimizer_ms,
    }


def warm_spread(times: Sequence[float]) -> dict[str, float]:
    """The spread of a time per step, without the first steps."""
    return spread(times[min(WARM_UP_STEPS, len(times) - 1) :])


def text_of_places(places: Mapping[str, int]) -> str:
    """Bytes by place as a cell of a table."""
    return ", ".join(f"{text_of_bytes(size)} {place}" for place, size in places.items()) or "none"


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The results side by side."""
    shown = FittingTable("optimizer")
    for heading in ("train loss", "val loss", "tokens/s", "optimizer ms (p10 to p90)", "state"):
        shown.add_column(heading, justify="right")
    for result in results:
        times = result["optimizer_step_ms"]
        shown.add_row(
            result["optimizer"],
            f"{result['final_train_loss']:.4f}",
            f"{result['validation_loss']:.4f}",
            f"{result['tokens_per_second']:,.0f}",
            f"{times['median']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})",
            text_of_places(result["state_bytes"]),
        )
    return shown


def verdict(comparison: Comparison | None, contenders: Sequence[Contender]) -> str:
    """Say in words how the curves compare."""
    first = contenders[0].curve.losses
    fell = f"The loss went from {first[0]:.3f} to {statistics.fmean(first[-FINAL_STEPS:]):.3f} nats per byte."
    if comparison is None:
        return fell
    where = (
        f"the largest difference in {len(first)} steps is {comparison.max_difference:.2g} (step "
        f"{comparison.at_step}), the tolerance {comparison.tolerance:g}"
    )
    if comparison.agree:
        return f"{fell} The curves lie on each other: {where}."
    return f"{fell} The curves DO NOT lie on each other: {where}."


def write_json(path: Path, options: TrainOptions, results: dict[str, Any], comparison: Comparison | None) -> None:
    """Write everything about the run."""
    content = {
        "machine": machine.describe(),
        "options": as_saved(options),
        "parameters": parameter_count(options.shape, options.block),
        "optimizers": results,
        "comparison": comparison and {**vars(comparison), "agree": comparison.agree},
    }
    write_values(path, content)


def write_values(path: Path, content: dict[str, Any]) -> None:
    """Write plain values as JSON, whole or not at all.

    Raises:
        UsageError: see :func:`write`.
    """
    write(path, as_json(content).encode())


def write(path: Path, content: bytes) -> None:
    """Write a file of the run, whole or not at all.

    Raises:
        UsageError: the disk has no room for it, or fails.
    """
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(
            f"--out {path.parent}: {path.name} cannot be written ({error.strerror or error}). Make room there, or name "
            "another folder with --out."
        ) from error


def draw(path: Path, contenders: Sequence[Contender], comparison: Comparison | None) -> bool:
    """Plot the curves and, for two of them, their difference; return False where matplotlib is missing."""
    figure = new_figure(8, 5.5)
    if figure is None:
        return False
    rows = 1 if comparison is None else 2
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[3, 1][:rows])[:, 0]
    styles: tuple[dict[str, Any], ...] = ({"linewidth": 4, "alpha": 0.4}, {"linewidth": 1, "color": "black"})
    for contender, style in zip(contenders, styles, strict=False):
        steps = range(1, len(contender.curve.losses) + 1)
        axes[0].plot(steps, contender.curve.losses, **style)
    axes[0].set_ylabel("training loss (nats per byte)")
    for at, (contender, width) in enumerate(zip(contenders, ("thick", "thin"), strict=False)):
        label, color = f"{width}: {contender.label}", ("tab:blue", "black")[at]
        axes[0].text(0.97, 0.93 - 0.08 * at, label, color=color, ha="right", va="center", transform=axes[0].transAxes)
    axes[0].grid(alpha=0.3)
    if comparison is not None:
        first, second = (contender.curve.losses for contender in contenders)
        axes[1].plot(range(1, len(first) + 1), np.subtract(first, second), linewidth=1)
        axes[1].set_ylabel("difference")
        axes[1].grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write(path, picture.getvalue())
    return True
