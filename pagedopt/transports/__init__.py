"""Transports: how a pointer table reaches a kernel.  Public: all that a transport of your own needs."""

from ..tables.layout import HostTable, Span
from .by_value import HybridTransport, StructTransport
from .ring import ManagedTransport, MappedTransport, MemcpyTransport
from .transport import Argument, Lent, Transport

__all__ = [
    "Argument", "HostTable", "HybridTransport", "Lent", "ManagedTransport", "MappedTransport", "MemcpyTransport",
    "Span", "StructTransport", "Transport",
]  # fmt: skip
