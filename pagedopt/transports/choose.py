"""Which transports there are, and what is used where one does not work."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal

from ..system.cuda import driver
from ..system.log import log
from ..system.warn import outside
from .by_value import HybridTransport, StructTransport
from .pool import PooledTransport
from .ring import ManagedTransport, MappedTransport, MemcpyTransport, RingTransport
from .transport import Transport

#: A name of those below, or any subclass of :class:`Transport`.
Kind = Literal["managed", "memcpy", "struct", "hybrid", "mapped"] | type[Transport]

TRANSPORTS: dict[str, type[Transport]] = {
    t.name: t for t in (ManagedTransport, MemcpyTransport, StructTransport, HybridTransport, MappedTransport)
}
#: What to try in the stead of each that may be refused, in order.
_STAND_INS = {"managed": ("mapped", "memcpy"), "mapped": ("memcpy",)}


def choose(name: str, capabilities: driver.Capabilities) -> tuple[str, str]:
    """Policy: the transport to use for ``name`` on a device with ``capabilities``, and why it differs ("" if not).

    A managed table needs concurrent access: without it the host may not touch managed memory while any kernel runs.
    """
    reason = ""
    if name == "managed" and not (capabilities.managed and capabilities.concurrent_managed):
        name, reason = "mapped", "it has no concurrent managed access (concurrentManagedAccess = 0)"
    if name == "mapped" and not capabilities.mapped:
        name, reason = "memcpy", reason or "it cannot map host memory (canMapHostMemory = 0)"
    return name, reason


def check_transport(kind: Any) -> None:
    """Refuse what names no transport and is no class of them.

    Raises:
        ValueError: there is no transport of that name.
        TypeError: it is neither a name nor a class of transports, or a class without ``kind`` or ``lend``.
    """
    known = ", ".join(sorted(TRANSPORTS))
    if isinstance(kind, str):
        if kind not in TRANSPORTS:
            raise ValueError(
                f"transport is {kind!r}; there are {known}, or a subclass of pagedopt.transports.Transport"
            )
    elif isinstance(kind, Transport):
        name = type(kind).__name__
        raise TypeError(
            f"transport is an object of {name}; give the class here, transport={name}: each device gets one of its own"
        )
    elif not isinstance(kind, type) or not issubclass(kind, Transport) or kind is Transport:
        raise TypeError(f"transport is {kind!r}; give a subclass of pagedopt.transports.Transport, or one of {known}")
    elif missing := sorted(kind.__abstractmethods__):
        raise TypeError(
            f"transport {kind.__name__} has no {' and no '.join(missing)}; a transport defines kind and lend"
        )


def over_link(kind: Kind | Transport) -> bool:
    """Whether kernels read the tables of a transport over the link."""
    return (TRANSPORTS[kind] if isinstance(kind, str) else kind).over_link


def create(kind: Kind, device: int) -> Transport:
    """A transport for CUDA device ``device``: of a name, the nearest that works there, with one warning.

    Raises:
        ValueError, TypeError: see :func:`check_transport`.
    """
    check_transport(kind)
    return TRANSPORTS[_working(kind, device)](device) if isinstance(kind, str) else kind(device)


def pooled(kind: Kind, device: int) -> Transport:
    """:func:`create` for a table that no graph captures: if it is small, it travels through memory that all share.

    Raises:
        ValueError, TypeError: see :func:`check_transport`.
    """
    way = create(kind, device)
    return PooledTransport(way) if isinstance(kind, str) and isinstance(way, RingTransport) else way


def shared(kind: Kind | Transport, device: int) -> Transport:
    """The one that all use who prepare nothing: its tables are used again from call to call.  An object is its own.

    Raises:
        ValueError, TypeError: see :func:`check_transport`.
    """
    if isinstance(kind, Transport):
        return kind
    check_transport(kind)  # what is none may not even be hashed
    return _shared(kind, device)


@functools.cache
def _shared(kind: Any, device: int) -> Transport:
    return create(kind, device)


@functools.cache
def _working(name: str, device: int) -> str:
    """What works in the place of ``name``: by :func:`choose`, and by asking the driver for such memory, once."""
    chosen, reason = choose(name, driver.capabilities(device))
    for stand_in in _STAND_INS.get(chosen, ()):
        try:
            TRANSPORTS[chosen].probe(device)
            break
        except driver.CudaError as error:
            chosen, reason = stand_in, str(error)
    if reason:
        text = f"cuda:{device} cannot use {name!r} pointer tables: {reason}. Using {chosen!r}; results are the same"
        log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=outside())
    return chosen
