"""Formats: how one list of tensors is stored.  Public: all that a format of your own needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.names import attach

if TYPE_CHECKING:
    from .choice import Moment as Moment
    from .floating import FORMATS as FORMATS
    from .format import Column as Column
    from .format import ElementFormat as ElementFormat
    from .format import Format as Format
else:  # hidden from type checkers: with a __getattr__ they would accept any name
    __getattr__, __dir__, __all__ = attach(
        __name__, {".choice": ("Moment",), ".format": ("Column", "ElementFormat", "Format"), ".floating": ("FORMATS",)}
    )
