"""How many lines does somebody write for AdamW on each rung, and how close does that come to a copy?

Answer (H200, 2026-11): 60 in ours for 96 % of a copy, 423 in torch fused for 83 %, 183 in foreach, which compiled
come to the copy's rate; what stands beneath ours, for all of its optimizers, is 12,000 lines.

Lines of code without comments, docstrings and blank lines: what one writes for Adam and AdamW, amsgrad included, and
beneath it what was written once for all of them.  Months of work cannot be counted.  Times are of one list of large
tensors, where a copy of the update's bytes is the floor; what is compiled runs in a process of its own beside one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pagedopt
from experiments.harness.columns import by, on_one_clock
from experiments.harness.machine import chosen_device
from experiments.harness.plot import BLUE, GRAY, PAGE, PURPLE, Plot, label_beside
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table, console
from experiments.works import lines
from experiments.works.contenders import (
    COMPILED,
    CONTENDERS,
    COPY,
    FOREACH,
    FUSED,
    LIMIT,
    LOOP,
    OURS,
    TRITON,
    checked,
    copy_of_bytes,
    installed,
)  # fmt: skip
from experiments.works.fresh import fresh
from experiments.works.models import Work

OPTIM = Path(torch.__file__).parent / "optim" / "adam.py"
HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "native" / "cuda"
PACKAGE = Path(pagedopt.__file__).parent
TRITON_TABLE = Path(lines.__file__).with_name("triton_table.py")


@dataclass(frozen=True)
class Written:
    """What somebody writes.

    Attributes:
        python: functions and classes by file; none named: all of it.
        cuda: files of CUDA.
        alone: whether it is AdamW alone, and not Adam and amsgrad, too.
        beneath: files that were written once for all such optimizers; folders are taken whole.
    """

    python: dict[Path, tuple[str, ...]]
    cuda: tuple[Path, ...] = ()
    beneath: tuple[Path, ...] = ()
    alone: bool = False

    def as_row(self) -> Row:
        """Lines by language; None where a file is not here."""
        try:
            found: Row = {
                "python": sum(lines.of_python(path.read_text(), names) for path, names in self.python.items()),
                "cuda": lines.of_files(self.cuda),
                "beneath": lines.of_files([file for path in self.beneath for file in within(path)]) or None,
            }
        except (OSError, ValueError):
            found = {"python": None, "cuda": None, "beneath": None}
        lines_in_all = None if found["python"] is None else found["python"] + found["cuda"]
        return {**found, "lines": lines_in_all, "alone": self.alone}


def within(path: Path) -> list[Path]:
    """A file, or the code in a folder."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".cu", ".cuh"))


FUSED_CUDA = tuple(
    HEADERS / f"fused_{name}.cuh"
    for name in ("adam_utils", "adam_impl", "adam_amsgrad_impl", "adamw_impl", "adamw_amsgrad_impl")
)
APPLY = (HEADERS / "MultiTensorApply.cuh",)
RULES = PACKAGE / "rules"
#: The same optimizer, of whose rules only one is counted.
ALONE = f"{OURS}, AdamW alone"
WRITTEN = {
    LOOP: Written({OPTIM: ("_single_tensor_adam",)}),
    FOREACH: Written({OPTIM: ("_multi_tensor_adam",)}, beneath=APPLY),
    FUSED: Written({OPTIM: ("_fused_adam",)}, FUSED_CUDA, APPLY),
    COMPILED: Written({OPTIM: ("_multi_tensor_adam",)}),
    TRITON: Written(
        {TRITON_TABLE: ("update", "adamw_over_a_table", "TableAdamW")},  # the kernel, and who launches it
        alone=True,
        beneath=(PACKAGE / "tables", PACKAGE / "transports"),
    ),
    OURS: Written({RULES / "adamw.py": (), RULES / "adam.py": (), RULES / "moments.py": ()}, beneath=(PACKAGE,)),
    ALONE: Written({RULES / "adamw.py": ("adamw",), RULES / "moments.py": ("moments", "descended")}, alone=True),
}


def work(run: Run) -> Work:
    """Tensors so large that only bytes count, and few enough to compile."""
    gpu = run.device.type == "cuda"
    count, side = run.size((24, 4096) if gpu else (12, 1024), (3, 32))
    return Work(f"{count} x {side}²", [(side, side)] * count, torch.float32, 28, 5e-5)


def timed(run: Run, names: Sequence[str]) -> Iterator[Row]:
    """Rows of contenders in rounds with a copy of the update's bytes."""
    asked = work(run)
    cases, errors = checked(run, asked, {name: CONTENDERS[name] for name in names}, run.device)
    times = run.measure([*cases, copy_of_bytes(asked, run.device)])
    copy = times.pop(COPY)
    for name, timing in times.items():
        yield {"case": name, "error": errors[name], "copy": copy, "ended": None, **timing}


def measure(run: Run) -> Iterator[Row]:
    """A row per rung: lines by language, and times (µs) beside a copy."""
    gpu = run.device.type == "cuda"
    about = {"work": work(run).name, "device": run.device.type}
    names = [name for name in installed(run, WRITTEN) if name not in (COMPILED, ALONE) and (gpu or name != TRITON)]
    found = {row["case"]: row for row in timed(run, names)}
    run.free()
    if gpu and not run.quick:
        found[COMPILED] = fresh(compiled_share, str(run.device), COMPILED, limit=LIMIT).as_dict()
    else:
        run.left_out.append(f"times of {COMPILED} and {TRITON}: need a GPU; lines are counted")
    found[ALONE] = found[OURS]
    for name, written in WRITTEN.items():
        times: dict[str, Any] = found.get(name, {"copy": None, "error": None, "ended": "not timed"})
        yield {**about, **times, "case": name, **written.as_row()}
    if importlib.util.find_spec("apex") is None:
        run.left_out.append("llm.c and apex, four engineers for six months: not installed, and months are not counted")


def compiled_share(device: str, name: str) -> Iterator[Row]:
    """In a process of its own: the row of a contender that is compiled.

    Raises:
        RuntimeError: it could not be built; as it was said.
    """
    run = Run(chosen_device(device), False, console())
    rows = list(timed(run, (name,)))
    if not rows:
        raise RuntimeError("; ".join(run.left_out))
    yield from rows


def derive(rows: Rows) -> Rows:
    """The share of the copy, and lines for each percent of it."""
    found = Rows()
    for row in on_one_clock(rows):
        copy = by(row["clock"], row["copy"]) if row.get("copy") else None
        share = 100 * copy / row["time"] if copy and row["time"] else None
        found.append({**row, "share": share, "per": row["lines"] / share if share and row["lines"] else None})
    return found


def draw(figure: Any, rows: Rows) -> None:
    """Lines against the share of the copy, every rung by its name."""
    figure.set_size_inches(PAGE, 4)
    axes = figure.subplots()
    colors = {OURS: BLUE, ALONE: BLUE, TRITON: PURPLE, COMPILED: PURPLE}
    points = [(row["lines"], row["share"], row["case"], colors.get(row["case"], GRAY)) for row in rows if row["per"]]
    for x, y, name, color in points:
        axes.plot(x, y, "o" if name == OURS else "s", color=color, markersize=8)
    share = f"share of a copy by {rows[0]['clock']} times, %"
    axes.set(xscale="log", xlabel="lines written for this optimizer (log)", ylabel=share, ylim=(0, 105))
    axes.margins(x=0.15)
    axes.grid(alpha=0.3, which="both")
    label_beside(axes, points, size=10)


def covers(row: Row) -> str:
    """What the lines are for."""
    return "AdamW" if row["alone"] else "Adam, AdamW, amsgrad"


TABLES = [
    Table("AdamW over {work} on {device}", columns={
        "rung": "case", "lines": "lines", "for": covers, "of Python": "python", "of CUDA": "cuda",
        "beneath, once": "beneath", "µs, {clock}": "time",
        "of the copy": lambda row: "-" if row["share"] is None else f"{row['share']:.0f} %",
        "lines per %": "per", "": lambda row: (row.get("ended") or "").strip()[-100:],
    })
]  # fmt: skip


def shorter(rows: Rows) -> float | None:
    """Rungs that do as much in fewer lines than ours and come as close to a copy."""
    mine = {row["alone"]: row for row in rows if row["case"] in (OURS, ALONE) and row["per"]}
    if len(mine) < 2:
        return None
    known = [(row, mine[row["alone"]]) for row in rows if row["per"]]
    return sum(row["lines"] < ours["lines"] and row["share"] >= ours["share"] for row, ours in known)


BARS = [Bar("rungs with fewer lines than ours and as close to a copy", shorter, at_most=0, device="cuda")]
PLOTS = [Plot("effort", draw)]
