"""The option ``--device`` of the commands."""

from __future__ import annotations

import torch

from .errors import UsageError


def pick_device(name: str | None) -> torch.device:
    """Return the device called ``name``. None means the GPU if there is one, else the CPU.

    Raises:
        UsageError: the name is neither ``cpu`` nor ``cuda[:N]``, or this machine has no such GPU.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: must be cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")  # torch accepts cpu:1 too, and there is only one CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = f"torch {torch.__version__} sees {count} GPU{'' if count == 1 else 's'} here"
        if torch.version.cuda is None:
            found = f"torch {torch.__version__} is a CPU build; notes/setup.md says how to have one for CUDA"
        raise UsageError(f"--device {name}: {found}. Use another device, or --device cpu.")
    return device
