"""Bytes that a call moves, by three witnesses: a model (the operands of each operator), Inductor's own count, and the
GPU's counters under ``ncu``.

A process that ``ncu`` watches is one of its own, in which no time is taken: kernels run one by one, behind caches that
are emptied.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.child import ROOT
from experiments.clock import Case
from experiments.device import chosen_device
from experiments.lab import Row, Run
from experiments.works import weight
from experiments.works.dispatch import Dispatched
from experiments.works.models import COPY

Call = Callable[[], Any]
#: Names of ways.
EAGER, BY_COMPILER = "eager", "torch.compile"
#: Another order of sums is off by less, in units of the largest number.
WRONG = 1e-2
#: Bytes that DRAM gave, and sectors (32 bytes) that processors handed to the L2: what the L2 still holds when a kernel
#: ends is not in the bytes that DRAM took.
READ, SECTORS = "dram__bytes_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
#: The kernel of ``torch.cuda._sleep``, which stands in front of each way's own.
MARK = "spin_kernel"
COUNTED, DONE, SECONDS = "counted: ", "all were called", "200"
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from experiments.works.witnesses import serve; serve(*sys.argv[2:])"
)


@dataclass(frozen=True)
class Way:
    """How something is done.

    Attributes:
        due: bytes that it must move, of each unit; None: that is what is asked.
        compiled: whether Inductor makes it.
        seen: whether torch dispatches its operators, or else it is a kernel that reads and writes each operand once.
    """

    make: Callable[[], Call]
    due: int | None = None
    compiled: bool = False
    seen: bool = True


#: By work: of a device, and whether toys will do, what bytes are told in units of, and the ways.
Works = Mapping[str, Callable[[torch.device, bool], tuple[int, dict[str, Way]]]]


def witnessed(run: Run, module: str, works: Works) -> Iterator[Row]:
    """A row per work and way: bytes by each witness and at the peak of a call, kernels, times (µs).

    The first way but a copy is the one whose numbers are right.

    Args:
        module: the one whose ``WORKS`` these are.
    """
    hardware = of_hardware(run, module)
    for work, prepare in run.each(works.items()):
        unit, ways = prepare(run.device, run.quick)
        cases, seen, exact = [], {}, None
        for name, way in ways.items():
            if way.compiled and run.quick and run.device.type == "cpu":
                run.left_out.append(f"{work}, {name}: takes a compiler and tens of seconds")
                continue
            with run.attempt(f"{work}, {name}", (Exception,)):
                call, known = by_torch(way, unit, run.device)
                if name != COPY and isinstance(found := call(), torch.Tensor):
                    part = found.flatten()[:4096].clone()
                    exact = part if exact is None else exact
                    assert (part - exact).abs().max() <= WRONG * exact.abs().max(), "it gives other numbers"
                seen[name] = {**known, **dict.fromkeys(("ncu", "ncu_read")), **hardware.get(f"{work}, {name}", {})}
                cases.append(Case(name, call))
        for row in run.time(cases, work=work, unit=unit, device=run.device.type):
            yield {**row, "due": ways[row["case"]].due, **seen[row["case"]]}


def by_torch(way: Way, unit: int, device: torch.device) -> tuple[Call, Row]:
    """A way, called a few times; its bytes by the model, where it is not the compiler's choice, and by Inductor; its
    kernels by Inductor, or its operators."""
    with inductor() if way.compiled else contextlib.nullcontext(Row()) as found:
        call = way.make()
        for _ in range(3):
            call()
    model, kernels = None if way.compiled else (way.due or 0) * unit, found.get("kernels")
    if way.seen and not way.compiled:
        with Dispatched() as operators:
            call()
        model, kernels = operators.bytes, operators.by_name.total()
    return call, {
        "model": model, "inductor": found.get("bytes"), "kernels": kernels, "extra": weight.extra(call, device),
    }  # fmt: skip


@contextlib.contextmanager
def inductor() -> Iterator[Row]:
    """``bytes`` that the kernels read and write which Inductor compiles inside, and how many, there when the block
    ends."""
    from torch._inductor import config, metrics

    found = Row()
    metrics.reset()
    with config.patch(force_disable_caches=True):
        # Without this log nothing is counted.  It goes where stderr is for now.
        with contextlib.redirect_stderr(io.StringIO()):
            torch._logging.set_logs(inductor_metrics=True)
        try:
            yield found
        finally:
            torch._logging.set_logs()
    found |= {"bytes": metrics.num_bytes_accessed, "kernels": metrics.generated_kernel_count}


def of_hardware(run: Run, module: str) -> dict[str, Row]:
    """What a GPU's counters count of a module's ``WORKS``, by work and way; a line says what they cannot count."""
    if run.device.type == "cpu":
        run.left_out.append("hardware counters: need a GPU")
        return {}
    with run.attempt("hardware counters"), tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            "timeout", "--signal=KILL", SECONDS, shutil.which("ncu") or "/usr/local/cuda/bin/ncu", "--csv",
            "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "all",
            "--profile-from-start", "off", "--target-processes", "application-only", "--log-file", str(log),
            "--metrics", f"{READ},{SECTORS}", sys.executable, "-P", "-c", BOOT, str(ROOT),
            module, str(run.device), "quick" if run.quick else "",
        ]  # fmt: skip
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        said, report = done.stdout.splitlines(), log.read_text(errors="replace").splitlines() if log.exists() else []
        if DONE not in said:
            raise RuntimeError(why_not(done.returncode, report, said))
        return counts(report, [line.removeprefix(COUNTED) for line in said if line.startswith(COUNTED)])
    return {}


def why_not(code: int, report: Sequence[str], said: Sequence[str]) -> str:
    """Why the process was not watched to its end: what ``ncu`` says of itself is in its report, not in the output.

    >>> why_not(9, ["==PROF== Profiling", "==ERROR== LaunchFailed"], ["counted: square, eager"])
    'ncu shut down the process that it watched: LaunchFailed'
    """
    if code in (-9, 137):  # timeout ends itself by the signal that it sends
        return f"ncu was stopped after {SECONDS} s"
    ended = "ncu shut down the process that it watched" if code == 9 else f"ncu ended with {code}"
    return f"{ended}: {errors_in(report) or ' '.join(said[-3:])}"


def errors_in(report: Sequence[str]) -> str:
    """What ``ncu`` calls an error."""
    return " ".join(line.removeprefix("==ERROR== ") for line in report if line.startswith("==ERROR=="))[:600]


def counts(report: Sequence[str], names: Sequence[str]) -> dict[str, Row]:
    """Of ``ncu``'s report what is behind each mark: kernels, bytes read and written (``ncu``), and read (``ncu_read``).

    Raises:
        RuntimeError: not each name has its mark, as where counters may not be read; with what ``ncu`` says.
    """
    groups: list[Row] = []
    for row in csv.DictReader(line for line in report if line.startswith('"')):  # others are ncu's own
        if MARK in row["Kernel Name"]:
            groups.append({"ncu": 0, "ncu_read": 0, "kernels": 0})
        elif row["ID"] and groups:  # the line of units has none
            read, sectors = (round(float(row[metric].replace(",", ""))) for metric in (READ, SECTORS))
            groups[-1]["ncu"] += read + 32 * sectors
            groups[-1]["ncu_read"] += read
            groups[-1]["kernels"] += 1
    if len(groups) != len(names):
        raise RuntimeError(f"{len(names)} ways were called, {len(groups)} have their mark. {errors_in(report)}")
    return dict(zip(names, groups, strict=True))


def serve(module: str, device: str, quick: str) -> None:
    """In the process that is watched: each way is warmed up, and then called once where kernels are counted."""
    from torch.cuda import profiler

    works: Works = importlib.import_module(module).WORKS
    for work, prepare in works.items():
        for name, way in prepare(chosen_device(device), bool(quick))[1].items():
            if name == COPY:
                continue  # counters count kernels, no copies
            with contextlib.suppress(Exception):  # which is told where it is timed
                call = way.make()
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
                print(f"{COUNTED}{work}, {name}", flush=True)
                profiler.start()
                torch.cuda._sleep(100)
                call()
                torch.cuda.synchronize()
                profiler.stop()
                del call
            torch.cuda.empty_cache()
    print(DONE, flush=True)
