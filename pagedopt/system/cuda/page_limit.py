"""Device pages beyond a limit are refused, as the driver refuses them when a card is full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from . import virtual
from .driver import CudaError


def _nothing() -> int:
    return 0


@contextlib.contextmanager
def device_page_limit(nbytes: int, beside: Callable[[], int] = _nothing) -> Iterator[None]:
    """Refuse device pages of ``placement="mapped"`` beyond a limit, to test code that makes room for itself.

    It holds for the whole process.  Limits inside each other all hold.  Pages that are there already stay.

    Args:
        nbytes: bytes that all device pages of this process and what is beside them may hold.
        beside: returns the bytes that others hold now; it is called before every page.

    Raises:
        ValueError: ``nbytes`` is negative.

    Example:
        >>> with device_page_limit(64 << 20):  # doctest: +SKIP
        ...     optimizer.set_device_budget("100%")
        torch.OutOfMemoryError: CUDA out of memory. cuda:0 has no 2,097,152 bytes left for optimizer state …
    """
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; give the bytes that device pages may hold, from 0 on")

    def check(more: int) -> None:
        held, others = sum(virtual.device_pages.values()), beside()
        if held + others + more > nbytes:
            said = f"the limit of {nbytes:,} bytes: device pages hold {held:,}, and beside them are {others:,}"
            raise CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", said)

    virtual.limits.append(check)
    try:
        yield
    finally:
        virtual.limits.remove(check)
