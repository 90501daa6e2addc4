"""C++ names of kernels over lists of plain numbers, and NVRTC, where it can be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pagedopt.formats.floating import of_dtype
from pagedopt.kernels import source
from pagedopt.rules import Rule


def instance(rule: Rule, dtypes: Sequence[torch.dtype], threads: int, kind: str, small_grid: bool = False) -> str:
    """Of a variant of the multi-tensor kernel."""
    return source.instance(rule, tuple(map(of_dtype, dtypes)), threads, kind, small_grid)


def sums_instance(order: int, dtype: torch.dtype, threads: int, kind: str) -> str:
    """Of the kernel that adds the terms of norms."""
    return source.sums_instance(order, of_dtype(dtype), threads, kind)


def nvrtc() -> Any:
    """Its bindings; the test is skipped without them."""
    library = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        library.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return library
