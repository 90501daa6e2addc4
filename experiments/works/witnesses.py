"""Bytes that a call moves, by two witnesses: Inductor's own count, and the GPU's counters under ``ncu``.

The third is a model: the operands of each operator (:func:`experiments.works.dispatch.operands`).  A process that
``ncu`` watches is one of its own, in which no time is taken: kernels run one by one, behind caches that are emptied.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.harness.child import ROOT
from experiments.harness.rows import Row
from experiments.harness.run import Run

#: A name, and what makes something to call.
Works = Iterator[tuple[str, Callable[[], Callable[[], object]]]]
NCU = "/usr/local/cuda/bin/ncu"
#: What is counted of each kernel.  What a kernel has written and the L2 still holds at its end is not in the bytes that
#: DRAM took; the sectors (32 bytes) that SMs gave to the L2 have it.
READ, WRITTEN, SECTORS = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
METRICS = (READ, WRITTEN, SECTORS)
#: The kernel of ``torch.cuda._sleep``, which stands in front of each work's own.
MARK = "spin_kernel"
COUNTED, FAILED, DONE = "counted: ", "failed: ", "all works were called"
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from experiments.works.witnesses import serve; serve(*sys.argv[2:])"
)


@contextlib.contextmanager
def inductor() -> Iterator[Row]:
    """``bytes`` and ``kernels`` that Inductor counts of what it compiles inside, there when the block ends.

    Bytes are those of the buffers that its kernels read and write; None where this torch does not count them.
    """
    from torch._inductor import config, metrics

    found: Row = {"bytes": None, "kernels": None}
    torch._dynamo.reset()
    metrics.reset()
    with config.patch(force_disable_caches=True):
        # Without this log nothing is counted; a torch that has none refuses it.  It goes where stderr is for now.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ValueError):
            torch._logging.set_logs(inductor_metrics=True)
        try:
            yield found
        finally:
            torch._logging.set_logs()
    found["bytes"] = getattr(metrics, "num_bytes_accessed", None) or None
    found["kernels"] = getattr(metrics, "generated_kernel_count", None)


def of_hardware(run: Run, works: Callable[..., Works], *arguments: Any) -> dict[str, Row]:
    """:func:`hardware` on the run's device, where counters may be read; elsewhere none, and a line says why."""
    if run.device.type == "cpu":
        run.left_out.append("hardware counters: need a GPU")
        return {}
    try:
        found, failed = hardware(works, str(run.device), *arguments)
    except RuntimeError as error:
        run.leave_out(str(error))
        return {}
    for line in failed:
        run.leave_out(f"hardware counters, {line}")
    return found


def hardware(works: Callable[..., Works], *arguments: Any, limit: float = 150) -> tuple[dict[str, Row], list[str]]:
    """What a GPU's counters count of works, by name, and what the works that failed have said.

    Args:
        works: a function of a module, called with ``arguments`` (plain values) in a process that ``ncu`` watches.
        limit: seconds after which it is stopped.

    Raises:
        RuntimeError: ``ncu`` is not here, may not read the counters, or did not end; with its last words.
    """
    ncu = shutil.which("ncu") or (NCU if Path(NCU).exists() else None)
    if ncu is None:
        raise RuntimeError("hardware counters: ncu is not here")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "all",
            "--profile-from-start", "off", "--target-processes", "application-only", "--log-file", str(log),
            "--metrics", ",".join(METRICS), sys.executable, "-P", "-c", BOOT, str(ROOT),
            works.__module__, works.__name__, json.dumps(arguments),
        ]  # fmt: skip
        said = ended(command, limit)
        text = log.read_text(errors="replace") if log.exists() else ""
    lines = said.splitlines()
    names = [line.removeprefix(COUNTED) for line in lines if line.startswith(COUNTED)]
    failed = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
    found = counts(text or said, names)
    if DONE not in lines:  # it may have been within the last work
        found = {name: found[name] for name in names[:-1]}
        failed.append(f"works behind {(names or ['the first'])[-1]}: the process ended: {(lines or [''])[-1][:200]}")
    return found, failed


def ended(command: Sequence[str], limit: float) -> str:
    """What a process and those it started have printed.

    Raises:
        RuntimeError: they did not end in time.
    """
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"hardware counters: ncu has not ended in {limit:g} s") from None


def counts(text: str, names: Sequence[str]) -> dict[str, Row]:
    """Of ``ncu``'s report the bytes of each work: ``read``, ``written`` (by SMs) and both, ``in_dram`` (of those
    written, when its kernels ended); and its ``kernels``.

    Raises:
        RuntimeError: nothing was counted, as ``ncu`` says, or not each work has its mark.
    """
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        words = [line for line in lines if line.startswith("==ERROR==")] or lines[-1:] or ["it said nothing"]
        raise RuntimeError(f"hardware counters: {' '.join(words)[:300]}")
    groups: list[list[dict[str, str]]] = []
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):  # others are ncu's own
        if MARK in row["Kernel Name"]:
            groups.append([])
        elif row["ID"] and groups:  # the line of units has none
            groups[-1].append(row)
    if len(groups) != len(names):
        raise RuntimeError(f"hardware counters: {len(names)} works were counted, {len(groups)} have their mark")
    return {name: total(kernels) for name, kernels in zip(names, groups, strict=True)}


def total(kernels: Sequence[dict[str, str]]) -> Row:
    """Of the kernels of a work; None of what was not counted."""

    def of(metric: str) -> int | None:
        cells = [(kernel.get(metric) or "").replace(",", "") for kernel in kernels]
        known = [round(float(cell)) for cell in cells if cell.replace(".", "", 1).isdigit()]
        return sum(known) if known and len(known) == len(cells) else None

    read, in_dram, sectors = map(of, METRICS)
    written = in_dram if sectors is None else 32 * sectors
    both = None if read is None or written is None else read + written
    return {"bytes": both, "read": read, "written": written, "in_dram": in_dram, "kernels": len(kernels)}


def serve(module: str, name: str, arguments: str) -> None:
    """In the process that is watched: each work is warmed up, and then called once where kernels are counted."""
    from torch.cuda import profiler

    for work, make in getattr(importlib.import_module(module), name)(*json.loads(arguments)):
        try:
            run = make()
            for _ in range(3):
                run()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{FAILED}{work}: {type(error).__name__}: {str(error)[:200]}".replace("\n", " "), flush=True)
            continue
        print(COUNTED + work, flush=True)
        profiler.start()
        torch.cuda._sleep(100)
        run()
        torch.cuda.synchronize()
        profiler.stop()
        del run
        torch.cuda.empty_cache()
    print(DONE, flush=True)
