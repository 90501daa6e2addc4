"""The CUDA text and its CPU twin: sources, compilers, launchers.  What a Numba kernel of one's own is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_names import attach

if TYPE_CHECKING:
    from .numba_numbers import pointer as pointer
else:  # a type checker would take any name for one of these
    __getattr__, __dir__, __all__ = attach(__name__, {".numba_numbers": ("pointer",)})
