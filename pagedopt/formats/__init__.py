"""Choice 2: how one list of tensors is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_names import attach

if TYPE_CHECKING:
    from .floating import FORMATS as FORMATS
    from .format import Column as Column
    from .format import ElementFormat as ElementFormat
    from .format import Format as Format
else:  # a type checker would take any name for one of these
    __getattr__, __dir__, __all__ = attach(
        __name__, {".format": ("Column", "ElementFormat", "Format"), ".floating": ("FORMATS",)}
    )
