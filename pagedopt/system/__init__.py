"""What depends on the machine or on private interfaces: CUDA driver, C library, files, Numba, signals, log."""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"pagedopt needs Linux, and this is {sys.platform}: it maps memory and files as Linux does. On Windows use "
        "WSL 2; elsewhere torch.optim (README.md says what works where)",
        name="pagedopt",
    )
