"""The examination: facts, trials and rates, and the notes and problems that follow from them."""

from __future__ import annotations

import os
from typing import Any

import torch

from ... import __version__
from ...kernels import team
from ...planning import rates
from ...system import machine
from . import facts, trial


def examine(device: torch.device, quick: bool = False) -> dict[str, Any]:
    """Return a report on this machine as JSON values.

    Args:
        device: whose rates are measured, and for which a placement is chosen.
        quick: do not measure rates.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    gpu = device if device.type == "cuda" else torch.device("cuda:0" if torch.cuda.is_available() else "cuda")
    about, packages = machine.describe(), facts.package_versions()
    tried = [*trial.try_placements(gpu), *trial.try_placements(torch.device("cpu"))]
    for one in tried:  # if its packages are missing, that is the problem to report, and not each placement
        needs = facts.NEEDED[torch.device(one["device"]).type]
        one["promised"] = one["promised"] and all(packages[name] for name in needs)
    step = trial.try_step(device)
    found, failures = None, list[str]()
    if not quick:
        try:
            found = rates.measure(device)
        except (RuntimeError, MemoryError) as error:
            failures.append(f"rates could not be measured: {error}")
    return {
        "pagedopt": __version__,
        "system": {name: about[name] for name in ("platform", "python", "processor", "cores")},
        "packages": packages,
        "look": facts.look(),  # after a step, which has begun the test of its parts
        "driver": machine.driver_version(),
        "cuda": facts.cuda_versions(),
        "cards": facts.cards(),
        "host": facts.host_memory(),
        "state_folder": facts.folder(),
        "device": str(device),
        "rates": found and found.as_dict(),
        "placements": tried,
        "step": step,
        "choices": trial.choices(device, tried, found),
        "notes": notes(device, packages),
        "problems": problems(device, packages, tried, step) + failures,
    }


def notes(device: torch.device, packages: dict[str, str | None]) -> list[str]:
    """Return remarks: worth knowing, but no failures."""
    out = [f"{name} is not installed: {facts.PACKAGES[name]}" for name, version in packages.items() if not version]
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        out.append("NUMBA_DISABLE_JIT is set: the first step of parameters on a CPU turns Numba's compiler on again")
    if not torch.cuda.is_available():
        if machine.driver_version() is None:
            out.append("no NVIDIA driver found: parameters on a CPU only")
        elif torch.version.cuda is None:
            out.append(f"there is an NVIDIA driver; torch {torch.__version__} is built without CUDA: notes/setup.md")
        else:
            out.append(f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU; is one visible?")
    elif device.type == "cpu":
        out.append("there is a GPU; --device cuda examines it")
    if device.type == "cpu" and team.openmp() is None:
        out.append("steps on a CPU take one thread: this build of torch has no OpenMP with GCC's interface (libgomp)")
    return out


def problems(
    device: torch.device, packages: dict[str, str | None], tried: list[dict[str, Any]], step: dict[str, Any]
) -> list[str]:
    """Return failures: of things that should work here."""
    out = [
        f"{name} is missing, which parameters on {device.type} need: {facts.PACKAGES[name]}; `make setup` installs it"
        for name in facts.NEEDED[device.type]
        if not packages[name]
    ]
    if not step["works"] and not out:
        out.append(f"a step of AdamW on {device} failed: {step['reason']}")
    broken = [t for t in tried if t["promised"] and not t["works"]]
    return out + [f"placement {t['placement']!r} should work on {t['device']}: {t['reason']}" for t in broken]
