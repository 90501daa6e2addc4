"""The end of a run: a table, a sentence, a plot and a JSON file. The second act (spill.py) ends with the same parts."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ...common.units import text_of_bytes
from ...planning.sizes import parameter_count
from ...system import machine
from ..errors import UsageError
from ..results import as_json, new_figure, spread
from ..tables import results_table, say
from .compare import Comparison, broken
from .contender import Contender
from .files import replacing
from .train_options import TrainOptions

RESULT = "result.json"
FINAL_STEPS = 10  # the final loss is their mean, since batches differ
WARM_UP_STEPS = 5  # not timed: they compile, allocate and autotune


def report(
    options: TrainOptions, results: Mapping[str, dict[str, Any]], comparison: Comparison | None, console: Console
) -> int:
    """Say and write what the contenders measured. Return 1 if the curves differ or show a fault, else 0."""
    out, measured = Path(options.out), list(results.values())
    first = measured[0]["losses"]
    said = [f"The loss went from {first[0]:.3f} to {final_loss(first):.3f} nats per byte."]
    names = [result["optimizer"] for result in measured]
    not_finite = broken({result["optimizer"]: result["losses"] for result in measured})
    if comparison and not not_finite:
        said.append(comparison.sentence(len(first), *names))
    faults = not_finite or rising(results)
    say(console, " ".join([*said, *faults]), whole=True)
    content = {
        "machine": machine.describe(),
        "options": asdict(options),
        "parameters": parameter_count(options.shape, options.block),
        "optimizers": dict(results),
        "comparison": comparison and {**vars(comparison), "agree": comparison.agree},
    }
    write_values(out / RESULT, content)
    if draw(out / "losses.png", measured, comparison):
        written = f"{out / 'losses.png'}, {out / RESULT}"
    else:
        written = f"{out / RESULT} (no plot: matplotlib is not installed; pip install matplotlib)"
    say(console, f"written: {written}", whole=True)
    return 1 if faults or (comparison is not None and comparison.agree is False) else 0


def rising(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a sentence if PagedAdamW's loss ends above its start, and torch's, of the same batches, below."""
    if results.keys() != {"paged", "torch"}:
        return []
    (ours, begin, end), (theirs, start, last) = (
        (result["optimizer"], result["first_train_loss"], result["final_train_loss"])
        for result in (results["paged"], results["torch"])
    )
    if not (end > begin and last < start):
        return []
    return [f"The loss of {ours} ROSE from {begin:.3f} to {end:.3f}; that of {theirs} fell to {last:.3f}."]


def summarize(contender: Contender, validation_loss: float, options: TrainOptions) -> dict[str, Any]:
    """Return a contender's measurements as JSON values."""
    curve = contender.curve
    return {
        "optimizer": contender.label,
        "first_train_loss": curve.losses[0],
        "final_train_loss": final_loss(curve.losses),
        "validation_loss": validation_loss,
        "tokens_per_second": options.batch * options.block / warm_spread(curve.step_ms)["median"] * 1e3,
        "optimizer_step_ms": warm_spread(curve.optimizer_ms),
        "queued": contender.queued,
        "state_bytes": contender.state_bytes(),
        **vars(curve),
    }


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean of the last losses."""
    return statistics.fmean(losses[-FINAL_STEPS:])


def warm_spread(times: Sequence[float]) -> dict[str, float]:
    """Return the spread of a time per step, without the first steps."""
    return spread(times[min(WARM_UP_STEPS, len(times) - 1) :])


def text_of_places(places: Mapping[str, int]) -> str:
    """Return bytes by where they are (``device``, ``host``, ``file``) as a cell of a table."""
    return ", ".join(f"{text_of_bytes(size)} {place}" for place, size in places.items()) or "none"


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the contenders' results."""
    rows = []
    for result in results:
        times = result["optimizer_step_ms"]
        row = {
            "optimizer": result["optimizer"],
            "train loss": f"{result['final_train_loss']:.4f}",
            "val loss": f"{result['validation_loss']:.4f}",
            "tokens/s": f"{result['tokens_per_second']:,.0f}",
            "optimizer ms (p10 to p90)": f"{times['median']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})"
            + " queued" * result["queued"],
            "state": text_of_places(result["state_bytes"]),
        }
        rows.append(row)
    return results_table(rows)


def show(console: Console, table: Table, results: Sequence[dict[str, Any]]) -> None:
    """Print a table of results, and what "queued" in it means."""
    console.print(table)
    if any(result["queued"] for result in results):
        say(
            console,
            "queued: these ms are the time to queue the update, which then runs under the next forward and may make it "
            "longer.",
            whole=True,
        )


def write_values(path: Path, content: dict[str, Any]) -> None:
    """Write values as JSON, all or nothing; UsageError if the disk fails."""
    write(path, as_json(content).encode())


def write(path: Path, content: bytes) -> None:
    """Write a file of the run, all or nothing; UsageError if the disk is full or fails."""
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(
            f"--out {path.parent}: {path.name} cannot be written ({error.strerror or error}). Make room there, or name "
            "another folder with --out."
        ) from error


def draw(path: Path, results: Sequence[dict[str, Any]], comparison: Comparison | None) -> bool:
    """Plot the curves and, if there are two, their difference. Return False if matplotlib is missing."""
    figure = new_figure(8, 5.5)
    if figure is None:
        return False
    rows = 1 if comparison is None else 2
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[3, 1][:rows])[:, 0]
    # The second curve is thin and lies on the thick first one.
    styles = (("thick", 4, "tab:blue", 0.4), ("thin", 1, "black", 1.0))
    for result, (name, width, color, alpha), y in zip(results, styles, (0.93, 0.85), strict=False):
        losses = result["losses"]
        axes[0].plot(range(1, len(losses) + 1), losses, linewidth=width, color=color, alpha=alpha)
        text = {"s": f"{name}: {result['optimizer']}", "color": color, "transform": axes[0].transAxes}
        axes[0].text(0.97, y, ha="right", va="center", **text)
    axes[0].set_ylabel("training loss (nats per byte)")
    if comparison is not None:
        first, second = (result["losses"] for result in results)
        axes[1].plot(range(1, len(first) + 1), np.subtract(first, second), linewidth=1)
        axes[1].set_ylabel("difference")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write(path, picture.getvalue())
    return True
