"""NVRTC, where it can be loaded."""

from typing import Any

import pytest


def nvrtc() -> Any:
    """Its bindings; the test is skipped without them."""
    library = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        library.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return library
