"""How many lines does somebody write for AdamW on each rung, and how close does that come to a copy?

Answer (H200, 2026-11): 60 in ours for 96 % of a copy, over 12,290 beneath, which is the whole package with all of its
optimizers; 423 in torch fused for 83 %; 183 in foreach, which compiled come to the copy's rate.

Lines of code without comments, docstrings and blank lines: what one writes for Adam and AdamW, amsgrad included, and
beneath it what was written once for all of them.  Months of work cannot be counted.  Times are of one list of large
tensors, where a copy of the update's bytes is the floor; what is compiled runs in a process of its own beside one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import pagedopt
from experiments.kept import chosen_device
from experiments.lab import Page, Row, Rows, Run, last_line, on_one_clock, percent
from experiments.pictures import Lines
from experiments.works import contenders, lines
from experiments.works.contenders import COMPILED, FOREACH, FUSED, LOOP, OURS, TRITON
from experiments.works.fresh import fresh
from experiments.works.models import Work

MEASURES = ("kernels", "launch", "tables", "optim")
OPTIM = Path(torch.__file__).parent / "optim" / "adam.py"
HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "native" / "cuda"
FUSED_HEADERS = ("adam_utils", "adam_impl", "adam_amsgrad_impl", "adamw_impl", "adamw_amsgrad_impl")
PACKAGE = Path(pagedopt.__file__).parent
RULES = PACKAGE / "rules"
TRITON_TABLE = Path(lines.__file__).with_name("triton_table.py")
#: The same optimizer, of whose rules AdamW's alone is counted, without Adam and amsgrad.
ALONE = f"{OURS}, AdamW alone"


@dataclass(frozen=True)
class Written:
    """What somebody writes.

    Attributes:
        python: functions and classes by file; none named: all of it.
        cuda: files of CUDA.
        beneath: files and folders that were written once for all such optimizers.
    """

    python: Mapping[Path, Sequence[str]]
    cuda: Sequence[Path] = ()
    beneath: Sequence[Path] = ()

    def as_row(self) -> Row:
        """Lines by language; None where a file is not here."""
        try:
            python = sum(lines.of_python(path.read_text(), names) for path, names in self.python.items())
            cuda, beneath = lines.of_files(self.cuda), lines.of_files(self.beneath) or None
        except (OSError, ValueError):
            return dict.fromkeys(("python", "cuda", "beneath", "lines"))
        return {"python": python, "cuda": cuda, "beneath": beneath, "lines": python + cuda}


FUSED_CUDA = [HEADERS / f"fused_{name}.cuh" for name in FUSED_HEADERS]
APPLY = [HEADERS / "MultiTensorApply.cuh"]
TABLE = [PACKAGE / "tables", PACKAGE / "transports"]
WRITTEN = {
    LOOP: Written({OPTIM: ["_single_tensor_adam"]}),
    FOREACH: Written({OPTIM: ["_multi_tensor_adam"]}, beneath=APPLY),
    FUSED: Written({OPTIM: ["_fused_adam"]}, FUSED_CUDA, APPLY),
    COMPILED: Written({OPTIM: ["_multi_tensor_adam"]}),
    # The kernel, and who launches it.
    TRITON: Written({TRITON_TABLE: ["update", "adamw_over_a_table", "TableAdamW"]}, beneath=TABLE),
    OURS: Written({RULES / f"{name}.py": [] for name in ("adamw", "adam", "moments")}, beneath=[PACKAGE]),
    ALONE: Written({RULES / "adamw.py": ["adamw"], RULES / "moments.py": ["moments", "descended"]}),
}


def work(run: Run) -> Work:
    """Tensors so large that only bytes count, and few enough to compile."""
    gpu = run.device.type == "cuda"
    count, side = run.size((24, 4096) if gpu else (12, 1024), (3, 32))
    return Work(f"{count} x {side}²", [(side, side)] * count)


def timed(run: Run, names: Sequence[str]) -> Iterator[Row]:
    """Rows of contenders in rounds with a copy of the update's bytes."""
    asked = work(run)
    builds = {name: contenders.CONTENDERS[name].build for name in names}
    cases, errors = contenders.checked(run, asked, builds, run.device)
    *found, copy = run.time([*cases, contenders.copy_of_bytes(asked, run.device)])
    for row in found:
        yield {**row, "error": errors[row["case"]], "copy": copy, "ended": None}


def measure(run: Run) -> Iterator[Row]:
    """A row per rung: lines by language, and times (µs) beside a copy."""
    gpu = run.device.type == "cuda"
    about = {"work": work(run).name, "device": run.device.type}
    names = contenders.installed(run, [name for name in WRITTEN if name not in (COMPILED, ALONE)])
    found = {row["case"]: row for row in timed(run, [name for name in names if gpu or name != TRITON])}
    run.free()
    if gpu and not run.quick:
        found[COMPILED] = fresh(compiled_share, str(run.device), limit=contenders.LIMIT).as_dict()
    else:
        run.left_out.append(f"times of {COMPILED} and {TRITON}: need a GPU; lines are counted")
    found[ALONE] = found[OURS]
    for name, written in WRITTEN.items():
        times = found.get(name, {"copy": None, "error": None, "ended": "not timed"})
        yield {**about, **times, "case": name, **written.as_row(), "alone": name in (TRITON, ALONE)}
    run.left_out.append("llm.c and apex, four engineers for six months: not measured, and months are not counted")


def compiled_share(device: str) -> Iterator[Row]:
    """In a process of its own: the row of the compiled rung.

    Raises:
        RuntimeError: it could not be built; as it was said.
    """
    run = Run(chosen_device(device), False)
    found = list(timed(run, [COMPILED]))
    if not found:
        raise RuntimeError("; ".join(run.left_out))
    yield from found


def derive(rows: Rows) -> Rows:
    """The share of the copy, lines for each percent of it, and a name with the lines beneath: AdamW alone has ours."""
    found, package = Rows(), (rows.first(case=OURS) or {}).get("beneath")
    for row in on_one_clock(rows):
        share = contenders.of_copy(row, row.get("copy"))
        beneath = package if row["case"] == ALONE else row.get("beneath")
        name = f"{row['case']} ({beneath:,} beneath)" if beneath else row["case"]
        found.append({**row, "share": share, "beneath": beneath, "name": name,
                      "per": row["lines"] / share if share and row["lines"] else None})  # fmt: skip
    return found


def shorter(rows: Rows) -> float | None:
    """Rungs that do as much in fewer lines than ours and come as close to a copy."""
    known = [row for row in rows if row["per"]]
    mine = {row["alone"]: row for row in known if row["case"] in (OURS, ALONE)}
    if len(mine) < 2:
        return None
    pairs = [(row, mine[row["alone"]]) for row in known]
    return sum(row["lines"] < ours["lines"] and row["share"] >= ours["share"] for row, ours in pairs)


PANELS = [
    Lines(
        title="Fewer lines do not cost the rate of a copy",
        unit="share of a copy of the update's bytes, %",
        x="lines",
        y="share",
        each="name",
        label="lines of this optimizer (beneath: of its library)",
        log="x",
        colors=contenders.color,
        inches=4,
    )
]


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    page.table("AdamW over {work} on {device}", rows,
        {"rung": "case", "lines": "lines", "beneath, once": "beneath", "of Python": "python",
        "of CUDA": "cuda", "for": lambda row: "AdamW" if row["alone"] else "Adam, AdamW, amsgrad",
        "µs, {clock}": "time", "of the copy": percent("share", "{:.0f} %"), "lines per %": "per",
        "": last_line()})  # fmt: skip
    page.picture("effort", rows.where(device="cuda"), PANELS)
    page.bar("rungs with fewer lines than ours and as close to a copy", rows.where(device="cuda"), shorter, at_most=0)
