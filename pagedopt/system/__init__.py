"""Every call that leaves Python: the CUDA driver, the C library, files, processes, compiled code."""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"pagedopt needs Linux, and this is {sys.platform}: it maps memory and files as Linux does. On Windows use "
        "WSL 2; elsewhere torch.optim (README.md says what works where)",
        name="pagedopt",
    )
