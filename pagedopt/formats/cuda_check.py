"""Compile a format's CUDA text for one element when the format is made, where NVRTC is installed."""

from __future__ import annotations

import functools

from ..kernels.nvrtc import CompileError, compile_cuda
from ..kernels.source import conversions

#: Types of which the kernels have the conversions.
KNOWN = ("float", "double", "half_bits", "bfloat16_bits")
#: Any architecture would do: the text is of no architecture.
ARCH = "sm_80"


@functools.cache
def check_cuda(name: str, cuda_type: str, cuda_text: str, number: str) -> None:
    """Raise ValueError if an element of ``cuda_type`` cannot be loaded as ``number`` ("float") and stored."""
    if cuda_type in KNOWN and not cuda_text:
        return
    try:
        compile_cuda(conversions(name, cuda_type, cuda_text, number), ("convert",), ARCH)
    except CompileError as error:
        lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
        raise ValueError(
            f"format {name!r}: its CUDA text does not load or store a {cuda_type or '(no cuda_type)'}: {lines[0]}"
        ) from None
    except (ImportError, RuntimeError):  # cuda-bindings raises the second where the library is missing
        return


__all__ = ["check_cuda"]
