"""What this machine is and what is installed on it: names and versions, as plain values."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

_DRIVER = Path("/proc/driver/nvidia/version")
#: Far more threads than these, and the libraries that start them crash.
MOST_THREADS = max(64, os.cpu_count() or 1)


def describe() -> dict[str, Any]:
    """What numbers were measured on: system, processor, GPU and versions, as plain values."""
    gpu = torch.cuda.is_available()
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "numpy": np.__version__,
    }


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def name(device: torch.device) -> str:
    """The machine in a line: its GPU, if ``device`` is one, and its processor."""
    parts = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    return ", ".join([*parts, processor()])


def driver_version() -> str | None:
    """The version of the NVIDIA kernel driver, "580.65.06"; None where there is none to be seen."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", _DRIVER.read_text().partition("\n")[0])
    except OSError:
        found = None
    if found:
        return found[1]
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if shutil.which(query[0]) is None:
        return None
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().partition("\n")[0] or None) if done.returncode == 0 else None
