"""The transports by name, and the substitute for one that does not work on a device."""

from __future__ import annotations

import functools
from typing import Any, Literal

from ..system import driver
from ..system.warn import warn_once
from .by_value import HybridTransport, StructTransport
from .ring import ManagedTransport, MappedTransport, MemcpyTransport
from .transport import Transport

#: A name in ``TRANSPORTS``, or any subclass of :class:`Transport`.
TransportOption = Literal["managed", "memcpy", "struct", "hybrid", "mapped"] | type[Transport]

TRANSPORTS: dict[str, type[Transport]] = {
    t.name: t for t in (ManagedTransport, MemcpyTransport, StructTransport, HybridTransport, MappedTransport)
}
DEFAULT: TransportOption = "managed"
#: Substitutes for each that the driver may refuse, in order.
_STAND_INS = {"managed": ("mapped", "memcpy"), "mapped": ("memcpy",)}


def choose(name: str, capabilities: driver.Capabilities) -> tuple[str, str]:
    """Return the transport for ``name`` on a device with ``capabilities``, and why it differs ("" if it does not)."""
    reason = ""
    # Without concurrent access the host must not touch managed memory while any kernel runs.
    if name == "managed" and not (capabilities.managed and capabilities.concurrent_managed):
        name, reason = "mapped", "it has no concurrent managed access (concurrentManagedAccess = 0)"
    if name == "mapped" and not capabilities.mapped:
        name, reason = "memcpy", reason or "it cannot map host memory (canMapHostMemory = 0)"
    return name, reason


def check_transport(transport: Any) -> None:
    """Check that ``transport`` is the name of a transport (else ValueError), or a class of one (else TypeError)."""
    known = ", ".join(sorted(TRANSPORTS))
    if isinstance(transport, str):
        if transport not in TRANSPORTS:
            raise ValueError(
                f"transport is {transport!r}; there are {known}, or a subclass of pagedopt.transports.Transport"
            )
    elif isinstance(transport, Transport):
        name = type(transport).__name__
        raise TypeError(
            f"transport is an object of {name}; give the class here, transport={name}: each device gets one of its own"
        )
    elif not isinstance(transport, type) or not issubclass(transport, Transport) or transport is Transport:
        raise TypeError(
            f"transport is {transport!r}; give a subclass of pagedopt.transports.Transport, or one of {known}"
        )
    elif missing := sorted(transport.__abstractmethods__):
        raise TypeError(
            f"transport {transport.__name__} has no {' and no '.join(missing)}; a transport defines kind and lend"
        )


def create(transport: TransportOption, device: int) -> Transport:
    """Return a transport for a CUDA device; for a name that does not work there its substitute, with one warning."""
    check_transport(transport)
    return TRANSPORTS[_working(transport, device)](device) if isinstance(transport, str) else transport(device)


def shared(transport: TransportOption | Transport, device: int) -> Transport:
    """Return the one such transport per device, for calls that make none of their own; an object: itself."""
    if isinstance(transport, Transport):
        return transport
    check_transport(transport)  # before the cache: a wrong value may not be hashable
    return _shared(transport, device)


_shared = functools.cache(create)


@functools.cache
def _working(name: str, device: int) -> str:
    """Return ``name`` or its substitute: by :func:`choose`, then by trying to allocate such memory."""
    chosen, reason = choose(name, driver.capabilities(device))
    for stand_in in _STAND_INS.get(chosen, ()):
        try:
            TRANSPORTS[chosen].probe(device)
            break
        except driver.CudaError as error:
            chosen, reason = stand_in, str(error)
    if reason:
        text = f"cuda:{device} cannot use {name!r} pointer tables: {reason}. Using {chosen!r}; results are the same"
        warn_once(text, text)
    return chosen
