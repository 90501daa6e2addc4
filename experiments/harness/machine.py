"""Which device is measured, and what the numbers were measured on and with."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import re
from typing import Any

import torch

from experiments.harness.revision import refuse, this_revision
from pagedopt.system import machine

PACKAGES = (
    "torch", "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "bitsandbytes", "torchao",
    "torch-optimi",
)  # fmt: skip


def chosen_device(name: str) -> torch.device:
    """The device, with its index, made current.  The revision is looked at, too, before anything is measured.

    Raises:
        SystemExit: the device is not here, or the variable that names the revision holds something else.
    """
    this_revision()
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not found:
        refuse(f"--device is {name!r}; use cuda, cuda:N or cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        refuse(f"--device is {name!r}, and torch sees no CUDA device here; use --device cpu")
    index = int(found[1] or 0)
    if index >= torch.cuda.device_count():
        refuse(f"--device is {name!r}; there are {torch.cuda.device_count()} CUDA devices here, from cuda:0 on")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def label(device: torch.device) -> str:
    """The device in a file name: "nvidia-h200", "cpu"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def now() -> str:
    """The time of day, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def conditions() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    about = {"when": now(), "versions": versions, "driver": machine.driver_version()}
    return {**machine.describe(), **about, **this_revision()}
