"""Whether CUDA remembers an error that nobody has been told of."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def assert_clean() -> None:
    """All work has ended without an error, none is kept for the next who asks, and the device computes."""
    torch.cuda.synchronize()
    for path in _runtimes():
        code = ctypes.CDLL(path).cudaGetLastError()  # of this thread; asking clears it
        assert code == 0, f"{path} keeps the error {code}"
    assert float(torch.ones(3, device="cuda").sum()) == 3


def _runtimes() -> set[str]:
    """The CUDA runtimes that this process has loaded: that of torch, and perhaps that of CuPy."""
    words = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return {word[-1] for word in words if "/libcudart" in word[-1]}
