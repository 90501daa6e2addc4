"""Transports: how a pointer table reaches a kernel.  Public: all that a transport of your own needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.names import attach

if TYPE_CHECKING:
    from ..tables.layout import HostTable as HostTable
    from ..tables.layout import Span as Span
    from .by_value import HybridTransport as HybridTransport
    from .by_value import StructTransport as StructTransport
    from .ring import ManagedTransport as ManagedTransport
    from .ring import MappedTransport as MappedTransport
    from .ring import MemcpyTransport as MemcpyTransport
    from .transport import Argument as Argument
    from .transport import Lent as Lent
    from .transport import Transport as Transport
else:  # hidden from type checkers: with a __getattr__ they would accept any name
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "..tables.layout": ("HostTable", "Span"),
            ".by_value": ("HybridTransport", "StructTransport"),
            ".ring": ("ManagedTransport", "MappedTransport", "MemcpyTransport"),
            ".transport": ("Argument", "Lent", "Transport"),
        },
    )
