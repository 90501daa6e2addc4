"""What the experiments print and keep: verdicts on bars, JSON, plots, and the tables of a note."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from experiments.revision import HELP, ROOT, check_source, this_revision, words
from pagedopt.commands.results import as_json, new_figure
from pagedopt.system import machine

RESULTS = ROOT / "experiments" / "results"
NOTES = ROOT / "notes"
PACKAGES = ("torch", "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "bitsandbytes", "torchao")


@dataclass(frozen=True)
class Bar:
    """A number to reach.  ``measured`` is None where it could not be measured here."""

    work: str
    measured: float | None
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "met": self.met}

    def words(self) -> tuple[str, str, str, str]:
        """Work, bar, measured, verdict."""
        sign = "≥" if self.at_least else "≤"
        measured = "-" if self.measured is None else f"{number(self.measured)} {self.unit}".strip()
        verdict = {True: "met", False: "NOT met", None: "not measured here"}[self.met]
        return self.work, f"{sign} {number(self.limit)} {self.unit}".strip(), measured, verdict


def number(value: float | None) -> str:
    """Three digits, and thousands separated."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def options(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every experiment takes."""
    first = (description or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=first, epilog=HELP)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test whose numbers mean nothing")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: experiments/results")
    parser.add_argument(
        "--note", nargs="?", type=Path, const=Path(), metavar="JSON",
        help=f"measure nothing: put the tables of these results (default: the GPU's in --out) into notes/{name}.md",
    )  # fmt: skip
    return parser


def chosen_device(name: str) -> torch.device:
    """The device, with its index, made current.  The revision is looked at, too, before anything is measured.

    Raises:
        SystemExit: the device is not here, or the variable that names the revision holds something else.
    """
    this_revision()
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device here; use --device cpu")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise SystemExit(f"--device is {name}; use cuda or cpu")
    return device


def label(device: torch.device) -> str:
    """The device in a file name: "nvidia-h200", "cpu"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def conditions() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        **machine.describe(), "when": when, "versions": versions,
        "driver": machine.driver_version(), **this_revision(),
    }  # fmt: skip


def write(folder: Path, name: str, device: torch.device, result: dict[str, Any]) -> Path:
    """Write the results as JSON; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{label(device)}.json"
    path.write_text(as_json({"experiment": name, "machine": conditions(), **result}))
    return path


def find(option: Path, folder: Path, name: str) -> dict[str, Any]:
    """Read the results that ``--note`` names, or else those in the folder, a GPU's before the CPU's.

    Raises:
        SystemExit: there are no results, or they are not of a commit (see :func:`check_source`).
    """
    known = [option] if option != Path() else sorted(folder.glob(f"{name}-*.json"), key=_newest_of_a_gpu)
    if not known:
        raise SystemExit(f"no results {name}-*.json in {folder}: run the experiment first, or name a file after --note")
    found = dict(json.loads(known[0].read_text()))
    check_source(found, known[0].name)
    return found


def _newest_of_a_gpu(path: Path) -> tuple[bool, float]:
    """Sorts the newest results of a GPU first."""
    return path.stem.endswith("-cpu"), -path.stat().st_mtime


def verdicts(bars: Sequence[Bar]) -> Table:
    """The bars as a table for a terminal."""
    table = Table("work", title="bars")
    for heading in ("bar", "measured"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    styles = {True: "green", False: "bold red", None: "dim"}
    for bar in bars:
        table.add_row(*bar.words(), style=styles[bar.met])
    return table


def console() -> Console:
    """Where to print: wide enough for the tables where the output goes into a file."""
    found = Console()
    return found if found.is_terminal else Console(width=180)


def show(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are numbers."""
    console.print(f"\n{title}", style="bold", highlight=False, soft_wrap=True)
    table = Table()
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def finish(
    console: Console, folder: Path, name: str, device: torch.device, result: dict[str, Any], bars: Sequence[Bar],
    plots: Mapping[str, Callable[[Any, dict[str, Any]], None]],
) -> int:  # fmt: skip
    """Write JSON and plots, print what was left out and the verdicts; 1 if a bar is missed in a real run, else 0."""
    path = write(folder, name, device, {**result, "verdicts": [bar.as_dict() for bar in bars]})
    written = [path]
    for plot, draw in plots.items():
        if figure := new_figure(11, 7.5):
            draw(figure, result)
            written.append(path.with_name(f"{path.stem}-{plot}.png"))
            figure.savefig(written[-1], dpi=130)
    left_out = list(result.get("left_out", []))
    if plots and len(written) == 1:
        left_out.append("plots: matplotlib is not installed; pip install 'pagedopt[plots]'")
    for line in left_out:
        console.print(f"left out: {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(verdicts(bars))
    if this_revision()["dirty"] is not False:
        console.print(f"measured at {words(this_revision())}: a note is not filled from that", highlight=False)
    if result.get("quick"):
        console.print("--quick: the sizes are toys, the verdicts say nothing")
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    return int(any(bar.met is False for bar in bars) and not result.get("quick"))


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in lines)
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def bars_markdown(result: dict[str, Any]) -> str:
    """The verdicts of results as Markdown."""
    fields = ("work", "measured", "limit", "unit", "at_least")
    rows = [Bar(**{f: bar[f] for f in fields}).words() for bar in result["verdicts"]]
    return markdown(("work", "bar", "measured", "verdict"), rows)


def machine_line(result: dict[str, Any]) -> str:
    """One sentence about the machine."""
    m = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    gpu = f"{m['gpu']} (driver {m['driver']}, CUDA {m['torch_cuda']})" if result["device"] != "cpu" else "CPU only"
    quick = " **A `--quick` run: the numbers mean nothing.**" if result.get("quick") else ""
    return (
        f"Measured {m['when'][:10]} at {words(m)}: {gpu}; {m['processor']}, {m['cores']} cores; "
        f"Python {m['python']}, {versions}.{quick}"
    )


def fill(path: Path, sections: dict[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a note.

    Raises:
        ValueError: the note has no such place.
    """
    text = path.read_text()
    for name, content in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{path} has no place for {name!r}: add the lines '{begin}' and '{end}'")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    path.write_text(text)


def refilled(name: str, options: argparse.Namespace, sections: Callable[[dict[str, Any]], dict[str, str]]) -> bool:
    """Whether ``--note`` asks for the tables of ``notes/NAME.md``, which are then filled in from results."""
    if options.note is None:
        return False
    fill(NOTES / f"{name}.md", sections(find(options.note, options.out, name)))
    return True
