"""Measure what ``README.md`` and ``notes/usage.md`` quote, at one commit: ``python -m experiments campaign``.

Each question is measured in a process of its own, which joins its rows to the file in ``experiments/results``.  A
question that this commit has answered is not asked again, so a campaign that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import kept, readme
from experiments.device import chosen_device, refuse
from experiments.works.finetunes import BACKWARD, RESIDENT

INTERRUPTED = 130
#: What is quoted, the front page first: a question, and options where only some of it is.
QUOTED: Sequence[tuple[str, Sequence[str]]] = (
    ("seven_billion", ("--batches", "4", "--cases", ",".join((*readme.FINETUNES, readme.PUSHED_OUT)))),
    ("seven_billion", ("--batches", "1", "--cases", f"{RESIDENT},{BACKWARD}")),
    *((question, ()) for question in ("in_16_bits", "in_8_bits", "close_to_a_copy", "captured_step")),
    *((question, ()) for question in ("link", "sweep", "rivals", "memory")),
)


def options(parser: argparse.ArgumentParser) -> None:
    """As a single experiment has them."""
    parser.add_argument("--quick", action="store_true", help="toys, into runs/quick: whether all of it runs")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")


def main(quick: bool, device: str) -> int:
    """Measure what is missing; returns 0, 1 if a question failed or missed a bar, 130 if one was interrupted.

    Raises:
        SystemExit: the device is not here, or the commit is not known, or files differ from it.
    """
    where = chosen_device(device)
    if kept.this_revision()["dirty"] is not False and not quick:
        refuse(f"{kept.words(kept.this_revision())}: pages quote a clean commit; PAGEDOPT_COMMIT names it without git")
    folder, code = kept.ROOT / "runs" / "quick" if quick else kept.KEPT, 0
    for question, some in QUOTED:
        if not some and answered(folder, kept.label(where), question):
            print(f"{question}: is there")
            continue
        command = [sys.executable, "-m", "experiments", question, "--merge", "--quick" if quick else "--keep"]
        begin = time.perf_counter()
        code = max(code, subprocess.run([*command, "--device", device, *some], check=False).returncode)
        print(f"{question}: {time.perf_counter() - begin:.0f} s", flush=True)
        if code == INTERRUPTED:
            break
    return code


def answered(folder: Path, device: str, question: str) -> bool:
    """Whether all of a question is stored, of this commit; one that goes on by itself knows better."""
    experiment = next(each for each in kept.every() if question in each.questions)
    path = folder / f"{experiment.name}-{device}.json"
    part = json.loads(path.read_text())["parts"].get(question) if path.exists() else None
    return part is not None and part["complete"] and kept.this_revision().items() <= part.items()
