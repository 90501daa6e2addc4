"""What tests on a GPU share."""

import gc

import pytest
import torch

NEEDED = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDED)]


def settled() -> None:
    """All work has ended, and torch has given back what it does not use."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
