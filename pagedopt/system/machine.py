"""Names and versions of this machine and of what is installed on it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")
#: The most threads a user may ask for: with far more, the libraries that start them crash.
MAX_THREADS = max(64, os.cpu_count() or 1)


def processor() -> str:
    """Return the processor's name."""
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"^model name[^:\n]*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def name(device: torch.device) -> str:
    """Return one line for the machine: its GPU, if ``device`` is one, and its processor."""
    return f"{torch.cuda.get_device_name(device)}, {processor()}" if device.type == "cuda" else processor()


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel driver, for example "580.65.06"; None if there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", _DRIVER.read_text().partition("\n")[0]):
            return found[1]
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip().partition("\n")[0] or None
    return None
