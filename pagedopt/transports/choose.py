"""Which transports there are, and what is used where one does not work."""

from __future__ import annotations

import functools
import warnings

from ..system import driver
from .by_value import HybridTransport, StructTransport
from .ring import ManagedTransport, MappedTransport, MemcpyTransport
from .transport import Transport

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


def create(name: str, device: int) -> Transport:
    """The transport ``name`` for CUDA device ``device``, or the nearest that works there, with one warning.

    Raises:
        ValueError: there is no transport of that name.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; there are {', '.join(sorted(TRANSPORTS))}")
    return TRANSPORTS[_working(name, device)](device)


@functools.cache
def shared(name: str, device: int) -> Transport:
    """The one that all use who prepare nothing: its tables are used again from call to call."""
    return create(name, device)


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
        warnings.warn(
            f"cuda:{device} cannot use {name!r} pointer tables: {reason}. Using {chosen!r}; results are the same",
            RuntimeWarning,
            stacklevel=3,
        )
    return chosen
