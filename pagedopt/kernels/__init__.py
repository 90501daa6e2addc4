"""Kernels: CUDA and Numba source text, compilers and launchers.  Public: ``pointer``, for Numba kernels of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .numba_numbers import pointer as pointer
else:  # hidden from type checkers: with a __getattr__ they would accept any name

    def __getattr__(name):
        """Import Numba with the first use of ``pointer``."""
        if name != "pointer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; did you mean pointer?", name=name)
        from .numba_numbers import pointer

        return pointer

    def __dir__():
        return __all__


__all__ = ["pointer"]
