"""Calls of the driver whose arguments stay the same, made in one call of the compiled extension where there is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..look import compiled_look
from .driver import call, check_code

#: The name of a driver's function, and at most four arguments: addresses, handles and numbers.
Call = tuple[str, *tuple[int, ...]]


class Calls:
    """Calls in their order; a call of this object makes them.

    Args:
        calls: they.
        keeps: what they point to.

    Example:
        >>> wait = Calls([("cuStreamWaitEvent", stream, event, 0)])
        >>> wait()
    """

    __slots__ = ("_calls", "_compiled", "_keeps")

    def __init__(self, calls: Iterable[Call], keeps: object = None) -> None:
        self._calls, self._keeps = tuple(calls), keeps
        self._compiled: Any = None

    def __call__(self) -> None:
        """Make the calls; CudaError if the driver refuses one: those behind it are not made."""
        if self._compiled is None and (extension := extension_with_driver()) is not None:
            self._compiled = extension.Calls(self._calls)
        if self._compiled is None:
            for name, *given in self._calls:
                call(name, *given)
            return
        number, error = self._compiled.make()
        if error:
            check_code(self._calls[number][0], error)


def extension_with_driver() -> Any:
    """Return the compiled extension if it finds the driver; None: it does not, or there is none (yet)."""
    extension = compiled_look()
    return extension if extension is not None and extension.finds_driver() else None


__all__ = ["Call", "Calls", "extension_with_driver"]
